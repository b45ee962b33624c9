"""Walkers over views: no-ops, transposes that cancel, repeated heads, slices.

Nothing here adds a guard: sizes are compared only as far as they are known statically.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .nodes import arg, aten, is_tensor, number, rank, same, same_shape, shape, value_of

MAX_INT = 2**63 - 1

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.view_as.default,
    aten.reshape_as.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
    aten.unsqueeze.default,
}
EXPANDS = {aten.expand.default, aten.expand_as.default, aten.broadcast_to.default}
COPIES = {
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
}
CASTS = {
    aten.to.dtype,
    aten.to.device,
    aten.to.other,
    aten.to.dtype_layout,
    aten._to_copy.default,
    aten.type_as.default,
}
PERMUTES = {
    aten.transpose.int,
    aten.permute.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.mT.default,
    aten.movedim.int,
    aten.adjoint.default,
}


def constant(x: Any) -> float | None:
    """The Python number behind a number, or behind a node that is a constant 0-dim tensor."""
    if isinstance(x, (int, float)):
        return float(x)
    if isinstance(x, torch.SymInt):
        return None
    if not isinstance(x, Node):
        return None
    if x.target in CASTS | COPIES:
        return constant(x.args[0])
    if x.target in (aten.full.default, aten.new_full.default) and not any(s != 1 for s in shape(x)):
        return constant(arg(x, "fill_value"))
    if x.target is aten.scalar_tensor.default:
        return constant(x.args[0])
    return None


def is_cast(node: Node) -> bool:
    """Whether the node only changes dtype or device (perhaps to the same)."""
    return node.target in CASTS


def is_noop(node: Node) -> bool:
    """Whether a node equals its first argument in value, shape, dtype and device."""
    if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
        return False
    before, after = value_of(node.args[0]), value_of(node)
    if not isinstance(after, torch.Tensor) or before.dtype != after.dtype:
        return False
    if before.device != after.device:
        return False
    if node.target in COPIES | CASTS:
        return True
    if node.target is aten.slice.Tensor:
        return same_shape(before.shape, after.shape) and arg(node, "step") == 1
    if node.target in (RESHAPES | EXPANDS):
        return same_shape(before.shape, after.shape)
    if node.target in (aten.dropout.default, aten.native_dropout.default):
        return not arg(node, "train") or arg(node, "p") == 0
    if node.target is aten.repeat_interleave.self_int:
        return number(arg(node, "repeats")) == 1 and arg(node, "dim") is not None
    return False


def permutation(node: Node) -> tuple[int, ...] | None:
    """`p` with `out.dim i = in.dim p[i]` for a transposing node, else None."""
    if node.target not in PERMUTES or not is_tensor(node.args[0]) or "hqmq_part" in node.meta:
        return None  # the view of a part (`layouts`) is where a cache begins
    dims = rank(node.args[0])
    order = list(range(dims))
    if node.target is aten.permute.default:
        return tuple(d % dims for d in node.args[1])
    if node.target in (aten.mT.default, aten.adjoint.default):
        a, b = dims - 2, dims - 1
    else:
        a, b = node.args[1] % dims, node.args[2] % dims
    if node.target is aten.movedim.int:
        order.insert(b, order.pop(a))
    else:
        order[a], order[b] = order[b], order[a]
    return tuple(order)


def selection(node: Node) -> tuple[Node, int, Any] | None:
    """(tensor, dim, index) of a `select`, or of a result of `unbind`; None for another node."""
    if node.target is aten.select.int and "hqmq_part" not in node.meta:
        return node.args[0], node.args[1] % rank(node.args[0]), node.args[2]
    if node.target is operator.getitem and getattr(node.args[0], "target", 0) is aten.unbind.int:
        tensor = node.args[0].args[0]
        return tensor, arg(node.args[0], "dim") % rank(tensor), node.args[1]
    return None


def strip_noops(node: Node, path: list[Node] | None = None) -> Node:
    """Follow no-ops, and pairs of transposes that cancel, to the node they start from.

    The nodes walked over are appended to `path`.
    """
    while True:
        if is_noop(node):
            step, chain = node.args[0], [node]
        else:
            step, chain = _cancelled(node)
            if step is None:
                return node
        if path is not None:
            path.extend(chain)
        node = step


def _cancelled(node: Node) -> tuple[Node | None, list[Node]]:
    """The source of a chain of transposes that is the identity, and the chain."""
    total = permutation(node)
    if total is None:
        return None, []
    chain, current = [node], node.args[0]
    while True:
        if is_noop(current):
            chain.append(current)
            current = current.args[0]
            continue
        inner = permutation(current)
        if inner is None:
            return None, []
        total = tuple(inner[i] for i in total)
        chain.append(current)
        current = current.args[0]
        if total == tuple(range(len(total))):
            return current, chain


def strip_expansion(node: Node, path: list[Node] | None = None) -> tuple[Node, int]:
    """Follow no-ops and the repetition of KV heads to the un-expanded `[B, Hkv, T, D]` tensor.

    Recognised: `repeat_interleave` on dim 1, `unsqueeze(2)` + `expand` / `repeat` + `reshape`, and
    `expand` of a single head; also in another layout, between transposes that cancel. Returns the
    tensor and how often each head was repeated.
    """
    groups = 1
    path = [] if path is None else path
    while True:
        node = strip_noops(node, path)
        repeats, inner, chain = repeated(node, 1)
        if inner is None:
            repeats, inner, chain = _repeated_transposed(node)
        if inner is None:
            return node, groups
        groups *= repeats
        path.extend(chain)
        node = inner


def repeated(node: Node, dim: int) -> tuple[int, Node | None, list[Node]]:
    """One repetition of the heads, in dim `dim`: (times, un-repeated node, nodes in between)."""
    nothing = (1, None, [])
    if rank(node) != 4 or not node.args or not is_tensor(node.args[0]):
        return nothing
    out, inner = shape(node), node.args[0]
    if node.target is aten.repeat_interleave.self_int:
        times, along = arg(node, "repeats"), arg(node, "dim")
        if isinstance(times, int) and along is not None and along % 4 == dim:
            return times, inner, [node]
        return nothing
    if node.target in EXPANDS and rank(inner) == 4 and isinstance(out[dim], int):
        if same_shape(_with(shape(inner), dim, 1), shape(inner)) and same_shape(
            _with(out, dim, 1), shape(inner)
        ):
            return out[dim], inner, [node]
        return nothing
    if node.target in RESHAPES and rank(inner) == 5:
        chain = [node]
        wide = strip_noops(inner, chain)
        if wide.target not in EXPANDS | {aten.repeat.default} or rank(wide) != 5:
            return nothing
        chain.append(wide)
        narrow = wide.args[0]
        while narrow.target is not aten.unsqueeze.default and is_noop(narrow):
            chain.append(narrow)
            narrow = narrow.args[0]
        if narrow.target is not aten.unsqueeze.default or narrow.args[1] % 5 != dim + 1:
            return nothing
        chain.append(narrow)
        source = narrow.args[0]
        sizes = shape(wide)
        heads, times = sizes[dim : dim + 2]
        narrow_shape = sizes[: dim + 1] + sizes[dim + 2 :]
        fits = (
            rank(source) == 4
            and isinstance(times, int)
            and isinstance(heads, int)
            and same_shape(shape(source), narrow_shape)
            and same_shape(out, _with(narrow_shape, dim, heads * times))
        )
        return (times, source, chain) if fits else nothing
    return nothing


def _with(sizes: tuple[Any, ...], dim: int, size: Any) -> tuple[Any, ...]:
    return (*sizes[:dim], size, *sizes[dim + 1 :])


def _repeated_transposed(node: Node) -> tuple[int, Node | None, list[Node]]:
    """Heads repeated in another layout: transpose, repeat, and the transpose back."""
    total, chain, times = permutation(node), [node], 1
    if total is None or len(total) != 4:
        return 1, None, []
    current = node.args[0]
    while True:
        inner = permutation(current)
        if is_noop(current):
            chain.append(current)
            current = current.args[0]
        elif inner is not None:
            total = tuple(inner[i] for i in total)
            chain.append(current)
            current = current.args[0]
            if total == tuple(range(4)):
                return times, current, chain
        else:
            repeats, narrow, between = repeated(current, total[1])
            if narrow is None:
                return 1, None, []
            times *= repeats
            chain.extend(between)
            current = narrow


def slice_range(node: Node, dim: int) -> tuple[Any, Any] | None:
    """(start, length) of a `slice`, `narrow` or `select` of dim `dim`; None if it is none of these.

    Ints or SymInts. Also None when the bounds are not known well enough to say where it starts.
    """
    if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
        return None
    if "hqmq_part" in node.meta:
        return None
    inner, dims = shape(node.args[0]), rank(node.args[0])
    if node.target is aten.slice.Tensor:
        if arg(node, "dim") % dims != dim or arg(node, "step") != 1:
            return None
        start, length = number(arg(node, "start")), shape(node)[dim]
        start = 0 if start is None else start
    elif node.target in (aten.narrow.default, aten.narrow.Tensor, aten.select.int):
        if node.args[1] % dims != dim:
            return None
        start = number(node.args[2])
        length = 1 if node.target is aten.select.int else shape(node)[dim]
        if start is None:
            return None
    else:
        return None
    size = inner[dim]
    if statically_known_true(start >= 0):
        return (start, length) if statically_known_true(start <= size) else _clamped(node, dim)
    if statically_known_true(start < 0):
        if statically_known_true(start + size >= 0):
            return start + size, length
        return _clamped(node, dim)
    return None


def _clamped(node: Node, dim: int) -> tuple[Any, Any] | None:
    """Range of a slice that reaches to the end of its input, whose start may have been clamped."""
    if node.target is not aten.slice.Tensor:
        return None
    end, size = number(arg(node, "end")), shape(node.args[0])[dim]
    if end is not None and not same(end, MAX_INT) and not statically_known_true(end >= size):
        # A start beyond the end would have made the slice empty; fake tensors then say length 0.
        start, length = number(arg(node, "start")), shape(node)[dim]
        return (start, length) if same(length + start, end) else None
    return size - shape(node)[dim], shape(node)[dim]
