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
    past, cache = found
    base = writes.locate(past).root
    refuse_parameter(base)
    if part_of(base) is not None:
        raise NoCache("written out of place, and stored in another layout", 5, base)
    others = [u for u in writes.users(base) if u is not node and u.target not in nodes.SIZE_OPS]
    if others:
        raise NoCache(f"the old cache is also read by {nodes.where(others[0])}", 5, base)
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
    cache.out_nodes = {
        out
        for out in writes.outputs
        if nodes.is_tensor(out) and rank(out) == 4 and writes.whole(out, node)
    }
    if not cache.out_nodes:
        raise NoCache("written out of place, but not returned", kinds.OUT_OF_PLACE, base)
    return cache


def _write(writes: Writes, node: Node) -> tuple[Node, Cache] | None:
    """(the cache that goes in, the write) of an op that changes some slots of a copy."""
    target, args = node.target, node.args
    if target is aten.where.self:
        return _where(writes, node)
    if target not in OPS or not _is_cache(writes, args[0]):
        return None
    past = args[0]
    base = writes.locate(past).root
    if target is aten.index_copy.default:
        return past, at_positions(writes, base, node, args[1] % 4, args[2], args[3])
    if target is aten.index_put.default:
        indices = [*args[1], None, None, None][:4]
        if indices[2] is None or any(i is not None for i in (*indices[:2], indices[3])):
            raise NoCache(f"written by {nodes.where(node)} at [B, H, slot]", 5, base)
        return past, at_positions(writes, base, node, SEQ, indices[2], args[2])
    if target is aten.scatter.src:
        positions = _one_list(args[2])
        if positions is None or args[1] % 4 != SEQ:
            raise NoCache(f"{nodes.where(node)} scatters to slots of their own each", 5, base)
        return past, at_positions(writes, base, node, SEQ, positions, args[3])
    return past, _slice(writes, base, node)


OPS = {
    aten.index_copy.default,
    aten.index_put.default,
    aten.scatter.src,
    aten.slice_scatter.default,
}


def _is_cache(writes: Writes, node: Any) -> bool:
    return nodes.is_tensor(node) and rank(node) == 4 and writes.is_base(writes.locate(node).root)


def _slice(writes: Writes, base: Node, node: Node) -> Cache:
    """`slice_scatter(cache, tokens, 2, start, end)`."""
    tokens, start = node.args[1], nodes.number(arg(node, "start"))
    if arg(node, "dim") not in (SEQ, -2) or arg(node, "step") != 1 or start is None:
        raise NoCache(f"{nodes.where(node)} writes other than whole slots", 5, base)
    write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens, start=writes.scalar(start, base))
    return Cache(write, {}, {node})


def _where(writes: Writes, node: Node) -> tuple[Node, Cache] | None:
    """`where(arange(slots) == position, token, cache)`: one token of one slot."""
    condition, tokens, past = node.args
    if not _is_cache(writes, past) or not nodes.is_tensor(tokens) or rank(tokens) != 4:
        return None
    base = writes.locate(past).root
    equal = _unwrap(condition)
    slots, position = (
        equal.args if equal.target in (aten.eq.Tensor, aten.eq.Scalar) else (None,) * 2
    )
    wide = (*shape(past)[:2], 1, shape(past)[3])
    if _unwrap(slots).target not in ARANGE if isinstance(slots, Node) else True:
        raise NoCache(f"{nodes.where(node)} does not choose one slot", 5, base)
    if not same_shape(shape(tokens), wide) or not same(shape(condition)[-2:][0], shape(past)[SEQ]):
        raise NoCache(f"{nodes.where(node)} writes other than one token", 5, base)
    if isinstance(position, Node) and nodes.is_tensor(position):
        position = pure(writes, node, aten.reshape.default, position, [1])
        write = CacheWrite(kinds.IN_PLACE, kinds.IN_PLACE, tokens, positions=position)
    else:
        start = writes.scalar(nodes.number(position), base)
        write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens, start=start)
    return past, Cache(write, {}, {node})


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
