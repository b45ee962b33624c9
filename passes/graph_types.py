"""What the finders hand to the rewriter: attentions, cache writes, and the pairs of both.

Every kind of cache (`shared/graphs.md`) is told in the same terms. Before the call the cache
tensor `[B, Hkv, len, D]` holds logical slots `0 .. len - 1`. The call writes `n` new tokens at
slots `start .. start + n - 1`; slots beyond `len` are new room (a growing cache always starts at
`len`). Then, where `keep` is given, only the newest `keep` slots remain (all of them when there
are fewer) and logical index 0 moves up. Attention reads slots `first .. first + length - 1`, still
counted from the logical index 0 of before the call.

Scalars are Python ints where static, else nodes of the graph. The finders may add pure nodes: sums
of SymInt inputs (right behind the placeholders), `logical_not` of a mask, `unsqueeze` / `reshape`
of what is written. They change and remove nothing.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Node

Scalar = int | Node

IN_PLACE = 1  # index_copy_ / index_put_ at tensor positions
SLICE = 2  # copy_ into a slice
GROWING = 3  # cat([past, new]) returned from the graph
WINDOW = 4  # a window of fixed length that slides
OUT_OF_PLACE = 5  # where / scatter / index_copy / slice_scatter
BORN = 6  # allocated in this graph, written as kind 1, 2 or 4, and returned
SLAB = 7  # a part of a larger tensor
PAGED = 8  # gathered by block table
READ_ONLY = 9  # never written in this graph
LATENT = 10  # MLA: a projection stands between cache and attention


@dataclasses.dataclass(frozen=True)
class Part:
    """What the view of a part `[B, H, L, D]` of a cache in another layout is a view of (`layouts`).

    Attributes:
        tensor: the input of the graph, or the node that allocates the cache.
        index: which part; () where the whole tensor is one.
        lead: number of parts, of each dim of `index`.
        order: `tensor.permute(order)` is `[*lead, B, H, L, D]`.
    """

    tensor: Node
    index: tuple[int, ...]
    lead: tuple[int, ...]
    order: tuple[int, ...]


def part_of(node: Node) -> Part | None:
    """The part that a node is the view of, or None."""
    return node.meta.get("hqmq_part")


def tensor_of(node: Node) -> Node:
    """The tensor that a cache lies in: itself, but for the view of a part."""
    part = part_of(node)
    return node if part is None else part.tensor


def refusal(node: Node) -> str | None:
    """Why `layouts` left a tensor as it is stored, or None."""
    return node.meta.get("hqmq_layout")


def is_input(node: Node) -> bool:
    """Whether a node is an input of the graph, or the view of a part of one."""
    return tensor_of(node).op == "placeholder"


@dataclasses.dataclass(eq=False)
class Attention:
    """One attention of the graph, in canonical form.

    `key` and `value` are the un-expanded tensors `[B, Hkv, T, D]` and `[B, Hkv, T, Dv]`, each query
    head `h` reading head `h // groups`. `softmax(softcap(scale q k^T) + mask)` with `sinks` as one
    more column that is dropped afterwards.

    Attributes:
        node: the node to replace, `[B, Hq, n, Dv]`.
        form: "sdpa", "eager", "flex", "einsum" or "baddbmm".
        query: `[B, Hq, n, D]`.
        scale: factor on the logits; None means `1 / sqrt(D)`.
        mask: bool (True = attend) or additive float, broadcastable to `[B, Hq, n, T]`, or None.
        causal: top-left aligned, as `is_causal` of SDPA.
        softcap: `softcap * tanh(logits / softcap)`, before the mask.
        sinks: `[Hq]`, or None.
        groups: query heads per KV head.
        nodes: all nodes that the attention consists of (matmuls, softmax, ...), in order.
        key_path: the no-op and expanding nodes between `key` and the attention, nearest to `key`
            last; empty where the attention reads `key` itself. `value_path` likewise.
        source: "file.py:line", innermost frame of the model's own code.
        module: path of the module the node came from, such as "model.layers.0.self_attn", or "".
        reason: why it cannot be rewritten, or None. Fields that were not recognised are then None.
    """

    node: Node
    form: str
    query: Node | None = None
    key: Node | None = None
    value: Node | None = None
    scale: float | None = None
    mask: Node | None = None
    causal: bool = False
    softcap: float | None = None
    sinks: Node | None = None
    groups: int = 1
    nodes: list[Node] = dataclasses.field(default_factory=list)
    key_path: list[Node] = dataclasses.field(default_factory=list)
    value_path: list[Node] = dataclasses.field(default_factory=list)
    source: str = ""
    module: str = ""
    reason: str | None = None


@dataclasses.dataclass(eq=False)
class DenseRead:
    """How the readers of a packed cache get it as a dense tensor, where no op attends to it packed.

    Attributes:
        nodes: each node that equals slots `first .. first + length - 1`, and its (first, length).
        inside: users of `nodes` that are the write itself, and do not read the result.
        anchor: the first reader, or the graph's output.
        length: slots `0 .. length - 1` cover all `nodes`; 0 where nothing but the caller reads.
    """

    nodes: dict[Node, tuple[Scalar, Scalar]]
    inside: set[Node]
    anchor: Node
    length: Scalar


@dataclasses.dataclass(eq=False)
class CacheWrite:
    """How one cache tensor is updated in the graph (one object per cache, shared by its readers).

    Attributes:
        kind: 1, 2, 3, 4, 6 or 9 (the constants of this module).
        write_kind: as `kind`, but for a cache born in the graph the kind of its write (1, 2 or 4).
        past: the cache's placeholder, or the view of a part of it (`part_of`); None when it is born
            here or starts empty.
        born: the node that allocates the cache (`zeros`, ...), or None.
        tokens: what is written, `[B, Hkv, n, D]`; `past` itself for a cache that is only read.
        positions: 1-D integer node with the slots written, or None.
        start: first slot written, where `positions` is None.
        keep: slots that remain after the write, or None for all.
        results: nodes that equal the whole updated cache.
        outputs: places in the graph's output tuple that hold the updated cache.
        returned: order of dims that makes what is returned there `[B, Hkv, L, D]`; None: it is that.
        erase: the mutating nodes to delete once nothing reads them: erase them in this order, pure
            nodes between them fall to dead code elimination.
        readers: number of attentions that read the updated cache.
        dense: set where the readers get a dense tensor (`passes/read_dense.py`).
        source: "file.py:line" of the write.
        reason: why the cache cannot be packed, or None.
    """

    kind: int
    write_kind: int
    tokens: Node
    past: Node | None = None
    born: Node | None = None
    positions: Node | None = None
    start: Scalar | None = None
    keep: Scalar | None = None
    results: list[Node] = dataclasses.field(default_factory=list)
    outputs: list[int] = dataclasses.field(default_factory=list)
    returned: tuple[int, ...] | None = None
    erase: list[Node] = dataclasses.field(default_factory=list)
    readers: int = 0
    dense: DenseRead | None = None
    source: str = ""
    reason: str | None = None

    @property
    def base(self) -> Node | None:
        """The cache's tensor: its placeholder, or the node that allocates it; None at a first call."""
        return self.born if self.past is None else self.past


@dataclasses.dataclass(eq=False)
class Match:
    """One attention with the caches it reads, or why there is none.

    Attributes:
        attention: None for a tensor that is written like a cache but never attended.
        key, value: their writes; None where not recognised.
        first, length: slots that attention reads (module docstring); None where not recognised.
        kind: kind of both caches, as far as recognised; None for an attention without cache.
        shared: more than one attention reads these caches (the write happens once).
        dense: why attention reads a dense copy of the packed caches; "" where it reads them packed.
            Then one of `key` and `value` may be None: what could not be packed.
        source_name: Dynamo source of the key cache, such as `L['cache'].layers[0].keys`; for a
            cache without placeholder the module path of the attention.
        reason: why the graph is left alone here, or None for a match.
    """

    attention: Attention | None
    key: CacheWrite | None = None
    value: CacheWrite | None = None
    first: Scalar | None = None
    length: Scalar | None = None
    kind: int | None = None
    shared: bool = False
    dense: str = ""
    source_name: str = ""
    reason: str | None = None

    @property
    def writes(self) -> list[CacheWrite]:
        """`key` and `value`, as far as they were recognised."""
        return [write for write in (self.key, self.value) if write is not None]
