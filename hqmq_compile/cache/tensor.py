"""`HQMQTensor`: what a user finds where a KV cache tensor was.

To PyTorch it is an ordinary tensor `[B, H, T, D]` in the dtype of the cache (or of another layout:
`parts.py`). It is *packed* until
somebody needs its memory: pure reads dequantise temporarily; batch selection, crop, `zero_`,
`clone`, `to`, copying and saving work on the packed buffers. Any other view and any in-place edit
makes it *materialised*, a real dense tensor with true views, so no write is ever lost. `repack`
goes back.

To Dynamo it is a wrapper subclass whose only inner tensor is an empty token, so guards see shape
and dtype, never the state or the packed buffers. Its fake is an ordinary FakeTensor (with an
attribute `_is_hqmq`), so whatever can be traced with a plain cache can be traced with this one.
Compiled code of another backend that reads the memory gets an error: there is no memory.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Self

import torch
from torch._higher_order_ops.flex_attention import flex_attention
from torch.utils._pytree import tree_map_only

from .cell import Cell, rebuild_cell, same_memory
from .parts import Packed
from .tensor_ops import dispatch, has_slots, repeat_rows, slice_slots, slots

# Where torch itself looks at the storage of a wrapper, to describe it to a tracer.
_TRACERS = ("torch._subclasses", "torch._dynamo", "torch._functorch", "torch._inductor", "torch.fx")
OWN_ATTRIBUTES = ("_hqmq_cell", "_hqmq_token")


class HQMQTensor(torch.Tensor):
    """A KV cache tensor kept quantised; see the module docstring.

    `HQMQTensor(packed)` wraps a `PackedKV` or `PackedParts`. Aliases (`detach`, `data`, `t[:]`) share
    their content.
    """

    _is_hqmq = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    _hqmq_cell: Cell
    _hqmq_token: torch.Tensor

    @staticmethod
    def __new__(cls, packed: Packed) -> Self:
        return cls._wrap(Cell(packed))

    def __init__(self, packed: Packed) -> None:
        pass

    @classmethod
    def _wrap(cls, cell: Cell) -> HQMQTensor:
        packed = cell.packed
        self = torch.Tensor._make_wrapper_subclass(
            cls, packed.shape, dtype=packed.dtype, device=packed.device, storage_size=0
        )
        _forbid_address(self)
        self._hqmq_cell = cell
        with torch.inference_mode(False):  # one kind of token, or Dynamo would guard on the mode
            self._hqmq_token = torch.empty(0, device=packed.device)
        return self

    def _with(self, cell: Cell) -> HQMQTensor:
        """A tensor like this one over `cell`; an inference tensor if this one is."""
        with torch.inference_mode(self.is_inference()):
            return self._wrap(cell)

    # -- tracing ---------------------------------------------------------------------------------
    def __tensor_flatten__(self):
        return ["_hqmq_token"], (self.dtype,)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride) -> torch.Tensor:
        token = inner["_hqmq_token"]
        if type(token) is torch.Tensor and not token.is_meta:
            raise RuntimeError("hqmq: a quantised cache tensor cannot be rebuilt from its token")
        fake = token.new_empty_strided(size, stride, dtype=context[0])
        fake._is_hqmq = True
        return fake

    # -- state -----------------------------------------------------------------------------------
    @property
    def is_packed(self) -> bool:
        """True: the content is packed. False: it is a dense tensor that the user may be editing."""
        return self._hqmq_cell.is_packed

    @property
    def packed(self) -> Packed | None:
        """The packed content, None while materialised. For graphs: see `repack` before writing."""
        return self._hqmq_cell.packed if self.is_packed else None

    @property
    def dense(self) -> torch.Tensor | None:
        """The content while materialised, as a plain tensor over the same memory; else None."""
        return None if self.is_packed else same_memory(self._hqmq_cell.dense)

    @property
    def stored_bytes(self) -> int:
        """Bytes that the content takes now."""
        cell = self._hqmq_cell
        return cell.packed.stored_bytes if cell.is_packed else cell.dense.untyped_storage().nbytes()

    @property
    def logical_bytes(self) -> int:
        """Bytes of the plain tensor that this one stands for."""
        return self.numel() * self.element_size()

    @property
    def bits_per_element(self) -> float:
        return 8 * self.stored_bytes / max(self.numel(), 1)

    def dequantize(self) -> torch.Tensor:
        """The content as a plain tensor of its own."""
        cell = self._hqmq_cell
        return cell.packed.dequantize() if cell.is_packed else cell.dense.clone()

    def materialize(self, why: str = "materialize()") -> torch.Tensor:
        """Become dense; returns a plain tensor over the same memory, so writes to it count."""
        self._hqmq_cell.materialize(why)
        return self.dense

    def repack(self, *, writes: bool = True) -> bool:
        """Make the content packed, before a graph uses `packed`. True if it may.

        `writes`: the graph changes `packed` in place; then no slice of this tensor may be alive,
        because a packed slice would not see the change. False, with one logged warning, if a view
        of the dense content is alive: the graph must then use `materialize()`.
        """
        cell = self._hqmq_cell
        if not cell.is_packed and not cell.pack():
            return False
        return not (writes and cell.relatives())

    def _replace(self, packed: Packed) -> None:
        """Take another packed form of the same content (other codec settings)."""
        self._hqmq_cell.packed, self._hqmq_cell.dense = packed, None

    # -- dispatch --------------------------------------------------------------------------------
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})

    # -- python methods that the dispatcher sees too late, or not at all -------------------------
    # A slice made by the dispatcher would be a view with this tensor as its base, and the base
    # would keep the whole cache. Hence `__getitem__` and friends, where autograd is not needed.
    def __getitem__(self, index):
        if self._is_native() and has_slots(self):
            bounds = slots(index, self.shape)
            if bounds is not None:
                return slice_slots(self, *bounds)
        return super().__getitem__(index)

    def narrow(self, dim, start, length):
        if (
            self._is_native()
            and has_slots(self)
            and dim in (2, -2)
            and isinstance(start, int)
            and start >= 0
        ):
            if length > 0 and start + length <= self.shape[2]:
                return slice_slots(self, start, start + length)
        return super().narrow(dim, start, length)

    def repeat_interleave(self, repeats, dim=None, *, output_size=None):
        if self._is_native() and dim is not None:
            result = repeat_rows(self, repeats, dim)
            if result is not NotImplemented:
                return result
        return super().repeat_interleave(repeats, dim, output_size=output_size)

    def _is_native(self) -> bool:
        return self.is_packed and not self.requires_grad

    def detach(self):
        return self._with(self._hqmq_cell)

    @property
    def data(self):
        return self._with(self._hqmq_cell)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        same = (value.shape, value.dtype, value.device) == (self.shape, self.dtype, self.device)
        if not same:
            raise RuntimeError(
                "hqmq: the data of a quantised cache tensor can only be replaced by a tensor of the"
                " same shape, dtype and device; replace the tensor in its cache object instead"
            )
        if isinstance(value, HQMQTensor):
            self._hqmq_cell = value._hqmq_cell
        else:
            self._hqmq_cell = self._hqmq_cell.replaced(same_memory(value))

    def tolist(self):
        return self._hqmq_cell.read().tolist()

    def numpy(self, *, force: bool = False):
        """As `Tensor.numpy`: shares memory with this tensor, which stays dense meanwhile."""
        return self.materialize("numpy()").numpy(force=force)

    def __dlpack__(self, **options):
        """As `Tensor.__dlpack__`: shares memory with this tensor, unless `copy=True`."""
        return self.materialize("__dlpack__()").__dlpack__(**options)

    def __dlpack_device__(self):
        return torch.empty(0, device=self.device).__dlpack_device__()

    def share_memory_(self):
        self._hqmq_cell.materialize("share_memory_()").share_memory_()
        return self

    def is_shared(self) -> bool:
        return (
            self.device.type == "cuda" or not self.is_packed and self._hqmq_cell.dense.is_shared()
        )

    def untyped_storage(self):
        cell = self._hqmq_cell
        if sys._getframe(1).f_globals.get("__name__", "").startswith(_TRACERS):
            return super().untyped_storage()
        if cell.is_packed:
            raise RuntimeError(_NO_ADDRESS.format("storage"))
        return cell.dense.untyped_storage()

    def data_ptr(self) -> int:
        raise RuntimeError(_NO_ADDRESS.format("address"))

    # -- copying, saving, printing -----------------------------------------------------------------
    def _attributes(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k not in OWN_ATTRIBUTES}

    def __copy__(self) -> HQMQTensor:
        other = self.detach()
        other.__dict__.update(self._attributes())
        return other

    def __deepcopy__(self, memo: dict) -> HQMQTensor:
        if id(self) not in memo:
            other = memo[id(self)] = self._with(copy.deepcopy(self._hqmq_cell, memo))
            other.__dict__.update(copy.deepcopy(self._attributes(), memo))
            if self.requires_grad:
                other.requires_grad_()
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        return _rebuild, (self._hqmq_cell, self.requires_grad, self._attributes())

    def __repr__(self, *, tensor_contents=None) -> str:
        state = f"{self.bits_per_element:.2f} bits" if self.is_packed else "materialised"
        return f"HQMQTensor({self._hqmq_cell.read()!r}, {state})"


_NO_ADDRESS = (
    "hqmq: a quantised cache tensor has no {} of dense data, which this code (or a graph that"
    " another torch.compile backend compiled) asks for; call .dequantize() for a plain copy, or"
    " .materialize() for a plain tensor over the same memory"
)


def _rebuild(cell: Cell, requires_grad: bool, attributes: dict) -> HQMQTensor:
    """Unpickle an `HQMQTensor`; allowed in `torch.load(weights_only=True)`."""
    tensor = HQMQTensor(cell.packed)
    tensor._hqmq_cell = cell
    tensor.__dict__.update(attributes)
    return tensor.requires_grad_() if requires_grad else tensor


torch.serialization.add_safe_globals([_rebuild, rebuild_cell])


def _forbid_address(tensor: HQMQTensor) -> None:
    """Make C++ code that asks for the memory fail, where it would read at address 0."""
    if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg"):  # CUDA builds
        storage = torch.Tensor.untyped_storage(tensor)
        torch._C._set_storage_data_ptr_access_error_msg(
            storage._cdata, _NO_ADDRESS.format("memory")
        )
    else:
        torch._C._set_throw_on_mutable_data_ptr(tensor)


@flex_attention.py_impl(HQMQTensor)
def _flex_attention(*args, **kwargs):
    """Eager flex attention: higher-order ops do not reach `__torch_dispatch__`."""
    read = functools.partial(tree_map_only, HQMQTensor, lambda t: t._hqmq_cell.read())
    return flex_attention(*read(args), **read(kwargs))
