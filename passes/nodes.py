"""Questions about single nodes: arguments by name, static sizes, aliases, names for reasons; new ones.

Nothing here adds a guard: sizes are compared only as far as they are known statically.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten

SIZE_OPS = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default}


def arg(node: Node, name: str, default: Any = None) -> Any:
    """Argument `name` of an aten call, wherever it was passed, or its default in the schema."""
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


def live_nodes(graph: Graph) -> set[Node]:
    """Nodes whose result matters: the outputs, mutations, and all that these are computed from."""
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        needed = node.op in ("output", "placeholder") or node.is_impure() or written_args(node)
        if needed or any(user in live for user in node.users):
            live.add(node)
    return live


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
    """ "file.py:line" of the innermost frame of the model's own code, or ""."""
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
    """ "<op> at <file.py:line>", for reasons."""
    line = source_line(node)
    return f"{op_name(node)} at {line}" if line else op_name(node)


# -- new nodes -------------------------------------------------------------------------------------
def emit(
    graph: Graph, target: Any, args: tuple, *, after: Node | None = None, before: Node | None = None
) -> Node:
    """A new node next to a given one."""
    with graph.inserting_after(after) if before is None else graph.inserting_before(before):
        node = graph.call_function(target, args)
    tensors = [a for a in args if isinstance(a, Node)] or [args[0][0]]
    if written_args(node):
        value = value_of(args[0])
    else:
        with value_of(tensors[0]).fake_mode:
            value = target(*(_values(a) for a in args))
    node.meta = {"val": value}
    for key in ("stack_trace", "nn_module_stack"):
        like = after if before is None else before
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


def _values(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_values(item) for item in x]
    return value_of(x) if isinstance(x, Node) else x
