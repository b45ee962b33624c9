"""What `HQMQTensor.__torch_dispatch__` does: some ops on packed buffers, all others dense.

A native op returns NotImplemented where it does not apply (content not packed, another dim, ...).
Then `run_dense` takes over: a read gets a temporary dense tensor, a view or a write the real one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils._pytree import tree_map

from .cell import Cell
from .store import PackedKV

aten = torch.ops.aten


def is_hqmq(value) -> bool:
    """True for `HQMQTensor`."""
    return getattr(value, "_is_hqmq", False)


def dispatch(func, args, kwargs):
    """Run `func`, of which at least one argument is an `HQMQTensor`."""
    native = NATIVE.get(func)
    if native is not None:
        result = native(*args, **kwargs)
        if result is not NotImplemented:
            return result
    aliasing = any(a.alias_info is not None for a in func._schema.arguments)
    if aliasing and _is_composite(func):  # reaches us undecomposed in inference mode
        return func.decompose(*args, **kwargs)
    return run_dense(func, args, kwargs, aliasing)


# -- ordinary operations ---------------------------------------------------------------------------
def _is_composite(func) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


# Ops that only look at shape, dtype and device of their tensor.
_SHAPE_ONLY = {"is_pinned", "is_same_size"}
# In-place changes of shape or strides that carry no tag.
_RESHAPES = {"resize_", "squeeze_"}
# Ops whose arguments were computed from the strides of the wrapper, which are always contiguous.
_STRIDED = {"view", "as_strided", "as_strided_scatter", "_reshape_alias", "_reshape_copy"}


def _check_shape(value, name: str) -> None:
    """Undo what `out=` of another shape does to a dense content: it resizes it."""
    cell = getattr(value, "_hqmq_cell", None)
    if cell is not None and not cell.is_packed and cell.dense.shape != value.shape:
        cell.dense = None
        raise RuntimeError(
            f"hqmq: the result of {name} has another shape than the quantised cache tensor given as"
            " out="
        )


def run_dense(func, args, kwargs, aliasing: bool):
    """`func` on dense tensors: temporary ones where it only reads, else the materialised ones."""
    name = func.overloadpacket.__name__
    schema = func._schema
    shape_only = name.endswith("_like") or name.startswith("new_") or name in _SHAPE_ONLY
    dense: dict[int, torch.Tensor] = {}  # by the id of the wrapper
    wrappers: dict[int, torch.Tensor] = {}  # by the id of the dense tensor
    written: list = []

    def substitute(value, alias_info):
        if not is_hqmq(value):
            return value
        write = alias_info is not None and alias_info.is_write
        if write and (torch.Tag.inplace_view in func.tags or name in _RESHAPES):
            raise RuntimeError(
                f"hqmq: {name} cannot change the shape or storage of a quantised cache tensor;"
                " call .dequantize() first"
            )
        cell = value._hqmq_cell
        if alias_info is not None:
            result = cell.materialize(name)
        elif shape_only:
            result = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        else:
            result = dense[id(value)] if id(value) in dense else cell.read()
        if name in _STRIDED and not result.is_contiguous():
            raise RuntimeError(
                f"hqmq: {name} of a slice that shares the memory of another cache tensor; call"
                " .clone() first"
            )
        dense[id(value)] = result
        wrappers[id(result)] = value
        return result

    def argument(value, spec):
        if spec.alias_info is not None and spec.alias_info.is_write:
            written.append((spec.alias_info.before_set, value))
        return tree_map(lambda v: substitute(v, spec.alias_info), value)

    plain_args = [argument(v, spec) for v, spec in zip(args, schema.arguments, strict=False)]
    named = {spec.name: spec for spec in schema.arguments}
    plain_kwargs = {k: argument(v, named[k]) for k, v in kwargs.items()}
    out = func(*plain_args, **plain_kwargs)
    for _, value in written:
        _check_shape(value, name)
    if not schema.is_mutable:
        return out if not isinstance(out, torch.Tensor) else wrappers.get(id(out), out)

    def returned(value, spec):
        info = spec.alias_info
        if info is None or not info.is_write:
            return value
        return next((v for names, v in written if names == info.before_set), value)

    if isinstance(out, tuple | list) and len(schema.returns) > 1:
        return tuple(returned(v, spec) for v, spec in zip(out, schema.returns, strict=True))
    return returned(out, schema.returns[0]) if schema.returns else out


# -- native operations ---------------------------------------------------------------------------
def slots(index, shape) -> tuple[int, int] | None:
    """The slots that `tensor[index]` keeps, if it is a plain slice of dim 2; else None."""
    items = index if isinstance(index, tuple) else (index,)
    if not all(item is Ellipsis or isinstance(item, slice) for item in items):
        return None
    where = [i for i, item in enumerate(items) if item is Ellipsis] or [len(items)]
    missing = len(shape) - len(items) + (where[0] < len(items))
    if len(where) > 1 or missing < 0:
        return None
    items = [*items[: where[0]], *[slice(None)] * missing, *items[where[0] + 1 :]]
    bounds = [item.indices(size) for item, size in zip(items, shape, strict=True)]
    for dim, (first, last, step) in enumerate(bounds):
        if step != 1 or dim != 2 and (first, last) != (0, shape[dim]):
            return None
    return bounds[2][:2]


def slice_slots(self: torch.Tensor, first: int, last: int) -> torch.Tensor:
    if (first, last) == (0, self.shape[2]):
        return self.detach()
    if first >= last:
        return self.new_empty(*self.shape[:2], 0, self.shape[3])
    return self._with(self._hqmq_cell.crop(first, last))


def _slice(self, dim=0, start=None, end=None, step=1):
    # Elsewhere autograd makes the result a view with `self` as its base, which Dynamo cannot trace.
    if not has_slots(self) or not self.is_inference():
        return NotImplemented
    index = [slice(None)] * self.dim()
    index[dim] = slice(start, end, step)
    bounds = slots(tuple(index), self.shape)
    return NotImplemented if bounds is None else slice_slots(self, *bounds)


def has_slots(value) -> bool:
    """Whether it is packed as one store `[B, H, T, D]`, of which slots can be cut out."""
    return not _not_packed(value) and isinstance(value.packed, PackedKV)


def _is_batch(value, dim) -> bool:
    return dim in (value.packed.batch_dim, value.packed.batch_dim - value.dim())


def _not_packed(value) -> bool:
    return not (is_hqmq(value) and value.is_packed)


def _select(self, index: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return self._with(Cell(self.packed.index_select(index)))


def _index_select(self, dim, index):
    if _not_packed(self) or not _is_batch(self, dim) or is_hqmq(index):
        return NotImplemented
    return _select(self, index)


def _index(self, indices):
    if _not_packed(self) or any(i is not None for i in indices[1:]) or indices[0] is None:
        return NotImplemented
    index, batch = indices[0], self.shape[0]
    if index.dim() != 1 or is_hqmq(index) or not _is_batch(self, 0):
        return NotImplemented
    if index.dtype in (torch.bool, torch.uint8):
        if index.shape[0] != batch:
            return NotImplemented
        index = index.nonzero().flatten()
    return _select(self, torch.where(index < 0, index + batch, index))


def repeat_rows(self, repeats, dim=None, output_size=None):
    if _not_packed(self) or not _is_batch(self, dim):
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        return self._with(Cell(self.packed.repeat_interleave(repeats)))


def _zero_(self):
    cell = self._hqmq_cell
    # A growing store may share its buffers with a longer one (copy on write): not zeroed in place.
    if cell.packed.growing or not cell.is_alone():
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        cell.packed.zero_()
    cell.dense = None
    return self


def _clone(self, *, memory_format=torch.preserve_format):
    if _not_packed(self) or memory_format not in (torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    return self._with(self._hqmq_cell.copy())


def _to_copy(
    self,
    *,
    dtype=None,
    layout=None,
    device=None,
    pin_memory=False,
    non_blocking=False,
    memory_format=None,
):
    # To another dtype: rounded from the values in this one, as of a plain tensor; hence not packed.
    if _not_packed(self) or dtype not in (None, self.dtype):
        return NotImplemented
    if layout not in (None, torch.strided) or memory_format not in (None, torch.preserve_format):
        return NotImplemented
    device = torch.device(device or self.device)
    if device.type == "meta" or pin_memory:
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        return self._with(Cell(self.packed.to(device=device, non_blocking=non_blocking)))


def _copy_(self, source, non_blocking=False):
    if _not_packed(self) or _not_packed(source) or self._hqmq_cell.relatives():
        return NotImplemented
    mine, other = self.packed, source.packed
    if any(getattr(mine, k) != getattr(other, k) for k in ("spec", "shape", "device", "growing")):
        return NotImplemented
    with torch.inference_mode(False), torch.no_grad():
        self._hqmq_cell.packed = other.clone()
    return self


def _record_stream(self, stream):
    if _not_packed(self):
        return NotImplemented
    for part in self.packed.parts:
        for buffer in part.buffers:
            buffer.record_stream(stream)
    return None


NATIVE: dict[object, Callable] = {
    aten.detach.default: lambda self: self.detach(),
    aten.detach_.default: lambda self: self,
    aten.slice.Tensor: _slice,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.repeat_interleave.self_int: repeat_rows,
    aten.repeat_interleave.self_Tensor: repeat_rows,
    aten.zero_.default: _zero_,
    aten.clone.default: _clone,
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten.record_stream.default: _record_stream,
}
