"""Pair every attention with the caches of its keys and values, and account for all their readers.

A cache is packed only when each node that reads or writes it is understood: its one write,
supported attentions after that write, the graph's outputs, and sizes. Anything else, and the cache
is left alone with that node's name and source line as the reason; so is the other cache of the
same attention, and every other attention that reads either. `graph_types` has the semantics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import SEQ, Cache, NoCache, Read
from .cache_writes import Writes
from .foreign_caches import GATHERS, LINEAR, readers
from .graph_types import Attention, Match, Scalar
from .in_place_writes import pure
from .nodes import aten, rank, shape

STRICT_VIEWS = {  # these alias their input, whatever its strides
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.permute.default,
    aten.alias.default,
    aten.detach.default,
}
STEPS = (  # between a cache and its attention
    views.RESHAPES | views.EXPANDS | views.COPIES | views.CASTS | views.PERMUTES | LINEAR | GATHERS
    | {aten.cat.default, aten.slice.Tensor}
)  # fmt: skip
MOST_STEPS = 64


@dataclasses.dataclass(eq=False)
class _Pair:
    """An attention with its two reads, while it is being judged."""

    match: Match
    key: Read
    value: Read

    @property
    def reads(self) -> tuple[Read, Read]:
        return self.key, self.value


def find_caches(graph: Graph, attentions: list[Attention]) -> list[Match]:
    """One Match an attention, in their order, then one for each cache that no attention reads.

    Args:
        graph: a normalised graph. Scalar nodes (sums of SymInt inputs) may be added behind the
            placeholders, and a `reshape` / `unsqueeze` in front of a write; nothing else changes.
        attentions: what `find_attention` returned for it.

    Returns:
        Matches; `reason` is None where write and attention can be rewritten.
    """
    writes = Writes(graph)
    matches, pairs = [], []
    for attention in attentions:
        match = Match(attention, source_name=attention.module)
        matches.append(match)
        pair = _pair(writes, match)
        if pair is not None:
            pairs.append(pair)

    # A refused attention is a foreign reader of its caches, which may refuse others in turn.
    accepted = [pair for pair in pairs if pair.match.reason is None]
    while True:
        refused = [pair for pair in accepted if _refuse(writes, pair, accepted)]
        if not refused:
            break
        accepted = [pair for pair in accepted if pair not in refused]

    for pair in accepted:
        _finish(writes, pair, accepted)
    return matches + _unread(writes, matches)


def _pair(writes: Writes, match: Match) -> _Pair | None:
    """Resolve both caches of an attention; on failure the match's reason says why."""
    attention = match.attention
    reads, failures = [], []
    for role in ("key", "value"):
        node = getattr(attention, role)
        if node is None:
            continue
        try:
            reads.append(writes.read(node))
        except NoCache as error:
            failures.append((role, error))
    if len(reads) == 2:
        match.key, match.value = (read.cache.write for read in reads)
        match.kind = reads[0].cache.write.kind
        if reads[0].cache.is_part:
            match.kind = kinds.SLAB
        match.source_name = reads[0].cache.label or match.source_name
    elif failures:
        role, error = failures[0]
        match.kind = next((e.kind for _, e in failures if e.kind is not None), None)
        base = next((e.base for _, e in failures if e.base is not None), None)
        if base is not None:
            match.source_name = base.meta.get("hqmq_source") or match.source_name
        match.reason = f"{role}: {error.reason}"
    if attention.reason is not None:
        match.reason = attention.reason
    if match.reason is not None or len(reads) != 2:
        match.reason = match.reason or "no keys and values"
        return None
    pair = _Pair(match, *reads)
    match.reason = _mismatch(writes, pair)
    return pair


def _mismatch(writes: Writes, pair: _Pair) -> str | None:
    """Why the caches of keys and values cannot be updated by one op, or None."""
    key, value = pair.key.cache.write, pair.value.cache.write
    if key is value:
        return "keys and values share one cache"
    if (key.kind, key.write_kind) != (value.kind, value.write_kind):
        return f"keys are a cache of kind {key.kind}, values of kind {value.kind}"
    if (key.past is None) != (value.past is None):
        return "only one of keys and values has a past"
    # Keys and values that grow have a symbol each for their length: equal by construction.
    loose = key.kind in (kinds.GROWING, kinds.READ_ONLY)
    equal = nodes.may_equal if loose else nodes.same
    if not _equal(key.keep, value.keep, equal):
        return "keys and values keep different windows"
    if (key.positions is None) != (value.positions is None):
        return "keys and values are written in different ways"
    if not _equal(key.start, value.start, equal):
        return "keys and values are written at different slots"
    if key.positions is not None and not _equivalent(writes, key.positions, value.positions):
        return "keys and values are written at different positions"
    if not equal(pair.key.first, pair.value.first):
        return "keys and values are read from different slots"
    # Of a cache whose length changes Dynamo gives keys and values a symbol each, or specialises one.
    # Attention itself fails where they differ, and so does the caller, which compares the real ones.
    if not nodes.may_equal(pair.key.length, pair.value.length):
        return "different numbers of keys and values are read"
    if not nodes.may_equal(shape(key.tokens)[SEQ], shape(value.tokens)[SEQ]):
        return "different numbers of keys and values are written"
    return None


def _equal(a: Scalar | None, b: Scalar | None, equal: Callable[[Any, Any], bool]) -> bool:
    """Compare two scalars (ints, nodes, or None) by their values."""
    if a is None or b is None:
        return a is b
    return equal(nodes.number(a), nodes.number(b))


def _equivalent(writes: Writes, a: object, b: object, depth: int = 16) -> bool:
    """Whether two nodes are the same pure computation on tensors not mutated in between."""
    if a is b:
        return True
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(
            _equivalent(writes, x, y, depth) for x, y in zip(a, b, strict=True)
        )
    if not isinstance(a, Node) or not isinstance(b, Node) or depth == 0:
        return type(a) is type(b) and not isinstance(a, Node) and a == b
    if a.op != "call_function" or a.target is not b.target or a.kwargs.keys() != b.kwargs.keys():
        return False
    if nodes.written_args(a) or a.is_impure():
        return False
    between = sorted((writes.order(a), writes.order(b)))
    for leaf in a.all_input_nodes:
        if nodes.is_tensor(leaf) and _mutated(writes, leaf, *between):
            return False
    return _equivalent(writes, a.args, b.args, depth - 1) and all(
        _equivalent(writes, a.kwargs[k], b.kwargs[k], depth - 1) for k in a.kwargs
    )


def _mutated(writes: Writes, node: Node, after: int, before: int) -> bool:
    """Whether the storage of `node` is written between two places of the program."""
    base = writes.base_of(node)
    return any(after < writes.order(w) < before for w in writes.writers(base))


def _refuse(writes: Writes, pair: _Pair, accepted: list[_Pair]) -> bool:
    """Account for both caches of a pair; on a foreign reader set the reason and return True."""
    for other in accepted:
        shared = [a.cache is b.cache for a in pair.reads for b in other.reads]
        if shared not in ([True, False, False, True], [False] * 4):
            pair.match.reason = "only one of keys and values is shared with another attention"
            return True
    for role, read in zip(("key", "value"), pair.reads, strict=True):
        reason = _foreign_reader(writes, read.cache, accepted) or _unsettled(
            writes, read.cache, pair.match.attention
        )
        if reason is not None:
            read.cache.write.reason = pair.match.reason = f"{role} cache is {reason}"
            other = pair.value if role == "key" else pair.key
            if other.cache.write.reason is None:
                other.cache.write.reason = f"the {role}s of the same attention are left alone"
            return True
    return False


def _foreign_reader(writes: Writes, cache: Cache, accepted: list[_Pair]) -> str | None:
    """The first node that uses a cache and is not understood, as "read by ...", or None."""
    paths, attentions = _readers(cache, accepted)
    tracked = set(cache.frames)
    if cache.write.kind != kinds.READ_ONLY:  # the tokens themselves are the model's to read
        tracked.discard(cache.write.tokens)
    todo = sorted(tracked, key=writes.order)
    while todo:
        node = todo.pop(0)
        for user in writes.users(node):
            if user in cache.inside or user.target in nodes.SIZE_OPS:
                follow = user in cache.inside and _carries(user, node)
            elif user.op == "output":
                follow = False
                if node.meta.get("hqmq_canonical", node) not in cache.out_nodes:
                    return f"returned in part or in another form ({nodes.where(node)})"
            elif node in nodes.written_args(user):
                return f"also written by {nodes.where(user)}"
            elif user in attentions:
                follow = False
                if not _reads_as_cache(attentions[user], node):
                    return f"read by {nodes.where(user)}"
            elif user in paths or views.is_noop(user) or node in nodes.aliased_args(user):
                follow = True
            else:
                return f"read by {nodes.where(user)}"
            early = cache.commit is not None and writes.order(user) < writes.order(cache.commit)
            harmless = user in cache.inside or user.target in STRICT_VIEWS | nodes.SIZE_OPS
            if early and not harmless:
                return f"read by {nodes.where(user)} before it is written"
            if follow and user not in tracked:
                tracked.add(user)
                todo.append(user)
    return None


def _readers(cache: Cache, accepted: list[_Pair]) -> tuple[set[Node], dict[Node, list[Attention]]]:
    """Nodes between a cache and the accepted attentions, and the attentions by their nodes."""
    paths: set[Node] = set()
    attentions: dict[Node, list[Attention]] = {}
    for pair in accepted:
        attention = pair.match.attention
        for read, path in zip(pair.reads, (attention.key_path, attention.value_path), strict=True):
            if read.cache is cache:
                paths.update(read.path, path)
                for node in attention.nodes:
                    known = attentions.setdefault(node, [])
                    if attention not in known:
                        known.append(attention)
    return paths, attentions


def _carries(user: Node, node: Node) -> bool:
    """Whether a node of the write hands cache data on, as a view, a roll or a cat does."""
    return node in user.args or user.target is aten.cat.default


def _reads_as_cache(attentions: list[Attention], node: Node) -> bool:
    """Whether an attention consumes `node` as its keys or values and as nothing else."""
    for attention in attentions:
        keys = attention.key_path[0] if attention.key_path else attention.key
        values = attention.value_path[0] if attention.value_path else attention.value
        if node not in (keys, values):
            return False
        if node in (attention.query, attention.mask, attention.sinks):
            return False
    return True


def _unsettled(writes: Writes, cache: Cache, attention: Attention) -> str | None:
    """Why the fused op, which stands where the attention stood, would write something else.

    Positions that the model advances in between (torchtune) are copied where the write stood.
    """
    write = cache.write
    anchor = cache.commit or next(iter(cache.frames))
    for what, node in (("tokens", write.tokens), ("positions", write.positions)):
        if node is not None and _mutated(
            writes, node, writes.order(anchor), writes.order(attention.node)
        ):
            if what == "tokens":
                return "written with tokens that change before the attention"
            write.positions = pure(writes, anchor, aten.clone.default, node)  # as they were then
    return None


def _finish(writes: Writes, pair: _Pair, accepted: list[_Pair]) -> None:
    """Fill the fields of an accepted match."""
    match = pair.match
    match.first = writes.scalars.make(pair.key.first)
    match.length = writes.scalars.make(pair.key.length)
    if match.first is None or match.length is None:
        match.reason = "the slots that attention reads are known on the device only"
        return
    for read in pair.reads:
        readers = [p for p in accepted if read.cache in (p.key.cache, p.value.cache)]
        read.cache.write.readers = len(readers)
        match.shared = match.shared or len(readers) > 1


def _unread(writes: Writes, matches: list[Match]) -> list[Match]:
    """Tensors that are written like a cache, but that no attention of this graph reads."""
    bases = [write.base for match in matches for write in match.writes]
    known = {kinds.tensor_of(base) for base in bases if base is not None}
    named = {match.source_name for match in matches}
    found = []
    returned = {out for out in writes.outputs if isinstance(out, Node)}
    for node in writes.graph.find_nodes(op="placeholder"):
        name = node.meta.get("hqmq_source", "")
        if rank(node) != 4 or node in known or name in named or "_parameters" in name:
            continue
        kind = None
        for user in writes.users(node):
            grown = user.target is aten.cat.default and user.args[0][0] is node
            if grown and user in returned and nodes.arg(user, "dim") in (SEQ, -2):
                kind = kinds.GROWING
        writers = writes.writers(node)
        if writers:
            copies = writers[0].target is aten.copy_.default
            kind = kinds.SLICE if copies else kinds.IN_PLACE
        if kind is not None and not _behind_attention(writes, node, matches):
            reason = "written like a cache, but no attention reads it"
            found.append(Match(None, kind=kind, source_name=name, reason=reason))
    return found


def _behind_attention(writes: Writes, base: Node, matches: list[Match]) -> bool:
    """Whether a cache is already reported with the attention that reads it."""
    inside = {node for match in matches if match.attention for node in match.attention.nodes}
    return any(user in inside for _, user, _ in readers(writes, base, STEPS, MOST_STEPS))
