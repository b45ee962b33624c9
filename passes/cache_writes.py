"""Recognise how a cache tensor is updated: the write half of `find_caches`.

`Writes.read` follows what an attention reads back to a cache: a tensor that is written in place
(placeholder, or born here), a `cat` that is returned, or the new tokens themselves. Each becomes one
`Cache`, whose `frames` say which slot index 0 of each tensor that holds cache data stands for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from . import graph_types as kinds
from . import views
from .graph_types import CacheWrite
from .normalize import output_args
from .scalars import Scalars
from .views import arg, constant, rank, same, same_shape, shape

aten = torch.ops.aten

SEQ = 2  # the slots' dim of [B, Hkv, len, D]
ZERO_FILLED = {
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.full.default,
    aten.full_like.default,
    aten.new_full.default,
}
FULL = {aten.full.default, aten.full_like.default, aten.new_full.default}
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
STRICT_VIEWS = {
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


class NoCache(Exception):
    """What attention reads is not a cache that can be packed: (reason, kind or None, base node)."""

    def __init__(self, reason: str, kind: int | None = None, base: Node | None = None) -> None:
        super().__init__(reason)
        self.reason, self.kind, self.base = reason, kind, base


@dataclasses.dataclass(eq=False)
class Cache:
    """A cache with its write, and what must be known to account for its readers.

    Attributes:
        write: the result handed on.
        frames: tensor node -> slot that its index 0 stands for (int or SymInt).
        inside: nodes of the write itself; they may read the cache before it is written.
        commit: the node that changes the cache in place; None for growing caches.
        out_nodes: output arguments that are the updated cache.
        label: Dynamo source of the placeholder, or "".
    """

    write: CacheWrite
    frames: dict[Node, Any]
    inside: set[Node]
    commit: Node | None = None
    out_nodes: set[Node] = dataclasses.field(default_factory=set)
    label: str = ""


@dataclasses.dataclass
class Place:
    """Where a tensor lies in the tensor it is a view or copy of: `root[:, :, first : first + ...]`."""

    root: Node
    first: Any
    path: list[Node]


@dataclasses.dataclass
class Read:
    """Slots `first .. first + length - 1` of a cache, and the nodes walked over to get there."""

    cache: Cache
    first: Any
    length: Any
    path: list[Node]


class Writes:
    """All caches of one graph, found on demand."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.scalars = Scalars(graph)
        self._order = {node: place for place, node in enumerate(graph.nodes)}
        self.outputs = output_args(graph)
        self.live = nodes.live_nodes(graph)
        self.caches: dict[Node, Cache] = {}  # by every root in `frames`

    def order(self, node: Node) -> int:
        """Place of a node in the program; nodes that the finders added stand at the front."""
        return self._order.get(node, -1)

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
        if self._is_base(root):
            cache = self._in_place(root)
        elif root.target is aten.roll.default and self._is_base(self.locate(root.args[0]).root):
            cache = self._in_place(self.locate(root.args[0]).root)
        else:
            base = self._copied_into(root)
            if base is not None:
                cache = self._in_place(base)
            elif root.target is aten.cat.default:
                cache = self._growing(root)
            else:
                cache = self._returned(root)
        if root not in cache.frames:
            raise NoCache(f"the cache is computed by {nodes.where(root)}", cache.write.kind)
        for node in cache.frames:
            self.caches[node] = cache
        self._find_outputs(cache)
        return cache

    @staticmethod
    def _is_base(node: Node) -> bool:
        """A tensor that lives on its own: an input, or one allocated (zero or empty) here."""
        if node.op in ("placeholder", "get_attr"):
            return True
        if node.target in FULL:
            return constant(arg(node, "fill_value")) == 0 and rank(node) == 4
        return node.target in ZERO_FILLED and rank(node) == 4 and not _is_empty(node)

    # Writes in place: kinds 1, 2, 4 and 6.

    def _in_place(self, base: Node) -> Cache:
        _refuse_parameter(base)
        if rank(base) != 4:
            raise NoCache("the cache is a part of a larger tensor", kinds.SLAB, base)
        writers = self.writers(base)
        if not writers:
            if base.op == "placeholder":
                raise NoCache("the cache is not written in this graph", kinds.READ_ONLY, base)
            raise NoCache("keys or values are constants of the graph")
        if base.op != "placeholder" and len(writers) > 1:  # a workspace put together from parts
            for node in writers:
                self._raise_latent(node)
        if len(writers) > 1:
            raise NoCache(f"written again by {nodes.where(writers[1])}", None, base)
        node = writers[0]
        if node.target is aten.index_copy_.default:
            cache = self._at_positions(base, node, node.args[1] % 4, node.args[2], node.args[3])
        elif node.target is aten.index_put_.default:
            cache = self._index_put(base, node)
        elif node.target is aten.copy_.default:
            cache = self._copy(base, node)
        else:
            raise NoCache(f"written by {nodes.where(node)}", None, base)
        write = cache.write
        cache.commit = node
        write.source = nodes.source_line(node)
        if base.op == "placeholder":
            write.past = base
            cache.label = base.meta.get("hqmq_source", "")
        else:
            write.born, write.kind = base, kinds.BORN
        write.results = [node if self._whole(node, base) else base]
        self._check_tokens(base, write)
        return cache

    def writers(self, base: Node) -> list[Node]:
        """Nodes that change `base` in place, through whatever view, in program order."""
        found = {u for alias in self.aliases(base) for u in alias.users if alias in written(u)}
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

    def _whole(self, node: Node, base: Node) -> bool:
        place = self.locate(node)
        return place.root is base and same_shape(shape(node), shape(base))

    def _at_positions(
        self, base: Node, node: Node, dim: int, positions: Node, tokens: Node
    ) -> Cache:
        if not self._whole(node.args[0], base):
            raise self._partial(base, node, kinds.IN_PLACE)
        if dim != SEQ:
            raise NoCache(f"written along dim {dim}, not along dim 2", kinds.IN_PLACE, base)
        if rank(positions) == 0 and rank(tokens) == 3:  # one slot, without its dim
            positions = self._pure(node, aten.reshape.default, positions, [1])
            tokens = self._pure(node, aten.unsqueeze.default, tokens, SEQ)
        if rank(positions) != 1:
            raise NoCache("positions are not one list of slots", kinds.IN_PLACE, base)
        expected = (*shape(base)[:2], shape(positions)[0], shape(base)[3])
        tokens = self._four_dims(node, tokens, expected)
        if not same_shape(shape(tokens), expected):
            raise NoCache("what is written is broadcast over slots or heads", kinds.IN_PLACE, base)
        write = CacheWrite(kinds.IN_PLACE, kinds.IN_PLACE, tokens, positions=positions)
        write.erase = [node]
        return Cache(write, {base: 0}, {node})

    def _index_put(self, base: Node, node: Node) -> Cache:
        indices = list(node.args[1])
        if arg(node, "accumulate"):
            raise NoCache("written by adding", kinds.IN_PLACE, base)
        if len(indices) < 3 or indices[2] is None or any(i is not None for i in indices[:2]):
            raise NoCache(f"written by {nodes.where(node)} at [B, H, slot]", kinds.IN_PLACE, base)
        if (
            any(i is not None for i in indices[3:])
            or nodes.value_of(indices[2]).dtype is torch.bool
        ):
            raise NoCache(f"written by {nodes.where(node)} with a mask", kinds.IN_PLACE, base)
        return self._at_positions(base, node, SEQ, indices[2], node.args[2])

    def _copy(self, base: Node, node: Node) -> Cache:
        target, source = node.args[:2]
        if self._whole(target, base):
            return self._copy_whole(base, node, source)
        tokens = source
        inside = {node}
        if target.target is aten.select.int and rank(target) == 3:
            # A single slot without its dim: `cache[:, :, i] = k[:, :, 0]`.
            place, found = self.locate(target.args[0]), views.slice_range(target, SEQ)
            if rank(source) == 3:
                tokens = self._pure(node, aten.unsqueeze.default, source, SEQ)
            inside.add(target)
        else:
            found, place = (0, shape(target)[SEQ] if rank(target) == 4 else 0), self.locate(target)
        if found is None or place.root is not base:
            raise self._partial(base, node, kinds.SLICE)
        expected = (*shape(base)[:2], found[1], shape(base)[3])
        tokens = self._four_dims(node, tokens, expected)
        if not same_shape(shape(tokens), expected):
            raise self._partial(base, node, kinds.SLICE)
        write = CacheWrite(kinds.SLICE, kinds.SLICE, tokens)
        write.start = self._scalar(place.first + found[0], base)
        write.erase = [node]
        return Cache(write, {base: 0}, inside | set(place.path))

    def _copy_whole(self, base: Node, node: Node, source: Node) -> Cache:
        """The whole cache is copied from a window that slid, or from the newest of the new tokens."""
        place, size = self.locate(source), shape(base)[SEQ]
        inside = {node, *place.path}
        root = place.root
        if root.target is aten.roll.default and self._whole(root.args[0], base):
            return self._rolled(base, node, root, inside)
        slots, tokens = self._parts(root, base, inside)
        begin, end = slots
        new = shape(tokens)[SEQ]
        if not same(place.first + size, shape(root)[SEQ]):
            raise NoCache(f"{nodes.where(node)} keeps others than the newest", kinds.WINDOW, base)
        total = end + new
        write = CacheWrite(kinds.WINDOW, kinds.WINDOW, tokens)
        write.start = self._scalar(end, base)
        write.erase = [node]
        if same(begin, 0) and same(total, size):
            write.kind = write.write_kind = kinds.SLICE
        else:
            write.keep = self._scalar(size, base)
        return Cache(write, {base: total - size, root: begin}, inside)

    def _parts(self, root: Node, base: Node, inside: set[Node]) -> tuple[tuple[Any, Any], Node]:
        """((first, end) of the slots kept of the past, new tokens) of what a cache becomes."""
        if root.target is not aten.cat.default:
            if root.target in OUT_OF_PLACE_OPS:
                raise NoCache(f"written out of place by {nodes.where(root)}", 5, base)
            return (0, 0), root
        parts = [part for part in root.args[0] if not _is_empty(part)]
        if not any(self.base_of(part) is base for part in parts):
            return (0, 0), root if len(parts) > 1 else parts[0]
        if arg(root, "dim") not in (SEQ, -2) or len(parts) != 2 or rank(root) != 4:
            raise NoCache(f"written by {nodes.where(root)} of {len(parts)} parts", None, base)
        inside.add(root)
        past = self.locate(parts[0])
        if past.root is not base:
            raise NoCache(f"{nodes.where(root)} does not start with the past", None, base)
        inside.update(past.path)
        return (past.first, past.first + shape(parts[0])[SEQ]), parts[1]

    def _rolled(self, base: Node, node: Node, roll: Node, inside: set[Node]) -> Cache:
        """`roll(-n)`, the last `n` slots overwritten, and copied back."""
        size = shape(base)[SEQ]
        shifts, dims = arg(roll, "shifts"), arg(roll, "dims")
        writers = self.writers(roll)
        bad = NoCache(f"{nodes.where(roll)} is not a window that slides", kinds.WINDOW, base)
        if list(dims) not in ([SEQ], [-2]) or len(writers) != 1:
            raise bad
        put, shift = writers[0], -shifts[0]
        if put.target is aten.index_put_.default and put.args[0] is roll:
            indices = list(put.args[1])
            slot = constant_vector(indices[2]) if len(indices) == 3 else None
            if any(i is not None for i in indices[:2]) or shift != 1 or slot is None:
                raise bad
            if slot != -1 and not same(slot, size - 1):
                raise bad
            tokens = put.args[2]
        elif put.target is aten.copy_.default and self.locate(put.args[0]).root is roll:
            last = self.locate(put.args[0])
            if rank(put.args[0]) != 4 or not same(last.first + shift, size):
                raise bad
            inside.update(last.path)
            tokens = put.args[1]
        else:
            raise bad
        expected = (*shape(base)[:2], shift, shape(base)[3])
        tokens = self._four_dims(put, tokens, expected)
        if not same_shape(shape(tokens), expected):
            raise bad
        write = CacheWrite(kinds.WINDOW, kinds.WINDOW, tokens)
        write.start = write.keep = self._scalar(size, base)
        write.erase = [node, put]
        return Cache(write, {base: shift, roll: shift}, inside | {roll, put})

    def _copied_into(self, root: Node) -> Node | None:
        """The cache that (the newest part of) `root` is copied into as a whole, or is written to."""
        todo, seen = [root], set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            for user in self.users(node):
                if user.target is aten.copy_.default and user.args[1] is node:
                    target = self.locate(user.args[0])
                    if self._is_base(target.root) and self._whole(user.args[0], target.root):
                        return target.root
                if user.op == "call_function" and self.locate(user).root is root:
                    todo.append(user)
        return None

    # Growing caches: kind 3.

    def _growing(self, cat: Node) -> Cache:
        """`cat([past, new], -2)`, returned whole or as its newest slots."""
        parts = [part for part in cat.args[0] if not _is_empty(part)]
        if arg(cat, "dim") not in (SEQ, -2) or rank(cat) != 4 or not 1 <= len(parts) <= 2:
            raise self._foreign(cat)
        inside = {cat}
        base, begin, end, tokens = None, 0, 0, parts[-1]
        if len(parts) == 2:
            past = self.locate(parts[0])
            if past.root.op != "placeholder" or rank(past.root) != 4:
                raise self._foreign(cat)
            base, begin = past.root, past.first
            _refuse_parameter(base)
            end = begin + shape(parts[0])[SEQ]
            inside.update(past.path)
            if not same(end, shape(base)[SEQ]):
                raise NoCache("grown from a part of the past", kinds.GROWING, base)
            if self.writers(base):
                raise NoCache("both grown and written in place", kinds.GROWING, base)
        write = CacheWrite(kinds.GROWING, kinds.GROWING, tokens, past=base)
        write.start = self._scalar(end, base)
        cache = Cache(write, {cat: begin}, inside)
        if base is not None:
            cache.frames[base] = 0
            cache.label = base.meta.get("hqmq_source", "")
        write.source = nodes.source_line(cat)
        self._kept(cache, cat)
        if not same(begin, 0) and write.keep is None:
            write.keep = self._scalar(shape(cat)[SEQ], base)
        self._check_tokens(cat, write)
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
            bound = _tail(place.path)
            keep = (
                None if same(size, total) and bound is None else (size if bound is None else bound)
            )
            if not nodes.may_equal(place.first + size, total):
                raise NoCache("a part of the cache is returned", kinds.GROWING)
            if found is not None and found != (keep,):
                raise NoCache("the cache is returned in two lengths", kinds.GROWING)
            found = (keep,)
            cache.out_nodes.add(out)
            cache.inside.update(place.path)
        if found is None:
            raise self._foreign(root)
        if found[0] is not None:
            cache.write.keep = self._scalar(found[0], root)
        cache.write.results = sorted(cache.out_nodes, key=self.order)

    def _returned(self, tokens: Node) -> Cache:
        """No `cat` at all: the first call returns its own keys (perhaps the newest) as the cache."""
        if tokens.target in OUT_OF_PLACE_OPS | GATHERS:
            raise self._foreign(tokens)
        write = CacheWrite(kinds.GROWING, kinds.GROWING, tokens, start=0)
        cache = Cache(write, {tokens: 0}, set())
        write.source = nodes.source_line(tokens)
        self._kept(cache, tokens)
        return cache

    # Everything else.

    def _foreign(self, node: Node) -> NoCache:
        """Says what stands in the place of a cache."""
        base = self.base_of(node)
        if base is not None and base.op == "placeholder" and base is not node:
            if rank(base) != 4:
                return NoCache("the cache is a part of a larger tensor", kinds.SLAB, base)
            if self.writers(base):
                return NoCache(
                    f"the cache is read through {nodes.where(node)}", kinds.IN_PLACE, base
                )
            return NoCache("the cache is not written in this graph", kinds.READ_ONLY, base)
        if views.is_cast(node):
            return self._cast(node)
        node = node if base is None or base.op == "placeholder" else base
        inputs = [self.base_of(i) for i in node.all_input_nodes if nodes.is_tensor(i)]
        stored = [i for i in inputs if i is not None and i.op == "placeholder" and rank(i) >= 3]
        if node.target in OUT_OF_PLACE_OPS and stored:
            reason = f"written out of place by {nodes.where(node)}"
            return NoCache(reason, kinds.OUT_OF_PLACE, stored[0])
        if node.target in GATHERS and stored:
            kind = kinds.PAGED if self.writers(stored[0]) else kinds.READ_ONLY
            return NoCache(f"the cache is gathered by {nodes.where(node)}", kind, stored[0])
        self._raise_latent(node)
        return NoCache(f"no cache: made by {nodes.where(node)} and not kept")

    def _cast(self, node: Node) -> NoCache:
        dtypes = [str(nodes.value_of(n).dtype).removeprefix("torch.") for n in (node.args[0], node)]
        reason = "cast from {} to {} between cache and attention".format(*dtypes)
        try:
            write = self.read(node.args[0]).cache.write
        except NoCache as error:
            return NoCache(error.reason, error.kind, error.base)
        return NoCache(reason, write.kind, write.past)

    def _raise_latent(self, node: Node) -> None:
        """Refuse a cache that is projected on its way to attention (MLA), if that is what it is."""
        latent = self._latent(node)
        if latent is not None:
            reason = f"{nodes.where(latent[1])} between cache and attention"
            raise NoCache(reason, kinds.LATENT, latent[0])

    @staticmethod
    def base_of(node: Node) -> Node | None:
        """The tensor whose storage `node` may be a view of."""
        while True:
            inner = nodes.aliased_args(node)
            if not inner:
                return node
            node = inner[0]

    def _latent(self, node: Node) -> tuple[Node, Node] | None:
        """The cache behind `node` and the projection in between, or None."""
        todo, seen = [(node, None)], set()
        while todo and len(seen) < 64:
            node, linear = todo.pop(0)
            if node in seen or node.op == "placeholder" or node.target in ATTENTION:
                continue
            seen.add(node)
            if linear is not None:
                if node.target is aten.cat.default and arg(node, "dim") in (-2, rank(node) - 2):
                    first = self.base_of(node.args[0][0])
                    if first is not None and (first.op == "placeholder" or _is_empty(first)):
                        return first, linear
                written = nodes.written_args(node)
                if written and self._is_base(self.base_of(written[0])) and rank(node) >= 3:
                    return self.base_of(written[0]), linear
            linear = node if linear is None and node.target in LINEAR else linear
            inputs = node.args[:1] if node.target in LINEAR else node.all_input_nodes
            todo.extend((i, linear) for i in inputs if isinstance(i, Node))
        return None

    def _partial(self, base: Node, node: Node, kind: int) -> NoCache:
        return NoCache(f"{nodes.where(node)} writes other than whole slots", kind, base)

    def _four_dims(self, node: Node, tokens: Node, expected: tuple[Any, ...]) -> Node:
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
            tokens = self._pure(node, aten.unsqueeze.default, tokens, 0)
        return tokens

    def _pure(self, like: Node, target: Any, *args: Any) -> Node:
        """A new pure node in front of `like`."""
        with self.graph.inserting_before(like):
            node = self.graph.call_function(target, args)
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        with values[0].fake_mode:
            node.meta = {"val": target(*values), "stack_trace": like.meta.get("stack_trace")}
        self._order[node] = self.order(like)
        return node

    def _scalar(self, value: Any, base: Node | None) -> Any:
        made = self.scalars.make(value)
        if made is None:
            raise NoCache(f"slot {value} is known on the device only", None, base)
        return made

    def _check_tokens(self, base: Node, write: CacheWrite) -> None:
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
        base = cache.write.born or cache.write.past
        if cache.commit is not None:
            for out in self.outputs:
                if nodes.is_tensor(out) and rank(out) == 4 and self._whole(out, base):
                    cache.out_nodes.add(out)
        cache.write.outputs = [
            place
            for place, out in enumerate(self.outputs)
            if isinstance(out, Node) and out in cache.out_nodes
        ]
        if cache.write.born is not None and not cache.write.outputs:
            raise NoCache("allocated in this graph but not returned", kinds.BORN)


def written(node: Node) -> list[Node]:
    """Arguments that `node` writes in place."""
    return nodes.written_args(node)


def constant_vector(node: Any) -> float | None:
    """The number in a constant one-element index tensor."""
    if not isinstance(node, Node) or not same_shape(shape(node), (1,)):
        return None
    return constant(node)


def _refuse_parameter(base: Node) -> None:
    if "._parameters[" in base.meta.get("hqmq_source", ""):
        raise NoCache("a parameter stands in the place of the cache", None, base)


def _is_empty(node: Node) -> bool:
    """A tensor known to hold no element."""
    return nodes.is_tensor(node) and any(same(size, 0) for size in shape(node))


def _tail(path: list[Node]) -> int | None:
    """`w` when a path holds a slice `[:, :, -w:]`, which keeps all where there are fewer."""
    for node in path:
        if node.target is aten.slice.Tensor and arg(node, "dim") in (SEQ, -2):
            start = arg(node, "start")
            if isinstance(start, int) and start < 0:
                return -start
    return None
