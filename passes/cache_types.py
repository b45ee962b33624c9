"""What the cache finders pass among themselves, and small questions about cache tensors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch.fx import Node

from . import nodes
from .graph_types import READ_ONLY, CacheWrite, part_of
from .nodes import same, shape

ARGUMENT = re.compile(r"(L\['\w+'\])?")
SEQ = 2  # the slots' dim of [B, Hkv, len, D]


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

    @property
    def is_part(self) -> bool:
        """Whether it is one part of several of a larger tensor."""
        base = self.write.base
        part = None if base is None else part_of(base)
        return part is not None and bool(part.index)


@dataclasses.dataclass
class Place:
    """Where a tensor lies in the tensor it is a view or copy of: `root[:, :, first:]`."""

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


def is_empty(node: Node) -> bool:
    """A tensor known to hold no element."""
    return nodes.is_tensor(node) and any(same(size, 0) for size in shape(node))


def refuse_parameter(base: Node) -> None:
    """A learned prefix is no cache, however it is used."""
    if "._parameters[" in base.meta.get("hqmq_source", ""):
        raise NoCache("a parameter stands in the place of the cache", None, base)


def read_only_cache(base: Node, scalars: Any) -> Cache:
    """A cache that this graph only reads: of cross-attention, or of keys that a graph before wrote.

    Tensors that are arguments by themselves are not taken: they may be anything of the caller's.
    """
    source = base.meta.get("hqmq_source", "")
    if not base.meta.get("hqmq_packed") and ARGUMENT.fullmatch(source):
        raise NoCache("the cache is not written in this graph", READ_ONLY, base)
    length = scalars.make(shape(base)[SEQ])
    if length is None:
        raise NoCache("its length is known on the device only", READ_ONLY, base)
    write = CacheWrite(READ_ONLY, READ_ONLY, base, past=base, start=length)
    return Cache(write, {base: 0}, set(), label=source)
