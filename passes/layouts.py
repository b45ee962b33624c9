"""Caches stored in another layout than `[B, H, L, D]`: the graph is put into that one first.

Between `find_attention` and `find_caches`. Where an attention reads its keys or values through views
that transpose a cache (`[B, L, H, D]`) or take a part of it (a slab `[2, B, H, L, D]`, all layers
stacked), that cache is given one view `[B, H, L, D]` a part, in front of everything else, and what
was a view of the cache becomes a view of that view. Writes through permuted views become writes of
permuted tokens; a growing `cat` of another dim becomes one along the slots. So the later passes see
one layout only, and judge readers of one part without regard to the others.

    slab[0].index_copy_(2, pos, k)          part = slab.select(0, 0)     # marked: `part_of`
    slab[0][:, :, :n] -> attention          part.index_copy_(2, pos, k); part[:, :, :n] -> attention

The graph computes what it did before, whether or not its caches are packed in the end. A tensor with
a use that belongs to no single part is left as it is, and `refusal` then says which use that was.
"""

from __future__ import annotations

import dataclasses
import math

from torch.fx import Graph, Node

from . import nodes, views
from .cache_types import is_empty
from .cache_writes import ZERO_FILLED, Writes
from .find_attention import find_attention
from .graph_types import Attention, Match, Part, part_of, refusal
from .layout_views import CANONICAL, Aliases, Refused, permuted, sliced_dim
from .nodes import arg, aten, emit, rank
from .normalize import output_args

SLOTS = 2  # of [B, H, L, D]


@dataclasses.dataclass(frozen=True)
class _Found:
    """A tensor that attention reads, and what its dims are: 0 to 3 of `[B, H, L, D]`, None: parts."""

    root: Node
    dims: tuple[int | None, ...]

    @property
    def lead(self) -> tuple[int, ...]:
        return tuple(i for i, dim in enumerate(self.dims) if dim is None)

    @property
    def order(self) -> tuple[int, ...]:
        """`root.permute(order)` is `[*parts, B, H, L, D]`."""
        return (*self.lead, *(self.dims.index(dim) for dim in CANONICAL))


def one_layout(graph: Graph, attentions: list[Attention]) -> list[Attention]:
    """Give every cache that `attentions` read the layout `[B, H, L, D]`, in place.

    Args:
        graph: a normalised graph.
        attentions: what `find_attention` returned for it.

    Returns:
        The attentions of the changed graph, or the given ones if nothing was to be done.
    """
    found: dict[Node, _Found] = {}
    for attention in attentions:
        for read in (attention.key, attention.value):
            for root in _roots(read) if read is not None and rank(read) == 4 else ():
                known = found.setdefault(root.root, root)
                if known.dims != root.dims:
                    _refuse(root.root, "read by attention in two layouts")
    changed = False
    returned = {_origin(out) for out in output_args(graph) if nodes.is_tensor(out)}
    # Tensors first: a `cat` finds the canonical view of its past in place.
    for item in sorted(found.values(), key=lambda f: f.root.target is aten.cat.default):
        if item.root._erased or refusal(item.root) is not None:
            continue
        if item.dims == CANONICAL:
            changed |= _written_transposed(graph, item)
            continue
        try:
            if Writes.is_base(item.root) or (item.lead and item.root.target in ZERO_FILLED):
                changed |= _is_cache(item) and _stored(graph, item)
            elif item.root.target is aten.cat.default:
                changed |= _grown(graph, item)
            elif item.root in returned and item.root.op == "call_function":
                _first(graph, item)
                changed = True
        except Refused as error:
            _refuse(item.root, str(error))
    if not changed:
        return attentions
    graph.lint()
    return find_attention(graph)


def _refuse(node: Node, reason: str) -> None:
    node.meta.setdefault("hqmq_layout", reason)


def _roots(node: Node) -> list[_Found]:
    """What attention reads, followed back over views: the tensor that they start from.

    Of a growing cache the `cat`, and the past in it.
    """
    dims: list[int | None] = list(CANONICAL)
    found: list[_Found] = []
    while True:
        written = nodes.written_args(node)
        selected = views.selection(node)
        order = views.permutation(node)
        if views.is_noop(node) or (written and written[0] is node.args[0]):
            source = node.args[0]
        elif order is not None:
            source, before = node.args[0], list(dims)
            for place, dim in enumerate(order):
                dims[dim] = before[place]
        elif selected is not None:
            source, dim, _ = selected
            dims.insert(dim, None)
        elif any(views.slice_range(node, dim) is not None for dim in range(rank(node))):
            source = node.args[0]
        elif rank(node) == 4 and views.repeated(node, dims.index(1))[1] is not None:
            source = views.repeated(node, dims.index(1))[1]
        else:
            found.append(_Found(node, tuple(dims)))
            parts = [p for p in node.args[0] if not is_empty(p)] if _is_cat(node, dims) else []
            if len(parts) != 2:
                return found
            source = parts[0]
        node = source


def _origin(node: Node) -> Node:
    """What an output is all or some slots of."""
    while views.is_noop(node) or sliced_dim(node) is not None:
        node = node.args[0]
    return node


def _is_cat(node: Node, dims: list[int | None]) -> bool:
    if node.target is not aten.cat.default or rank(node) != 4:
        return False
    return dims[arg(node, "dim") % 4] == SLOTS


def refuse_incomplete(matches: list[Match]) -> None:
    """A tensor is packed in all its parts or not at all."""
    while True:
        packed: dict[Node, set[tuple[int, ...]]] = {}
        found = [
            (match, part) for match in matches if match.reason is None for part in _parts(match)
        ]
        for _, part in found:
            packed.setdefault(part.tensor, set()).add(part.index)
        incomplete = [
            (match, part)
            for match, part in found
            if len(packed[part.tensor]) < math.prod(part.lead)
        ]
        if not incomplete:
            return
        for match, part in incomplete:
            match.reason = match.reason or _missing(matches, part, len(packed[part.tensor]))


def _parts(match: Match) -> list[Part]:
    bases = [write.base for write in match.writes]
    return [part for part in map(part_of, filter(None, bases)) if part is not None]


def _missing(matches: list[Match], part: Part, packed: int) -> str:
    source, total = (
        part.tensor.meta.get("hqmq_source") or nodes.where(part.tensor),
        math.prod(part.lead),
    )
    reason = f"only {packed} of the {total} parts of {source} are caches that can be packed here"
    others = [m.reason for m in matches if m.reason and m.source_name.startswith(source)]
    return f"{reason} (of another part: {others[0]})" if others else reason


# -- a tensor that lives on its own ----------------------------------------------------------------
def _is_cache(found: _Found) -> bool:
    """Not just keys that the caller computed: something is kept in it."""
    if found.lead:
        return True
    aliases = Writes.aliases(found.root)
    return any(
        alias in nodes.written_args(user) or user.target is aten.cat.default
        for alias in aliases
        for user in alias.users
    )


def _stored(graph: Graph, found: _Found) -> bool:
    """Views `[B, H, L, D]` of an input, or of a cache that is allocated here."""
    root, lead = found.root, found.lead
    if not nodes.value_of(root).is_floating_point() or rank(root) > 6:
        return False
    sizes = [nodes.shape(root)[dim] for dim in lead]
    if not all(isinstance(size, int) for size in sizes):
        raise Refused("the number of its parts is symbolic")
    aliases = Aliases(graph, root, lead, found.order)
    aliases.collect()  # raises before anything is changed
    place = graph.find_nodes(op="placeholder")[-1] if root.op == "placeholder" else root
    rest = [dim for dim in range(rank(root)) if dim not in lead]
    order = tuple(rest.index(dim) for dim in found.order[len(lead) :])
    source = root.meta.get("hqmq_source", "")

    def part(index: tuple[int, ...]) -> Node:
        nonlocal place
        view = root
        for dim, i in sorted(zip(lead, index, strict=True), reverse=True):  # later dims stay put
            place = view = emit(graph, aten.select.int, (view, dim, i), after=place)
        if order != CANONICAL:
            place = view = emit(graph, aten.permute.default, (view, list(order)), after=place)
        view.meta |= {k: v for k, v in root.meta.items() if k in ("hqmq_packed",)}
        view.meta["hqmq_part"] = Part(root, index, tuple(sizes), found.order)
        view.meta["hqmq_source"] = source + "".join(f"[{i}]" for i in index)
        return view

    aliases.rewrite(part)
    return True


def _written_transposed(graph: Graph, found: _Found) -> bool:
    """A cache that is `[B, H, L, D]`, but written through a transpose: `c.transpose(1, 2)[:, a:b] = k`."""
    root = found.root
    if rank(root) != 4 or not Writes.is_base(root):
        return False
    transposed = {
        alias
        for alias in Writes.aliases(root)
        if views.permutation(alias) is not None and alias.args[0] is root
    }
    written = {a for alias in transposed for a in Writes.aliases(alias)}
    if not any(alias in nodes.written_args(user) for alias in written for user in alias.users):
        return False
    aliases = Aliases(graph, root, (), CANONICAL)
    aliases.collect()
    aliases.rewrite(lambda index: root)
    return True


# -- a cache that grows ----------------------------------------------------------------------------
def _grown(graph: Graph, found: _Found) -> bool:
    """`cat([past, new], 1)` of a cache `[B, L, H, D]` becomes one along dim 2, and what it was."""
    cat = found.root
    if not _is_cat(cat, list(found.dims)):
        return False
    aliased = Writes.aliases(cat)
    if any(alias in nodes.written_args(user) for alias in aliased for user in alias.users):
        raise Refused("both grown and written in place")
    parts = [permuted(graph, part, found.order, before=cat) for part in cat.args[0]]
    grown = emit(graph, aten.cat.default, (parts, SLOTS), after=cat)
    aliases = Aliases(graph, cat, (), found.order)
    aliases.collect()
    aliases.rewrite(lambda index: grown)
    return True


def _first(graph: Graph, found: _Found) -> None:
    """The first call of a growing cache returns its own tokens, as they are before a transpose."""
    tokens = found.root
    canonical = permuted(graph, tokens, found.order, before=tokens.next)
    aliases = Aliases(graph, tokens, (), found.order, keep_readers=True)
    aliases.collect()
    aliases.rewrite(lambda index: canonical)
