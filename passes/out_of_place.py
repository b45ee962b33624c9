"""Caches written out of place (kind 5): one tensor goes in, another with the new tokens comes out.

The tensor that went in stays as it was, whoever holds it; so the packed store is copied in each call,
as the dense one is by the op itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.fx import Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import SEQ, Cache, NoCache, refuse_parameter
from .graph_types import CacheWrite, part_of
from .in_place_writes import at_positions, pure
from .nodes import arg, aten, rank, same, same_shape, shape

if TYPE_CHECKING:
    from .cache_writes import Writes

ARANGE = {aten.arange.default, aten.arange.start, aten.arange.start_step}


def out_of_place_cache(writes: Writes, node: Node) -> Cache | None:
    """The cache that `node` makes of another, or None where it is no such op.

    Raises:
        NoCache: a cache written out of place, but in a form that is not supported.
    """
    found = _write(writes, node)
    if found is None:
        return None
    base, cache = found
    refuse_parameter(base)
    if part_of(base) is not None:
        raise NoCache(
            "written out of place, and stored in another layout", kinds.OUT_OF_PLACE, base
        )
    others = [u for u in writes.users(base) if u is not node and u.target not in nodes.SIZE_OPS]
    if others:
        raise NoCache(
            f"the old cache is also read by {nodes.where(others[0])}", kinds.OUT_OF_PLACE, base
        )
    write = cache.write
    write.kind = kinds.OUT_OF_PLACE
    if base.op == "placeholder":
        write.past = base
        cache.label = base.meta.get("hqmq_source", "")
    else:
        write.born, write.kind = base, kinds.BORN
    write.erase, write.results = [], [node]
    write.source = nodes.source_line(node)
    writes.check_tokens(base, write)
    cache.frames = {node: 0}
    cache.out_nodes = writes.returned(node)
    if not cache.out_nodes:
        raise NoCache("written out of place, but not returned", kinds.OUT_OF_PLACE, base)
    return cache


def _write(writes: Writes, node: Node) -> tuple[Node, Cache] | None:
    """(the cache that goes in, the write) of an op that changes some slots of a copy."""
    target, args = node.target, node.args
    if target not in PASTS:
        return None
    base = _base(writes, args[PASTS[target]])
    if base is None:
        return None
    if target is aten.where.self:
        cache = _where(writes, base, node)
        return None if cache is None else (base, cache)
    if target is aten.index_copy.default:
        return base, at_positions(writes, base, node, args[1] % 4, args[2], args[3])
    if target is aten.index_put.default:
        indices = [*args[1], None, None, None][:4]
        if indices[2] is None or any(i is not None for i in (*indices[:2], indices[3])):
            raise NoCache(
                f"written by {nodes.where(node)} at [B, H, slot]", kinds.OUT_OF_PLACE, base
            )
        return base, at_positions(writes, base, node, SEQ, indices[2], args[2])
    if target is aten.scatter.src:
        positions = _one_list(args[2])
        if positions is None or args[1] % 4 != SEQ:
            raise NoCache(
                f"{nodes.where(node)} scatters to slots of their own each", kinds.OUT_OF_PLACE, base
            )
        return base, at_positions(writes, base, node, SEQ, positions, args[3])
    return base, _slice(writes, base, node)


PASTS = {  # which argument is the cache that goes in
    aten.index_copy.default: 0,
    aten.index_put.default: 0,
    aten.scatter.src: 0,
    aten.slice_scatter.default: 0,
    aten.where.self: 2,
}


def _base(writes: Writes, past: Any) -> Node | None:
    """The tensor `[B, H, L, D]` that an argument is all or a part of, or None."""
    if not nodes.is_tensor(past) or rank(past) != 4:
        return None
    root = writes.locate(past).root
    return root if writes.is_base(root) else None


def _slice(writes: Writes, base: Node, node: Node) -> Cache:
    """`slice_scatter(cache, tokens, 2, start, end)`."""
    tokens, start = node.args[1], nodes.number(arg(node, "start"))
    if arg(node, "dim") not in (SEQ, -2) or arg(node, "step") != 1 or start is None:
        raise NoCache(
            f"{nodes.where(node)} writes other than whole slots", kinds.OUT_OF_PLACE, base
        )
    write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens, start=writes.scalar(start, base))
    return Cache(write, {}, {node})


def _where(writes: Writes, base: Node, node: Node) -> Cache | None:
    """`where(arange(slots) == position, token, cache)`: one token of one slot."""
    condition, tokens, past = node.args
    if not nodes.is_tensor(tokens) or rank(tokens) != 4:
        return None
    equal = _unwrap(condition)
    chosen = equal.target in (aten.eq.Tensor, aten.eq.Scalar) and isinstance(equal.args[0], Node)
    if not chosen or _unwrap(equal.args[0]).target not in ARANGE:
        raise NoCache(f"{nodes.where(node)} does not choose one slot", kinds.OUT_OF_PLACE, base)
    position = equal.args[1]
    batch, heads, slots, dim = shape(past)
    one_slot = same_shape(shape(tokens), (batch, heads, 1, dim))
    if not one_slot or not same(shape(condition)[-2], slots):
        raise NoCache(f"{nodes.where(node)} writes other than one token", kinds.OUT_OF_PLACE, base)
    if isinstance(position, Node) and nodes.is_tensor(position):
        position = pure(writes, node, aten.reshape.default, position, [1])
        write = CacheWrite(kinds.IN_PLACE, kinds.IN_PLACE, tokens, positions=position)
    else:
        start = writes.scalar(nodes.number(position), base)
        write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens, start=start)
    return Cache(write, {}, {node})


def _unwrap(node: Node) -> Node:
    """The tensor behind views that add dims of size 1."""
    while node.target in views.RESHAPES | views.COPIES or views.is_noop(node):
        node = node.args[0]
    return node


def _one_list(index: Node) -> Node | None:
    """The 1-D positions behind an index `[B, H, n, D]` that is the same for all but dim 2."""
    count = shape(index)[SEQ]
    node = index
    while nodes.is_tensor(node) and rank(node) > 1:
        if node.target not in views.EXPANDS | views.RESHAPES | views.COPIES:
            if not views.is_noop(node):
                return None
        node = node.args[0]
        if rank(node) == 4 and not same_shape(shape(node), (1, 1, count, 1)):
            if not same(shape(node)[SEQ], count):
                return None
    return node if nodes.is_tensor(node) and same_shape(shape(node), (count,)) else None
