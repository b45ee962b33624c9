"""Caches written in place: at positions, at a slice, as a window that slides (kinds 1, 2, 4, 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import SEQ, Cache, NoCache, is_empty, read_only_cache, refuse_parameter
from .foreign_caches import OUT_OF_PLACE_OPS, larger, raise_latent
from .graph_types import CacheWrite, is_input
from .nodes import arg, aten, may_equal, rank, same, same_shape, shape
from .views import constant

if TYPE_CHECKING:
    from .cache_writes import Writes


def in_place_cache(writes: Writes, base: Node) -> Cache:
    refuse_parameter(base)
    if rank(base) != 4:
        raise larger(base)
    writers = writes.writers(base)
    if not writers:
        if base.op == "placeholder":
            return read_only_cache(base, writes.scalars)
        if is_input(base):
            raise NoCache("the cache is not written in this graph", kinds.READ_ONLY, base)
        raise NoCache("keys or values are constants of the graph")
    if not is_input(base) and len(writers) > 1:  # a workspace put together from parts
        for node in writers:
            raise_latent(writes, node)
    if len(writers) > 1:
        raise NoCache(f"written again by {nodes.where(writers[1])}", None, base)
    node = writers[0]
    if node.target is aten.index_copy_.default:
        cache = at_positions(writes, base, node, node.args[1] % 4, node.args[2], node.args[3])
    elif node.target is aten.index_put_.default:
        cache = _index_put(writes, base, node)
    elif node.target is aten.copy_.default:
        cache = _copy(writes, base, node)
    else:
        raise NoCache(f"written by {nodes.where(node)}", None, base)
    write = cache.write
    cache.commit = node
    write.source = nodes.source_line(node)
    if is_input(base):
        write.past = base
        cache.label = base.meta.get("hqmq_source", "")
    else:
        write.born, write.kind = base, kinds.BORN
    write.results = [node if writes.whole(node, base) else base]
    writes.check_tokens(base, write)
    return cache


def at_positions(
    writes: Writes, base: Node, node: Node, dim: int, positions: Node, tokens: Node
) -> Cache:
    """The write of `tokens` by `node` to slots `positions` of `base`, which is its first argument."""
    if not writes.whole(node.args[0], base):
        raise _partial(writes, base, node, kinds.IN_PLACE)
    if dim != SEQ:
        raise NoCache(f"written along dim {dim}, not along dim 2", kinds.IN_PLACE, base)
    if rank(positions) == 0 and rank(tokens) == 3:  # one slot, without its dim
        positions = pure(writes, node, aten.reshape.default, positions, [1])
        tokens = pure(writes, node, aten.unsqueeze.default, tokens, SEQ)
    if rank(positions) != 1:
        raise NoCache("positions are not one list of slots", kinds.IN_PLACE, base)
    expected = (*shape(base)[:2], shape(positions)[0], shape(base)[3])
    tokens = _four_dims(writes, node, tokens, expected)
    if not _fills(shape(tokens), expected):
        raise NoCache("what is written is broadcast over slots or heads", kinds.IN_PLACE, base)
    write = CacheWrite(kinds.IN_PLACE, kinds.IN_PLACE, tokens, positions=positions)
    write.erase = [node]
    return Cache(write, {base: 0}, {node})


def _fills(tokens: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    """Whether tokens of that shape are written one to a slot.

    Two size symbols, of the tokens and of the positions, are equal unless the user's write itself
    would fail: a symbol is never 1, so nothing is broadcast. The op checks them.
    """
    if len(tokens) != 4 or not same_shape(tokens[:SEQ] + tokens[3:], expected[:SEQ] + expected[3:]):
        return False
    sizes = tokens[SEQ], expected[SEQ]
    return same(*sizes) or (not any(isinstance(s, int) for s in sizes) and may_equal(*sizes))


def _index_put(writes: Writes, base: Node, node: Node) -> Cache:
    indices = list(node.args[1])
    if arg(node, "accumulate"):
        raise NoCache("written by adding", kinds.IN_PLACE, base)
    if len(indices) < 3 or indices[2] is None or any(i is not None for i in indices[:2]):
        raise NoCache(f"written by {nodes.where(node)} at [B, H, slot]", kinds.IN_PLACE, base)
    if any(i is not None for i in indices[3:]) or nodes.value_of(indices[2]).dtype is torch.bool:
        raise NoCache(f"written by {nodes.where(node)} with a mask", kinds.IN_PLACE, base)
    return at_positions(writes, base, node, SEQ, indices[2], node.args[2])


def _copy(writes: Writes, base: Node, node: Node) -> Cache:
    target, source = node.args[:2]
    if writes.whole(target, base):
        return _copy_whole(writes, base, node, source)
    tokens = source
    inside = {node}
    if target.target is aten.select.int and rank(target) == 3:
        # A single slot without its dim: `cache[:, :, i] = k[:, :, 0]`.
        place, found = writes.locate(target.args[0]), views.slice_range(target, SEQ)
        if rank(source) == 3:
            tokens = pure(writes, node, aten.unsqueeze.default, source, SEQ)
        inside.add(target)
    else:
        found, place = (0, shape(target)[SEQ] if rank(target) == 4 else 0), writes.locate(target)
    if found is None or place.root is not base:
        raise _partial(writes, base, node, kinds.SLICE)
    expected = (*shape(base)[:2], found[1], shape(base)[3])
    tokens = _four_dims(writes, node, tokens, expected)
    if not same_shape(shape(tokens), expected):
        raise _partial(writes, base, node, kinds.SLICE)
    write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens)
    write.start = writes.scalar(place.first + found[0], base)
    write.erase = [node]
    return Cache(write, {base: 0}, inside | set(place.path))


def _copy_whole(writes: Writes, base: Node, node: Node, source: Node) -> Cache:
    """The whole cache is copied from a window that slid, or from the newest new tokens."""
    place, size = writes.locate(source), shape(base)[SEQ]
    inside = {node, *place.path}
    root = place.root
    if root.target is aten.roll.default and writes.whole(root.args[0], base):
        return _rolled(writes, base, node, root, inside)
    slots, tokens = _parts(writes, root, base, inside)
    begin, end = slots
    new = shape(tokens)[SEQ]
    if not same(place.first + size, shape(root)[SEQ]):
        raise NoCache(f"{nodes.where(node)} keeps others than the newest", kinds.WINDOW, base)
    total = end + new
    write = CacheWrite(kinds.WINDOW, kinds.WINDOW, tokens)
    write.start = writes.scalar(end, base)
    write.erase = [node]
    if same(begin, 0) and same(total, size):
        write.kind = write.write_kind = kinds.SLICE
    else:
        write.keep = writes.scalar(size, base)
    return Cache(write, {base: total - size, root: begin}, inside)


def _parts(
    writes: Writes, root: Node, base: Node, inside: set[Node]
) -> tuple[tuple[Any, Any], Node]:
    """((first, end) of the slots kept of the past, new tokens) of what a cache becomes."""
    if root.target is not aten.cat.default:
        if root.target in OUT_OF_PLACE_OPS:
            raise NoCache(f"written out of place by {nodes.where(root)}", kinds.OUT_OF_PLACE, base)
        return (0, 0), root
    parts = [part for part in root.args[0] if not is_empty(part)]
    if not any(writes.base_of(part) is base for part in parts):
        return (0, 0), root if len(parts) > 1 else parts[0]
    if arg(root, "dim") not in (SEQ, -2) or len(parts) != 2 or rank(root) != 4:
        raise NoCache(f"written by {nodes.where(root)} of {len(parts)} parts", None, base)
    inside.add(root)
    past = writes.locate(parts[0])
    if past.root is not base:
        raise NoCache(f"{nodes.where(root)} does not start with the past", None, base)
    inside.update(past.path)
    return (past.first, past.first + shape(parts[0])[SEQ]), parts[1]


def _rolled(writes: Writes, base: Node, node: Node, roll: Node, inside: set[Node]) -> Cache:
    """`roll(-n)`, the last `n` slots overwritten, and copied back."""
    size = shape(base)[SEQ]
    shifts, dims = arg(roll, "shifts"), arg(roll, "dims")
    writers = writes.writers(roll)
    bad = NoCache(f"{nodes.where(roll)} is not a window that slides", kinds.WINDOW, base)
    if list(dims) not in ([SEQ], [-2]) or len(writers) != 1:
        raise bad
    put, shift = writers[0], -shifts[0]
    if put.target is aten.index_put_.default and put.args[0] is roll:
        indices = list(put.args[1])
        slot = _constant_slot(indices[2]) if len(indices) == 3 else None
        if any(i is not None for i in indices[:2]) or shift != 1 or slot is None:
            raise bad
        if slot != -1 and not same(slot, size - 1):
            raise bad
        tokens = put.args[2]
    elif put.target is aten.copy_.default and writes.locate(put.args[0]).root is roll:
        last = writes.locate(put.args[0])
        if rank(put.args[0]) != 4 or not same(last.first + shift, size):
            raise bad
        inside.update(last.path)
        tokens = put.args[1]
    else:
        raise bad
    expected = (*shape(base)[:2], shift, shape(base)[3])
    tokens = _four_dims(writes, put, tokens, expected)
    if not same_shape(shape(tokens), expected):
        raise bad
    write = CacheWrite(kinds.WINDOW, kinds.WINDOW, tokens)
    write.start = write.keep = writes.scalar(size, base)
    write.erase = [node, put]
    return Cache(write, {base: shift, roll: shift}, inside | {roll, put})


def _partial(writes: Writes, base: Node, node: Node, kind: int) -> NoCache:
    return NoCache(f"{nodes.where(node)} writes other than whole slots", kind, base)


def _four_dims(writes: Writes, node: Node, tokens: Node, expected: tuple[Any, ...]) -> Node:
    """What `node` writes, with the leading dims of size 1 that broadcasting lets it leave out."""
    missing = len(expected) - rank(tokens)
    if missing <= 0 or not same_shape((1,) * missing + shape(tokens), expected):
        return tokens
    source = tokens
    while source.target in views.RESHAPES and nodes.is_tensor(source.args[0]):
        source = source.args[0]
        if same_shape(shape(source), expected):
            return source
    for _ in range(missing):
        tokens = pure(writes, node, aten.unsqueeze.default, tokens, 0)
    return tokens


def pure(writes: Writes, like: Node, target: Any, *args: Any) -> Node:
    """A new pure node in front of `like`."""
    node = nodes.emit(writes.graph, target, args, before=like)
    writes.added(node, like)
    return node


def _constant_slot(node: Any) -> float | None:
    """The number in a constant one-element index tensor."""
    if not isinstance(node, Node) or not same_shape(shape(node), (1,)):
        return None
    return constant(node)
