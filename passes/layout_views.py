"""Views of a cache told over again as views of its parts `[B, H, L, D]`: the moves of `layouts`.

An alias of the cache is first a view of the whole tensor, from which parts are selected step by step
(`Aliases.collect`, which changes nothing), then a view of one part: `canon.permute(order)`, `canon`
being a view of the part whose dims have the order of `[B, H, L, D]` (`Aliases.rewrite`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from . import nodes, views
from .nodes import arg, aten, emit, rank, shape

CANONICAL = (0, 1, 2, 3)  # the dims of [B, H, L, D]
SLICES = {aten.slice.Tensor, aten.narrow.default, aten.narrow.Tensor}


class Refused(Exception):
    """A tensor keeps its layout, because of a use that belongs to no single part."""


def inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(order.index(i) for i in range(len(order)))


def permuted(graph: Graph, node: Node, order: tuple[int, ...], *, before: Node) -> Node:
    """`node.permute(order)`; of a permuted tensor, that tensor where the two cancel."""
    inner = views.permutation(node)
    if inner is not None:
        order, node = tuple(inner[i] for i in order), node.args[0]
    if order == tuple(range(len(order))):
        return node
    return emit(graph, aten.permute.default, (node, list(order)), before=before)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """An alias of the whole tensor: its dims are dims of it; parts may be picked already.

    `moves` are slices, and selects of other dims than those of the parts, still to be made.
    """

    node: Node
    dims: tuple[int, ...]
    picked: dict[int, int]
    moves: tuple[tuple[int, Node], ...] = ()


class Aliases:
    """All aliases of one tensor `root`, where `root.permute(order)` is `[*parts, B, H, L, D]`.

    Args:
        lead: dims of `root` that choose the part.
        keep_readers: those who read the tensor in its own layout go on reading `root`.
    """

    def __init__(
        self,
        graph: Graph,
        root: Node,
        lead: tuple[int, ...],
        order: tuple[int, ...],
        *,
        keep_readers: bool = False,
    ) -> None:
        self.graph, self.root, self.lead, self.order = graph, root, lead, order
        self.keep_readers = keep_readers
        self.parts: list[_Whole] = []  # aliases of one part each
        self.writes: list[tuple[_Whole, Node]] = []  # writes of several parts at once
        self.seen: dict[Node, None] = {}  # views that nobody needs afterwards
        self.made: set[Node] = set()
        self.canon: dict[tuple[int, ...], Node] = {}
        self.make: Callable[[tuple[int, ...]], Node] | None = None

    # -- aliases of the whole --------------------------------------------------------------------
    def collect(self) -> None:
        """Find where each part is taken. Raises `Refused`; changes nothing."""
        todo = [_Whole(self.root, tuple(range(rank(self.root))), {})]
        while todo:
            alias = todo.pop(0)
            if len(alias.picked) == len(self.lead):
                self.parts.append(alias)
                continue
            for user in list(alias.node.users):
                todo.extend(self._follow(alias, user))

    def _follow(self, alias: _Whole, user: Node) -> list[_Whole]:
        node, dims = alias.node, alias.dims
        if user.op == "output":
            if alias.dims != tuple(range(rank(self.root))) or alias.moves:
                raise Refused(f"returned in part or in another form ({nodes.where(node)})")
            return []
        self.seen[user] = None
        if user.target in nodes.SIZE_OPS:
            return []
        if user.target is aten.unbind.int:
            return [found for item in list(user.users) for found in self._follow(alias, item)]
        order, selected = views.permutation(user), views.selection(user)
        if order is not None:
            return [dataclasses.replace(alias, node=user, dims=tuple(dims[i] for i in order))]
        if selected is not None:
            _, place, index = selected
            dim, rest = dims[place], dims[:place] + dims[place + 1 :]
            if dim not in self.lead:
                moves = (*alias.moves, (dim, user))
                return [dataclasses.replace(alias, node=user, dims=rest, moves=moves)]
            index = nodes.number(index)
            if not isinstance(index, int):
                raise Refused(f"its part is chosen at run time by {nodes.where(user)}")
            picked = alias.picked | {dim: index % shape(self.root)[dim]}
            return [dataclasses.replace(alias, node=user, dims=rest, picked=picked)]
        if _is_alias(user, node):
            return [dataclasses.replace(alias, node=user)]
        place = sliced_dim(user)
        if place is not None and dims[place] not in self.lead:
            moves = (*alias.moves, (dims[place], user))
            return [dataclasses.replace(alias, node=user, moves=moves)]
        written = nodes.written_args(user)
        if written:
            if user.args[0] is node and len(alias.picked) < len(self.lead) and _Write.of(user):
                self.writes.append((alias, user))
                return [dataclasses.replace(alias, node=user)]
            raise Refused(f"also written by {nodes.where(user)}")
        raise Refused(f"read by {nodes.where(user)} as a whole")

    # -- aliases of a part -----------------------------------------------------------------------
    def rewrite(self, part: Callable[[tuple[int, ...]], Node]) -> None:
        """Replace all aliases; `part(index)` makes the view of one part."""
        self.make = part
        for alias, user in self.writes:
            self._write_parts(alias, user)
        for alias in self.parts:
            canon, order = self._start(alias, tuple(alias.picked[dim] for dim in self.lead))
            self._visit(alias.node, canon, order)
        for alias, user in reversed(self.writes):
            user.replace_all_uses_with(alias.node)  # dead views, and the output
            self.graph.erase_node(user)
        for node in reversed(self.seen):
            if not node._erased and not node.users:
                self.graph.erase_node(node)

    def _start(self, alias: _Whole, index: tuple[int, ...]) -> tuple[Node, tuple[int, ...]]:
        """The part's view with the moves of `alias` made, and the order of its dims in `alias`."""
        canon, have = self._part(index), list(self.order[len(self.lead) :])
        for dim, move in alias.moves:
            place = have.index(dim)
            canon = self._move(canon, move, place)
            if views.selection(move) is not None:
                have.remove(dim)
        return canon, tuple(have.index(dim) for dim in alias.dims if dim in have)

    def _part(self, index: tuple[int, ...]) -> Node:
        if index not in self.canon:
            self.canon[index] = self.make(index)
            self.made.add(self.canon[index])
        return self.canon[index]

    def _move(self, canon: Node, move: Node, place: int) -> Node:
        """A slice, narrow or select of another tensor, along dim `place` of `canon`."""
        selected = views.selection(move)
        if selected is not None:
            args = (canon, place, selected[2])
            return self._emit(aten.select.int, args, move)
        if move.target is aten.slice.Tensor:
            bounds = [arg(move, name) for name in ("start", "end", "step")]
            return self._emit(aten.slice.Tensor, (canon, place, *bounds), move)
        return self._emit(move.target, (canon, place, *move.args[2:]), move)

    def _emit(self, target: Any, args: tuple, like: Node) -> Node:
        node = emit(self.graph, target, args, before=like)
        self.made.add(node)
        return node

    def _visit(self, old: Node, canon: Node, order: tuple[int, ...]) -> None:
        """Give the users of `old`, which is `canon.permute(order)`, what they need of `canon`."""
        self.seen[old] = None
        for user in list(old.users):
            if user in self.made:
                continue
            if user.op == "output":
                self._return(user, old, canon, order)
                continue
            step, place = views.permutation(user), sliced_dim(user)
            if step is not None:
                self._visit(user, canon, tuple(order[i] for i in step))
            elif views.selection(user) is not None:
                self._select(user, canon, order)
            elif user.target is aten.unbind.int:
                for item in list(user.users):
                    self._select(item, canon, order)
                self._sweep(user)
            elif place is not None:
                self._visit(user, self._move(canon, user, order[place]), order)
            elif _is_alias(user, old):
                self._visit(user, canon, order)
            elif user.target is aten.sym_size.int:
                user.args = (canon, order[user.args[1] % len(order)])
            elif user.args and user.args[0] is old and (write := _Write.of(user)) is not None:
                self._visit(user, self._write(write, user, canon, order), order)
                self.graph.erase_node(user)
            elif order != tuple(range(len(order))) and _is_window(user):
                new = self._window(user, old, canon, order)
                self._visit(user, new, order)
                self.graph.erase_node(user)
            elif not self.keep_readers or order == tuple(range(len(order))):
                user.replace_input_with(old, self._as(canon, order))
        self._sweep(old)

    def _sweep(self, old: Node) -> None:
        for user in list(old.users):
            if user in self.seen and not user.users:
                self.graph.erase_node(user)

    def _select(self, user: Node, canon: Node, order: tuple[int, ...]) -> None:
        gone = order[views.selection(user)[1]]
        rest = tuple(d - (d > gone) for d in order if d != gone)
        self._visit(user, self._move(canon, user, gone), rest)

    def _as(self, canon: Node, order: tuple[int, ...]) -> Node:
        """`canon.permute(order)`."""
        if order == tuple(range(len(order))):
            return canon
        for user in canon.users:
            if user.target is aten.permute.default and tuple(user.args[1]) == order:
                return user
        node = emit(self.graph, aten.permute.default, (canon, list(order)), after=canon)
        self.made.add(node)
        return node

    def _window(self, user: Node, old: Node, canon: Node, order: tuple[int, ...]) -> Node:
        """A window that slides, by `cat` or `roll` of `canon.permute(order)`, as one of `canon`."""
        if user.target is aten.roll.default:
            dims = [order[dim % 4] for dim in arg(user, "dims")]
            return self._emit(aten.roll.default, (canon, user.args[1], dims), user)
        back = inverse(order)
        parts = [
            canon if part is old else permuted(self.graph, part, back, before=user)
            for part in user.args[0]
        ]
        return self._emit(aten.cat.default, (parts, order[arg(user, "dim") % 4]), user)

    # -- outputs ---------------------------------------------------------------------------------
    def _return(self, output: Node, old: Node, canon: Node, order: tuple[int, ...]) -> None:
        """What the graph returns keeps its layout; its meta says what it is a view of, and which."""
        grown = self.root.target is aten.cat.default
        if not grown and not self.keep_readers:
            if self._is_whole(canon) and order == inverse(self.order):
                output.replace_input_with(old, self.root)
            else:
                output.replace_input_with(old, self._as(canon, order))
            return
        node = self._emit(aten.permute.default, (canon, list(order)), output)
        if grown and self._is_whole(canon):  # contiguous, as a cat is
            node = self._emit(aten.contiguous.default, (node,), output)
        node.meta["hqmq_canonical"], node.meta["hqmq_order"] = canon, inverse(order)
        output.replace_input_with(old, node)

    def _is_whole(self, canon: Node) -> bool:
        while nodes.written_args(canon):
            canon = canon.args[0]
        return canon in self.canon.values()

    # -- writes ----------------------------------------------------------------------------------
    def _write(self, write: _Write, user: Node, canon: Node, order: tuple[int, ...]) -> Node:
        """The write `user` of `canon.permute(order)` as one of `canon`."""
        if write.dim is not None and rank(write.positions) == 0:  # one slot, without its dim
            gone = order[write.dim]
            kept = tuple(d - (d > gone) for d in order if d != gone)
        else:
            kept = order
        source = self._pad(write.source, len(kept), user)
        source = permuted(self.graph, source, inverse(kept), before=user)
        if write.dim is None:
            return self._emit(aten.copy_.default, (canon, source), user)
        place = order[write.dim]
        if user.target is aten.index_copy_.default:
            return self._emit(user.target, (canon, place, write.positions, source), user)
        return self._emit(user.target, (canon, [None] * place + [write.positions], source), user)

    def _pad(self, source: Node, dims: int, user: Node) -> Node:
        """Leading dims of size 1, which broadcasting lets a write leave out."""
        while rank(source) < dims:
            source = self._emit(aten.unsqueeze.default, (source, 0), user)
        return source

    def _write_parts(self, alias: _Whole, user: Node) -> None:
        """One write into several parts at once becomes one into each."""
        write = _Write.of(user)
        free = [dim for dim in self.lead if dim not in alias.picked]
        dims = alias.dims
        for index in itertools.product(*(range(shape(self.root)[dim]) for dim in self.lead)):
            at = dict(zip(self.lead, index, strict=True))
            if any(at[dim] != i for dim, i in alias.picked.items()):
                continue
            canon, order = self._start(alias, index)
            source = self._pad(write.source, len(dims), user)
            for place in sorted((dims.index(dim) for dim in free), reverse=True):
                i = at[dims[place]] if not nodes.same(shape(source)[place], 1) else 0
                source = self._emit(aten.select.int, (source, place, i), user)
            dim = write.dim
            if dim is not None:
                dim -= sum(dims.index(d) < dim for d in free)
            part = dataclasses.replace(write, source=source, dim=dim)
            self._write(part, user, canon, order)


def _is_alias(node: Node, of: Node) -> bool:
    """Whether `node` is `of` itself under another name, for writes as well as for reads."""
    if of not in nodes.aliased_args(node) or not views.is_noop(node):
        return False
    return node.target is not aten.contiguous.default or nodes.value_of(of).is_contiguous()


def _is_window(node: Node) -> bool:
    """A `cat` or `roll` that nobody sees but views, in-place writes and attentions.

    Told over again it has other strides: nothing may depend on them, and nothing leave the graph.
    """
    if node.target not in (aten.cat.default, aten.roll.default) or rank(node) != 4:
        return False
    todo, seen = [node], set()
    while todo:
        alias = todo.pop()
        for user in alias.users:
            if user.op == "output" or user.target in (aten.view.default, aten._unsafe_view.default):
                return False
            if user not in seen and alias in nodes.aliased_args(user):
                seen.add(user)
                todo.append(user)
    return True


def sliced_dim(node: Node) -> int | None:
    """The dim that a slice or narrow (with step 1) is along, or None for another node."""
    if node.target not in SLICES:
        return None
    dim = arg(node, "dim") if node.target is aten.slice.Tensor else node.args[1]
    dim %= rank(node.args[0])
    return dim if views.slice_range(node, dim) is not None else None


@dataclasses.dataclass(frozen=True)
class _Write:
    """A write into a view: `source` into all of it, or at `positions` of its dim `dim`."""

    source: Node
    dim: int | None = None
    positions: Node | None = None

    @classmethod
    def of(cls, node: Node) -> _Write | None:
        """The write that `node` is, or None where it is of another kind."""
        dims = rank(node)
        if node.target is aten.copy_.default:
            write = cls(node.args[1])
        elif node.target is aten.index_copy_.default:
            write = cls(node.args[3], node.args[1] % dims, node.args[2])
        elif node.target is aten.index_put_.default and not arg(node, "accumulate"):
            places = [i for i, index in enumerate(node.args[1]) if index is not None]
            if len(places) != 1:
                return None
            write = cls(node.args[2], places[0], node.args[1][places[0]])
            if rank(write.positions) > 1 or nodes.value_of(write.positions).dtype is torch.bool:
                return None
        else:
            return None
        return write if nodes.is_tensor(write.source) and rank(write.source) <= dims else None
