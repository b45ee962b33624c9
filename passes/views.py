"""Structural walkers shared by the finders: arguments by name, static shapes, no-op and view chains.

Nothing here adds a guard: sizes are compared only as far as they are known statically.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

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
SIZE_OPS = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}


def arg(node: Node, name: str, default: Any = None) -> Any:
    """Argument `name` of an aten call, wherever it was passed; its schema default when it was not."""
    if name in node.kwargs:
        return node.kwargs[name]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return default
    for place, argument in enumerate(schema.arguments):
        if argument.name == name:
            if place < len(node.args) and not argument.kwarg_only:
                return node.args[place]
            return argument.default_value if argument.has_default_value() else default
    return default


def value_of(node: Node) -> Any:
    """The fake value (tensor, SymInt, ...) of a node, or None."""
    return node.meta.get("val")


def is_tensor(node: Any) -> bool:
    """Whether `node` is a node that holds one tensor."""
    return isinstance(node, Node) and isinstance(value_of(node), torch.Tensor)


def shape(node: Node) -> tuple[Any, ...]:
    """Sizes of a tensor node, ints where static; () for anything else."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def rank(node: Node) -> int:
    """Number of dims of a tensor node; -1 for anything else."""
    value = value_of(node)
    return value.dim() if isinstance(value, torch.Tensor) else -1


def same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal."""
    return a is b or statically_known_true(a == b)


def may_equal(a: Any, b: Any) -> bool:
    """Whether two sizes are not known to differ.

    Dynamo gives the lengths of a growing key cache and of its value cache a symbol each, so equal
    lengths cannot be proven; attention itself fails when they differ.
    """
    return not statically_known_true(a != b)


def same_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two shapes are known to be equal."""
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def number(x: Any) -> Any:
    """The int, SymInt or float behind an argument that may be a node; None when it is neither."""
    if isinstance(x, Node):
        x = value_of(x)
    return x if isinstance(x, (int, float, torch.SymInt)) else None


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
    if x.target in (aten.full.default, aten.new_full.default) and not any(
        s != 1 for s in shape(x)
    ):
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
    if node.target not in PERMUTES or not is_tensor(node.args[0]):
        return None
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
    `expand` of a single head. Returns the tensor and how often each head was repeated.
    """
    groups = 1
    path = [] if path is None else path
    while True:
        node = strip_noops(node, path)
        repeats, inner, chain = _repeated(node)
        if inner is None:
            return node, groups
        groups *= repeats
        path.extend(chain)
        node = inner


def _repeated(node: Node) -> tuple[int, Node | None, list[Node]]:
    """One repetition of heads: (times, un-repeated node, nodes in between)."""
    nothing = (1, None, [])
    if rank(node) != 4 or not node.args or not is_tensor(node.args[0]):
        return nothing
    out, inner = shape(node), node.args[0]
    if node.target is aten.repeat_interleave.self_int:
        times, dim = arg(node, "repeats"), arg(node, "dim")
        if isinstance(times, int) and dim is not None and dim % 4 == 1:
            return times, inner, [node]
        return nothing
    if node.target in EXPANDS and rank(inner) == 4 and isinstance(out[1], int):
        if same_shape((shape(inner)[0], 1, *shape(inner)[2:]), shape(inner)) and same_shape(
            (out[0], *out[2:]), (shape(inner)[0], *shape(inner)[2:])
        ):
            return out[1], inner, [node]
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
        if narrow.target is not aten.unsqueeze.default or narrow.args[1] not in (2, -3):
            return nothing
        chain.append(narrow)
        source = narrow.args[0]
        batch, heads, times, length, dim = shape(wide)
        fits = (
            rank(source) == 4
            and isinstance(times, int)
            and isinstance(heads, int)
            and same_shape(shape(source), (batch, heads, length, dim))
            and same_shape(out, (batch, heads * times, length, dim))
        )
        return (times, source, chain) if fits else nothing
    return nothing


def slice_range(node: Node, dim: int) -> tuple[Any, Any] | None:
    """(start, length) of a `slice`, `narrow` or `select` of dim `dim`; None if it is none of these.

    Ints or SymInts. Also None when the bounds are not known well enough to say where it starts.
    """
    if node.op != "call_function" or not node.args or not is_tensor(node.args[0]):
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


def live_users(node: Node) -> list[Node]:
    """Users whose result matters: pure ops that nothing reads in the end are left out."""
    return [user for user in node.users if not _is_dead(user)]


def _is_dead(node: Node) -> bool:
    if node.op == "output" or written_args(node) or node.is_impure():
        return False
    return all(_is_dead(user) for user in node.users)


def aliased_args(node: Node) -> list[Node]:
    """Arguments that (may) share storage with the result of `node`: views and in-place writes."""
    if node.op != "call_function":
        return []
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        is_item = getattr(node.target, "__name__", "") == "getitem"
        return [a for a in node.args[:1] if isinstance(a, Node)] if is_item else []
    returned: set[str] = set()
    for result in schema.returns:
        if result.alias_info is not None:
            returned |= set(result.alias_info.before_set)
    found = []
    for argument, value in _schema_args(node):
        info = argument.alias_info
        if info is not None and set(info.before_set) & returned and isinstance(value, Node):
            found.append(value)
    return found


def written_args(node: Node) -> list[Node]:
    """Arguments that `node` writes in place."""
    found: list[Node] = []
    for argument, value in _schema_args(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else [value]
            found.extend(v for v in values if isinstance(v, Node))
    return found


def _schema_args(node: Node) -> Iterator[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return
    for place, argument in enumerate(schema.arguments):
        if place < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[place]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def op_name(node: Node) -> str:
    """Short name of what a node does, for reasons: "aten.sum", "placeholder", ..."""
    if node.op != "call_function":
        return node.op if node.op != "placeholder" else f"input {node.meta.get('hqmq_source')}"
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet) if packet is not None else getattr(node.target, "__name__", str(node.target))


FRAME = re.compile(r'File "([^"]+)", line (\d+)')
PLUMBING = (
    f"{os.sep}torch{os.sep}",
    f"transformers{os.sep}integrations{os.sep}",
    f"transformers{os.sep}utils{os.sep}",
    f"transformers{os.sep}cache_utils.py",
)


def source_line(node: Node) -> str:
    """"file.py:line" of the innermost frame of the model's own code, or ""."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if not any(part in f[0] for part in PLUMBING)] or frames
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def module_path(node: Node) -> str:
    """Path of the innermost module a node came from, such as "model.layers.0.self_attn", or ""."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    entry = list(stack.values())[-1]
    path = entry[0] if isinstance(entry, tuple) else str(entry)
    path = re.sub(r"^L\[['\"]\w+['\"]\](\[\d+\])?\.?", "", path)
    path = re.sub(r"_modules\[['\"]([^'\"]+)['\"]\]", r"\1", path)
    return re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)


def where(node: Node) -> str:
    """"<op> at <file.py:line>", for reasons."""
    line = source_line(node)
    return f"{op_name(node)} at {line}" if line else op_name(node)
