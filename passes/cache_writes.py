"""Find the cache behind a tensor, and how it is updated: the write half of `find_caches`.

`Writes.read` follows what an attention reads back to a cache: a tensor that is written in place
(placeholder, or born here), a `cat` that is returned, or the new tokens themselves. Each becomes
one `Cache`; its `frames` say which slot index 0 of each tensor with cache data stands for.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from . import graph_types as kinds
from . import nodes, views
from .cache_types import SEQ, Cache, NoCache, Place, Read, is_empty, refuse_parameter
from .foreign_caches import GATHERS, OUT_OF_PLACE_OPS, foreign
from .graph_types import CacheWrite, Scalar, is_input, part_of
from .in_place_writes import in_place_cache
from .nodes import arg, aten, rank, same, same_shape, shape
from .normalize import output_args
from .out_of_place import out_of_place_cache
from .scalars import Scalars
from .views import constant

ZERO_FILLED = {
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
}
FULL = {aten.full.default, aten.full_like.default, aten.new_full.default}


class Writes:
    """All caches of one graph, found on demand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.scalars = Scalars(graph)
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        # A cache in another layout is returned as a view of its canonical form (`layouts`).
        self.outputs = tuple(
            out.meta.get("hqmq_canonical", out) if isinstance(out, Node) else out
            for out in output_args(graph)
        )
        self.orders = [
            out.meta.get("hqmq_order") if isinstance(out, Node) else None
            for out in output_args(graph)
        ]
        self.live = nodes.live_nodes(graph)
        self.caches: dict[Node, Cache] = {}  # by every root in `frames`

    def order(self, node: Node) -> int:
        """Place of a node in the program; nodes that the finders added stand at the front."""
        return self._order.get(node, -1)

    def added(self, node: Node, like: Node) -> None:
        """Take note of a new node that stands right before `like`."""
        self._order[node] = self._order[like]
        self.live.add(node)

    def users(self, node: Node) -> list[Node]:
        """Users whose result matters."""
        return [user for user in node.users if user in self.live]

    def read(self, node: Node) -> Read:
        """The cache behind a key or value `[B, Hkv, T, D]`.

        Raises:
            NoCache: there is none, or it is of a form that is not supported.
        """
        place = self.locate(node)
        cache = self._cache_of(place.root)
        return Read(cache, cache.frames[place.root] + place.first, shape(node)[SEQ], place.path)

    def locate(self, node: Node) -> Place:
        """Follow no-ops, slices of the slots' dim and results of in-place writes to their root."""
        first: Any = 0
        path: list[Node] = []
        while True:
            node = views.strip_noops(node, path)
            found = views.slice_range(node, SEQ) if rank(node) == 4 else None
            written = nodes.written_args(node)
            if found is not None:
                first = first + found[0]
            elif not written or written[0] is not node.args[0]:
                return Place(node, first, path)
            path.append(node)
            node = node.args[0]

    def _cache_of(self, root: Node) -> Cache:
        if root in self.caches:
            return self.caches[root]
        if self.is_base(root):
            cache = in_place_cache(self, root)
        elif root.target is aten.roll.default and self.is_base(self.locate(root.args[0]).root):
            cache = in_place_cache(self, self.locate(root.args[0]).root)
        else:
            base = self._copied_into(root)
            if base is not None:
                cache = in_place_cache(self, base)
            elif root.target is aten.cat.default:
                cache = self._growing(root)
            else:
                cache = out_of_place_cache(self, root) or self._returned(root)
        if root not in cache.frames:
            raise NoCache(f"the cache is computed by {nodes.where(root)}", cache.write.kind)
        self._find_outputs(cache)
        for node in cache.frames:
            self.caches[node] = cache
        return cache

    @staticmethod
    def is_base(node: Node) -> bool:
        """A tensor that lives on its own: an input, or one allocated (zero or empty) here."""
        if node.op in ("placeholder", "get_attr") or part_of(node) is not None:
            return True
        if node.target in FULL:
            return constant(arg(node, "fill_value")) == 0 and rank(node) == 4
        return node.target in ZERO_FILLED and rank(node) == 4 and not is_empty(node)

    def writers(self, base: Node) -> list[Node]:
        """Nodes that change `base` in place, through whatever view, in program order."""
        found = {
            u for alias in self.aliases(base) for u in alias.users if alias in nodes.written_args(u)
        }
        return sorted(found, key=self.order)

    @staticmethod
    def aliases(base: Node) -> set[Node]:
        """`base` and every node that may share its storage."""
        todo, seen = [base], {base}
        while todo:
            node = todo.pop()
            for user in node.users:
                if user not in seen and node in nodes.aliased_args(user):
                    seen.add(user)
                    todo.append(user)
        return seen

    def whole(self, node: Node, base: Node) -> bool:
        """Whether `node` is all of `base`, perhaps after it was written."""
        place = self.locate(node)
        return place.root is base and same_shape(shape(node), shape(base))

    def _copied_into(self, root: Node) -> Node | None:
        """The cache that (the newest part of) `root` is copied into as a whole, or None."""
        todo, seen = [root], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for user in self.users(node):
                if user.target is aten.copy_.default and user.args[1] is node:
                    target = self.locate(user.args[0])
                    if self.is_base(target.root) and self.whole(user.args[0], target.root):
                        return target.root
                if user.op == "call_function" and self.locate(user).root is root:
                    todo.append(user)
        return None

    def _growing(self, cat: Node) -> Cache:
        """`cat([past, new], -2)`, returned whole or as its newest slots."""
        parts = [part for part in cat.args[0] if not is_empty(part)]
        if arg(cat, "dim") not in (SEQ, -2) or rank(cat) != 4 or not 1 <= len(parts) <= 2:
            raise foreign(self, cat)
        inside = {cat}
        base, begin, end, tokens = None, 0, 0, parts[-1]
        if len(parts) == 2:
            past = self.locate(parts[0])
            if not is_input(past.root) or rank(past.root) != 4:
                raise foreign(self, cat)
            base, begin = past.root, past.first
            refuse_parameter(base)
            end = begin + shape(parts[0])[SEQ]
            inside.update(past.path)
            if not same(end, shape(base)[SEQ]):
                raise NoCache("grown from a part of the past", kinds.GROWING, base)
            if self.writers(base):
                raise NoCache("both grown and written in place", kinds.GROWING, base)
        write = CacheWrite(kinds.GROWING, kinds.GROWING, tokens, past=base)
        write.start = self.scalar(end, base)
        cache = Cache(write, {cat: begin}, inside)
        if base is not None:
            cache.frames[base] = 0
            cache.label = base.meta.get("hqmq_source", "")
        write.source = nodes.source_line(cat)
        self._kept(cache, cat)
        if not same(begin, 0) and write.keep is None:
            write.keep = self.scalar(shape(cat)[SEQ], base)
        self.check_tokens(cat, write)
        if base is not None:
            self.check_tokens(base, write)
        return cache

    def _kept(self, cache: Cache, root: Node) -> None:
        """Fill `keep` from the parts of `root` that the graph returns."""
        found, total = None, shape(root)[SEQ]
        for out in self.outputs:
            if not nodes.is_tensor(out) or rank(out) != 4:
                continue
            place = self.locate(out)
            if place.root is not root:
                continue
            size = shape(out)[SEQ]
            keep = _tail(place.path)
            if keep is None and not same(size, total):
                keep = size
            if not same(place.first + size, total):
                raise NoCache("a part of the cache is returned", kinds.GROWING)
            if found is not None and found != (keep,):
                raise NoCache("the cache is returned in two lengths", kinds.GROWING)
            found = (keep,)
            cache.out_nodes.add(out)
            cache.inside.update(place.path)
        if found is None:
            raise foreign(self, root)
        if found[0] is not None:
            cache.write.keep = self.scalar(found[0], root)
        cache.write.results = sorted(cache.out_nodes, key=self.order)

    def _returned(self, tokens: Node) -> Cache:
        """No `cat` at all: the first call returns its own keys (or the newest) as the cache."""
        if tokens.target in OUT_OF_PLACE_OPS | GATHERS:
            raise foreign(self, tokens)
        write = CacheWrite(kinds.GROWING, kinds.GROWING, tokens, start=0)
        cache = Cache(write, {tokens: 0}, set())
        write.source = nodes.source_line(tokens)
        self._kept(cache, tokens)
        return cache

    @staticmethod
    def base_of(node: Node) -> Node:
        """The tensor whose storage `node` may be a view of."""
        while True:
            inner = nodes.aliased_args(node)
            if not inner or part_of(node) is not None:
                return node
            node = inner[0]

    def scalar(self, value: Any, base: Node | None) -> Scalar:
        """`value` as an int or a node of the graph."""
        made = self.scalars.make(value)
        if made is None:
            raise NoCache(f"slot {value} is known on the device only", None, base)
        return made

    @staticmethod
    def check_tokens(base: Node, write: CacheWrite) -> None:
        """What is written must have the dtype, batch, heads and head dim of the cache."""
        tokens, cache = nodes.value_of(write.tokens), nodes.value_of(base)
        if rank(write.tokens) != 4:
            raise NoCache("what is written is not [B, H, n, D]", write.kind, base)
        if tokens.dtype != cache.dtype:
            reason = f"{tokens.dtype} is written to a {cache.dtype} cache"
            raise NoCache(reason.replace("torch.", ""), write.kind, base)
        if not same_shape((*tokens.shape[:2], tokens.shape[3]), (*cache.shape[:2], cache.shape[3])):
            raise NoCache("what is written is broadcast over batch or heads", write.kind, base)

    def _find_outputs(self, cache: Cache) -> None:
        """Places in the output tuple that are the updated cache."""
        if cache.commit is not None:
            cache.out_nodes |= self.returned(cache.write.base)
        cache.write.outputs = [
            place
            for place, out in enumerate(self.outputs)
            if isinstance(out, Node) and out in cache.out_nodes
        ]
        layouts = {self.orders[place] for place in cache.write.outputs}
        if len(layouts) > 1:
            raise NoCache("the cache is returned in two layouts", cache.write.kind)
        cache.write.returned = layouts.pop() if layouts else None
        if cache.write.born is not None and not cache.write.outputs:
            raise NoCache("allocated in this graph but not returned", kinds.BORN)

    def returned(self, base: Node) -> set[Node]:
        """Outputs that are the tensor of an updated cache, as the user has it."""
        part, tensors = part_of(base), [out for out in self.outputs if nodes.is_tensor(out)]
        if part is not None:
            return {out for out in tensors if out is part.tensor}
        return {out for out in tensors if rank(out) == 4 and self.whole(out, base)}


def _tail(path: list[Node]) -> int | None:
    """`w` when a path is one slice `[:, :, -w:]`, which keeps all where there are fewer."""
    slices = [n for n in path if n.target is aten.slice.Tensor and not views.is_noop(n)]
    slices = slices or [n for n in path if n.target is aten.slice.Tensor]
    starts = [arg(n, "start") for n in slices if arg(n, "dim") in (SEQ, -2)]
    if len(starts) == 1 and isinstance(starts[0], int) and starts[0] < 0:
        return -starts[0]
    return None
