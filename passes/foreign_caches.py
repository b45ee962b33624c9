"""Says what stands where a supported cache should be: kinds 5 and 7 to 10, casts, nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import NoCache, is_empty
from .graph_types import is_input, refusal
from .nodes import arg, aten, rank

if TYPE_CHECKING:
    from .cache_writes import Writes

OUT_OF_PLACE_OPS = {
    aten.where.self,
    aten.scatter.src,
    aten.index_copy.default,
    aten.index_put.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
    aten.masked_scatter.default,
}
GATHERS = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.embedding.default,
}
LINEAR = {aten.linear.default, aten.matmul.default, aten.mm.default, aten.einsum.default}
ATTENTION = {aten.scaled_dot_product_attention.default, aten.softmax.int}


def foreign(writes: Writes, node: Node) -> NoCache:
    """Says what stands in the place of a cache."""
    if views.is_cast(node):
        return _cast(writes, node)
    base = writes.base_of(node)
    if base is not None and refusal(base) is not None:
        return larger(base)
    if base is not None and is_input(base) and base is not node:
        if rank(base) != 4:
            return larger(base)
        if writes.writers(base):
            return NoCache(f"the cache is read through {nodes.where(node)}", kinds.IN_PLACE, base)
        return NoCache("the cache is not written in this graph", kinds.READ_ONLY, base)
    node = node if base is None or is_input(base) else base
    inputs = [writes.base_of(i) for i in node.all_input_nodes if nodes.is_tensor(i)]
    stored = [i for i in inputs if i is not None and is_input(i) and rank(i) >= 3]
    if node.target in OUT_OF_PLACE_OPS and stored:
        reason = f"written out of place by {nodes.where(node)}"
        return NoCache(reason, kinds.OUT_OF_PLACE, stored[0])
    if node.target in GATHERS and stored:
        kind = kinds.PAGED if writes.writers(stored[0]) else kinds.READ_ONLY
        return NoCache(f"the cache is gathered by {nodes.where(node)}", kind, stored[0])
    if node.target is aten.cat.default and stored:
        if node in writes.outputs:
            reason = f"grown by {nodes.where(node)}, which is not along dim 2 of [B, H, L, D]"
            return NoCache(reason, kinds.GROWING, stored[0])
        for user in node.users:
            if user in writes.outputs and user.target in (aten.stack.default, aten.cat.default):
                reason = f"returned as a part of a larger tensor, by {nodes.where(user)}"
                return NoCache(reason, kinds.SLAB, stored[0])
    raise_latent(writes, node)
    return NoCache(f"no cache: made by {nodes.where(node)} and not kept")


def larger(base: Node) -> NoCache:
    """Says why no part of a tensor in another layout could be told from the rest."""
    why = refusal(base)
    if rank(base) == 4:
        return NoCache(f"the cache is {why}", None, base)
    reason = "the cache is a part of a larger tensor"
    return NoCache(f"{reason}, which is {why}" if why else reason, kinds.SLAB, base)


def _cast(writes: Writes, node: Node) -> NoCache:
    dtypes = [str(nodes.value_of(n).dtype).removeprefix("torch.") for n in (node.args[0], node)]
    reason = "cast from {} to {} between cache and attention".format(*dtypes)
    try:
        write = writes.read(node.args[0]).cache.write
    except NoCache as error:
        return NoCache(error.reason, error.kind, error.base)
    return NoCache(reason, write.kind, write.past)


def readers(
    writes: Writes, base: Node, steps: set[Any], most: int
) -> Iterator[tuple[Node, Node, bool]]:
    """Each (node, user of it, whether a projection lies before it) behind a cache, nearest first.

    Goes on over ops in `steps`, and by way of workspaces that are copied into; from at most `most` nodes.
    """
    todo, seen = [(alias, False) for alias in (base, *writes.aliases(base))], set()
    while todo and len(seen) < most:
        node, projected = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            yield node, user, projected
            if user.target in steps:
                todo.append((user, projected or user.target in LINEAR))
            elif user.target is aten.copy_.default and user.args[1] is node:
                todo.append((writes.base_of(user), projected))


def raise_latent(writes: Writes, node: Node) -> None:
    """Refuse a cache that is projected on its way to attention (MLA), if that is what it is."""
    latent = _latent(writes, node)
    if latent is not None:
        reason = f"{nodes.where(latent[1])} between cache and attention"
        raise NoCache(reason, kinds.LATENT, latent[0])


def _latent(writes: Writes, node: Node) -> tuple[Node, Node] | None:
    """The cache behind `node` and the projection in between, or None."""
    todo, seen = [(node, None)], set()
    while todo and len(seen) < 64:
        node, linear = todo.pop(0)
        if node in seen or node.op == "placeholder" or node.target in ATTENTION:
            continue
        seen.add(node)
        if linear is not None:
            if node.target is aten.cat.default and arg(node, "dim") in (-2, rank(node) - 2):
                first = writes.base_of(node.args[0][0])
                if first is not None and (first.op == "placeholder" or is_empty(first)):
                    return first, linear
            written = nodes.written_args(node)
            if written and writes.is_base(writes.base_of(written[0])) and rank(node) >= 3:
                return writes.base_of(written[0]), linear
        linear = node if linear is None and node.target in LINEAR else linear
        inputs = node.args[:1] if node.target in LINEAR else node.all_input_nodes
        todo.extend((i, linear) for i in inputs if isinstance(i, Node))
    return None
