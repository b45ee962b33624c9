"""Between `find_caches` and `rewrite`: pack caches whose readers are no attention that can read packed bits.

A cache may be understood while its attention is not (flex, alibi by `baddbmm`, a projection between a
latent cache and the heads), or another node reads it besides. Then the write is rewritten alone, to
`hqmq::write_read`: what is stored is packed, and the readers get a dense tensor that lives as long as
they do, one layer at a time. Slower than attention on packed bits, and always right.
"""

from __future__ import annotations

import operator
import re
from typing import Any

from torch.fx import Graph, Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import SEQ, Cache, NoCache
from .cache_writes import Writes
from .foreign_caches import GATHERS, LINEAR, readers
from .graph_types import Attention, DenseRead, Match, is_input, part_of, tensor_of
from .nodes import aten, is_tensor, rank, same, shape

# Sources of what must be a KV cache even if its attention is in another graph.
NAMES = re.compile(r"\b(keys?|values?|[kv]_?cache|(key|value)_cache|past_(keys?|values?|k|v))\b")
VALUES = re.compile(r"value|(\b|_)v(s|als?)?(_?cache|_states)?(\[\d+\]|'\])*$")
ELEMENTWISE = {aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.div.Tensor}
STEPS = (
    views.RESHAPES | views.EXPANDS | views.COPIES | views.CASTS | views.PERMUTES | LINEAR | GATHERS
    | ELEMENTWISE
    | {aten.cat.default, aten.stack.default, aten.slice.Tensor, aten.select.int, aten.narrow.default}
    | {aten.repeat_interleave.self_int, aten.split_with_sizes.default, aten.split.Tensor}
    | {aten.chunk.default, operator.getitem}
)  # fmt: skip
MOST_STEPS = 128


def read_dense(graph: Graph, matches: list[Match]) -> list[Match]:
    """Turn refused matches into ones that read dense, where their caches are understood.

    Args:
        matches: of `find_caches`; changed in place. The graph is changed as by `find_caches`.

    Returns:
        `matches`, and one more for each cache that shares its attention with another one.
    """
    writes = Writes(graph)
    taken = {write.base for match in matches if match.reason is None for write in match.writes}
    refused = [match for match in matches if match.reason is not None]
    found: dict[Match, list[tuple[str, Cache]]] = {}
    failures: dict[Match, str] = {}
    seen: set[Node] = set()
    for base in [node for node in graph.nodes if _may_be_cache(writes, node)]:
        if base in taken:
            continue
        match, role, projected = _owner(writes, base, refused)
        if match is None:
            continue
        if match.kind == kinds.LATENT and not projected:
            failures[match] = "the part beside the latent stays exact"
            continue
        try:
            cache = _cache(writes, base)
            cache.write.dense = _plan(writes, cache)
        except NoCache as error:
            failures[match] = f"nor can it be read dense: {role} cache is {error.reason}"
            continue
        seen.update(cache.frames)
        found.setdefault(match, []).append((role, cache))
    for match in refused:
        if match in found:
            continue
        for role, cache in _first_calls(writes, match, seen):
            found.setdefault(match, []).append((role, cache))
    for match, why in failures.items():
        if match not in found:
            match.reason = f"{match.reason}; {why}"
    packed = {cache.label for caches in found.values() for _, cache in caches}
    matches = [m for m in matches if m.attention or m in found or m.source_name not in packed]
    return matches + [more for match in found for more in _accept(match, found[match], failures)]


def _may_be_cache(writes: Writes, node: Node) -> bool:
    if rank(node) != 4 or not nodes.value_of(node).dtype.is_floating_point:
        return False
    if is_input(node):
        if node.op != "placeholder" and part_of(node) is None:
            return False
        return "._parameters[" not in tensor_of(node).meta.get("hqmq_source", "")
    return node.op == "call_function" and writes.is_base(node) and bool(writes.writers(node))


def _owner(writes: Writes, base: Node, refused: list[Match]) -> tuple[Match | None, str, bool]:
    """(match whose attention reads `base`, "key" or "value", whether it is projected before)."""
    name = tensor_of(base).meta.get("hqmq_source", "")
    guess = "value" if VALUES.search(name) else "key"
    attended = [m for m in refused if m.attention is not None]
    for node, user, projected in readers(writes, base, STEPS, MOST_STEPS):
        for match in attended:
            role = _role(match.attention, node, user)
            if role is not None:  # keys are made of what is projected, and they are more sensitive
                return match, "key" if projected else role, projected
    for match in refused:  # the attention is in another graph
        if match.attention is None and match.source_name == name and NAMES.search(name):
            return match, guess, False
    return None, guess, False


def _role(attention: Attention, node: Node, user: Node) -> str | None:
    """What `node` is to an attention that `user` is a part of."""
    if user not in attention.nodes or node in attention.nodes:
        return None
    if len(attention.nodes) == 1:  # sdpa, flex
        places = [i for i, a in enumerate(user.args[:3]) if a is node]
        return {1: "key", 2: "value"}.get(places[0] if places else 0)
    if user is attention.nodes[-1]:
        return "value"
    if user.target is aten.einsum.default:
        return "key"
    last = [a for a in user.args if isinstance(a, Node)][-1]  # before it: the query, and a bias
    return "key" if user is attention.nodes[0] and node is last else None


def _cache(writes: Writes, base: Node) -> Cache:
    if writes.writers(base):
        return writes.read(base).cache
    grown = []
    for node in writes.graph.find_nodes(op="call_function", target=aten.cat.default):
        if rank(node) == 4 and is_tensor(node.args[0][0]):
            if writes.locate(node.args[0][0]).root is base and len(node.args[0]) == 2:
                grown.append(node)
    if len(grown) != 1:
        raise NoCache("not written in this graph", kinds.READ_ONLY, base)
    return writes.read(grown[0]).cache


def _plan(writes: Writes, cache: Cache) -> DenseRead:
    """Which nodes a dense tensor replaces, and where it must be made."""
    write = cache.write
    base = write.base
    if cache.commit is not None and write.keep is None and same(write.start, 0):
        if same(shape(write.tokens)[SEQ], shape(base)[SEQ]):
            raise NoCache("replaced as a whole: a state, not a cache", write.kind, base)
    changes = [
        n for n in (*cache.inside, *cache.frames) if n in cache.frames or nodes.written_args(n)
    ]
    done = max(writes.order(node) for node in changes)
    replaced: dict[Node, tuple[Any, Any]] = {}
    for root, first in cache.frames.items():
        if root is write.tokens:
            continue
        same_memory = [n for n in cache.inside if nodes.written_args(n) and writes.whole(n, root)]
        for node in (root, *same_memory):
            if node is write.past and cache.commit is None:
                if any(_reads(writes, cache, user) for user in writes.users(node)):
                    raise NoCache("read before it grows", write.kind, base)
            else:
                replaced[node] = (first, shape(node)[SEQ])
    found = []
    for node in replaced:
        for user in node.users:  # dead ones too: they must not come before what they read
            if _reads(writes, cache, user) and user.op != "output":
                if user in writes.live and writes.order(user) < done:
                    raise NoCache(f"read by {nodes.where(user)} before it is written", None, base)
                found.append(user)
            if user not in cache.inside and node in nodes.written_args(user):
                raise NoCache(f"also written by {nodes.where(user)}", None, base)
    (output,) = writes.graph.find_nodes(op="output")
    if any(out in replaced and out not in cache.out_nodes for out in writes.outputs):
        raise NoCache("returned in another form", write.kind, base)
    if not found:
        return DenseRead({}, cache.inside, output, 0)
    total = max(first + length for first, length in replaced.values())
    made = {
        node: (writes.scalar(first, base), writes.scalar(length, base))
        for node, (first, length) in replaced.items()
    }
    anchor = min(found, key=writes.order)
    return DenseRead(made, cache.inside, anchor, writes.scalar(total, base))


def _reads(writes: Writes, cache: Cache, user: Node) -> bool:
    return user not in cache.inside and user.target not in nodes.SIZE_OPS


def _first_calls(writes: Writes, match: Match, seen: set[Node]) -> list[tuple[str, Cache]]:
    """Caches that start in this call: attention reads the new tokens, which become the cache."""
    found = []
    for role in ("key", "value"):
        node = getattr(match.attention, role, None)
        if not is_tensor(node) or rank(node) != 4:
            continue
        try:
            cache = writes.read(node).cache
        except NoCache:
            continue
        write = cache.write
        if write.base is None and write.tokens not in seen:
            write.dense = _plan_first(writes, match.attention, cache)
            seen.add(write.tokens)
            found.append((role, cache))
    return found


def _plan_first(writes: Writes, attention: Attention, cache: Cache) -> DenseRead:
    """The new tokens are the cache: only the attention reads what is stored of them."""
    tokens = cache.write.tokens
    attends = {*attention.nodes, *attention.key_path, *attention.value_path}
    found = [user for user in tokens.users if user in attends]
    (output,) = writes.graph.find_nodes(op="output")
    if not found:
        return DenseRead({}, cache.inside, output, 0)
    length = writes.scalar(shape(tokens)[SEQ], None)
    others = {user for user in tokens.users if user not in attends}
    anchor = min(found, key=writes.order)
    return DenseRead({tokens: (0, length)}, others, anchor, length)


def _accept(
    match: Match, caches: list[tuple[str, Cache]], failures: dict[Match, str]
) -> list[Match]:
    """Fill the match; further caches of the same role become matches of their own."""
    why = match.reason
    if match in failures:
        why = f"{why}; {failures[match]}"
    match.key = match.value = None
    more = []
    for role, cache in caches:
        place = match
        if getattr(match, role) is not None:
            place = Match(None, source_name=cache.label)
            more.append(place)
        setattr(place, role, cache.write)
        cache.write.reason = None
        place.kind, place.dense, place.reason = cache.write.kind, why, None
    return more
