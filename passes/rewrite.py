"""Fifth pass: each matched attention and its cache writes become one `hqmq::write_attend`.

The cache's placeholder is replaced by the eight buffers of its packed store (`cache/buffers.py`),
which the op mutates. A cache that is born in the graph becomes an input as well: the caller makes the
empty store, so no 16-bit cache is ever allocated. Graph outputs that were the updated cache are
dropped; the caller puts an `HQMQTensor` in their place.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from typing import Any

import torch
from torch._dynamo.source import AttrSource, LocalSource
from torch.fx import GraphModule, Node

from .. import ops  # noqa: F401  registers torch.ops.hqmq
from ..cache.buffers import Buffers, growing_blocks, shapes, static_blocks
from ..cache.parts import Layout
from ..codec.spec import CacheSpec
from ..config import HQMQConfig
from . import med3x
from .global_heads import shard_of
from .graph_types import GROWING, OUT_OF_PLACE, READ_ONLY, CacheWrite, Match, part_of, tensor_of
from .normalize import PlaceholderInfo, output_args

Symbolic = int | torch.SymInt


@dataclasses.dataclass(eq=False)
class Binding:
    """One packed cache of a rewritten graph: what the caller passes in and puts out.

    Sizes are ints, or SymInts over the sizes of the graph's inputs.

    Attributes:
        spec: codec and layout.
        arg: index of the user's cache tensor in the original arguments; None for a cache born here.
        growing: the cache is returned longer (kind 3) instead of written in place.
        read_only: the graph does not write it.
        out_of_place: the user's tensor stays as it is, and another one comes out.
        batch, heads, length: logical shape before the call (after it, for a static cache born here).
        count: tokens written.
        keep: slots kept afterwards, or 0.
        blocks: blocks of capacity that the graph was traced with; a SymInt where they may change.
        outputs: places in the original output tuple where the updated cache stood.
        start: node of the *normalised* graph with the positions written, or an int (for adoption).
        device: where the cache lives.
        source: Dynamo source of the user's tensor, for messages.
        keys: for values that are attended to packed, the place of their keys' binding.
        layout: of the user's tensor, where that is not one cache `[B, H, L, D]`.
        part: which part of it this cache is.
        returned: layout of what the caller puts out for a growing cache, likewise.
    """

    spec: CacheSpec
    arg: int | None
    growing: bool
    read_only: bool
    out_of_place: bool
    batch: Symbolic
    heads: Symbolic
    length: Symbolic
    count: Symbolic
    keep: Symbolic
    blocks: Symbolic
    outputs: list[int]
    start: Node | int
    device: torch.device
    source: str
    keys: int | None = None
    layout: Layout | None = None
    part: tuple[int, ...] = ()
    returned: Layout | None = None


@dataclasses.dataclass(eq=False)
class Rewritten:
    """A rewritten graph and how to call it: the kept arguments, `blocks` (one for the caches that grow
    and one for those only read, where there are any of changing size), then eight buffers a binding."""

    module: GraphModule
    bindings: list[Binding]
    kept_args: list[int]
    kept_outputs: list[int | None]  # per original output: its place now, or None if it was a cache
    blocks: list[torch.SymInt]
    extra_inputs: list[Any]  # example values of the inputs behind the kept ones


def rewrite(
    traced: GraphModule,
    infos: list[PlaceholderInfo],
    matches: list[Match],
    config: HQMQConfig,
) -> Rewritten:
    """Rewrite every match without a `reason`, in place. `traced` is consumed."""
    return _Rewriter(traced, infos, config).run([m for m in matches if m.reason is None])


def layer_of(match: Match, fallback: int) -> int:
    """Layer number: from the cache's source (`layers[3]`) or the module path (`layers.3.`)."""
    for text in (match.source_name, match.attention.module if match.attention else ""):
        found = re.findall(r"(?:layers|h|blocks|block|layer)(?:\[|\.|\._modules\[')(\d+)", text)
        if found:
            return int(found[-1])
    return fallback


class _Rewriter:
    def __init__(self, traced: GraphModule, infos: list[PlaceholderInfo], config: HQMQConfig):
        self.traced, self.graph, self.config = traced, traced.graph, config
        self.infos = infos
        self.placeholders: list[Node] = traced.graph.find_nodes(op="placeholder")
        self.fake_mode = next(
            v.fake_mode
            for v in (n.meta["val"] for n in self.placeholders)
            if isinstance(v, torch._subclasses.fake_tensor.FakeTensor)
        )
        self.bindings: list[Binding] = []
        self.buffers: dict[CacheWrite, list[Node]] = {}
        self.bound: dict[CacheWrite, int] = {}  # places in `bindings`
        self.blocks: dict[bool, torch.SymInt] = {}  # by `read_only`
        self.extra_inputs: list[Any] = []
        self.replaced: dict[Node, Node] = {}
        self.last_placeholder = self.last_count = self.placeholders[-1]

    def run(self, matches: list[Match]) -> Rewritten:
        for order, match in enumerate(matches):
            layer = layer_of(match, order)
            for role, write in (("key", match.key), ("value", match.value)):
                if write is not None and write not in self.buffers:
                    self.bind(match, write, role, layer)
        fused = [match for match in matches if not match.dense]
        last = {match.key: match for match in fused}
        first = {match.key: match for match in reversed(fused)}
        for match in fused:
            self.replace(match, match is first[match.key], match is last[match.key])
        for write in (write for match in matches if match.dense for write in match.writes):
            self.read_dense(write)
        kept_outputs = self.drop_outputs()
        kept_args = self.drop_cache_inputs()
        for node in self.graph.nodes:  # marks that hold nodes are of no use to the compiler
            for mark in ("hqmq_part", "hqmq_canonical", "hqmq_order"):
                node.meta.pop(mark, None)
        self.graph.lint()
        return Rewritten(
            self.traced,
            self.bindings,
            kept_args,
            kept_outputs,
            list(self.blocks.values()),
            self.extra_inputs,
        )

    # -- inputs ----------------------------------------------------------------------------------
    def placeholder(self, name: str, value: Any, source) -> Node:
        # Numbers of blocks, where there are any, come before all buffers.
        is_count = not isinstance(value, torch.Tensor)
        after = self.last_count if is_count else self.last_placeholder
        with self.graph.inserting_after(after):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        node._dynamo_source = source
        if not is_count:
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        if after is self.last_placeholder:
            self.last_placeholder = node
        if is_count:
            self.last_count = node
        self.extra_inputs.insert(
            len(self.blocks) - 1 if is_count else len(self.extra_inputs), value
        )
        return node

    def block_count(self, hint: int, read_only: bool) -> torch.SymInt:
        """One size symbol for all caches that grow, one for all that are only read."""
        if read_only not in self.blocks:
            from torch.fx.experimental.symbolic_shapes import DimDynamic

            name = "hqmq_read_blocks" if read_only else "hqmq_blocks"
            env, source = self.fake_mode.shape_env, LocalSource(name)
            symbol = env.create_symbol(max(hint, 2), source, DimDynamic.DYNAMIC)
            count = env.create_symintnode(symbol, hint=max(hint, 2), source=source)
            self.blocks[read_only] = count
            self.placeholder(name, count, source)
        return self.blocks[read_only]

    def bind(self, match: Match, write: CacheWrite, role: str, layer: int) -> None:
        tokens = write.tokens.meta["val"]
        batch, heads, count, head_dim = tokens.shape
        read_only = write.kind == READ_ONLY
        growing = write.write_kind == GROWING
        if read_only:
            count = 0
        tensor = None if write.past is None else tensor_of(write.past)
        arg = None if tensor is None else self.placeholders.index(tensor)
        cache = write.base
        length = cache.meta["val"].shape[2] if cache is not None else 0
        origin = match.attention.query if read_only else write.tokens
        first_head = shard_of(origin) * heads if isinstance(heads, int) else 0
        spec = self.config.spec(role, head_dim, tokens.dtype, layer, first_head)
        if growing or read_only:
            hint = growing_blocks(spec, _hint(length) + _hint(count))
            blocks = self.block_count(hint, read_only)
        else:
            blocks = static_blocks(spec, length)
            if isinstance(blocks, torch.SymInt):
                blocks = self.block_count(_hint(blocks), False)
        with self.fake_mode:
            values = [
                torch.empty(shape, dtype=dtype, device=tokens.device)
                for shape, dtype in shapes(spec, batch, heads, blocks)
            ]
        if arg is not None:
            base = self.infos[arg]
            name, source = base.name, getattr(tensor, "_dynamo_source", None)
        else:
            name, source = f"born_{len(self.bindings)}", None
        source = source or LocalSource(f"hqmq_{name}")
        part = None if cache is None else part_of(cache)
        number = "".join(f"{i}_" for i in part.index) if part is not None else ""
        nodes = [
            self.placeholder(
                f"{name}_{number}{field}", value, AttrSource(source, f"hqmq_{number}{field}")
            )
            for field, value in zip(Buffers._fields, values, strict=True)
        ]
        self.buffers[write], self.bound[write] = nodes, len(self.bindings)
        start = write.positions if write.positions is not None else write.start
        self.bindings.append(
            Binding(
                spec=spec,
                arg=arg,
                growing=growing,
                read_only=read_only,
                out_of_place=write.kind == OUT_OF_PLACE,
                batch=batch,
                heads=heads,
                length=length,
                count=count,
                keep=_value(write.keep) or 0,
                blocks=blocks,
                outputs=list(write.outputs),
                start=start if start is not None else 0,
                device=tokens.device,
                source=match.source_name or name,
                keys=self.bound[match.key] if role == "value" and not match.dense else None,
                layout=None if part is None else Layout(part.lead, part.order),
                part=() if part is None else part.index,
                returned=None if write.returned is None else Layout((), write.returned),
            )
        )

    # -- the ops ---------------------------------------------------------------------------------
    def replace(self, match: Match, first_reader: bool, last_reader: bool) -> None:
        """Put the fused op (or, for caches only read, `hqmq::attend`) in the place of the attention."""
        attention, key, value = match.attention, match.key, match.value
        head_dim = attention.query.meta["val"].shape[-1]
        key_spec, value_spec = specs = self._specs(key, value)
        attend = (
            attention.mask,
            attention.sinks,
            match.first,
            match.length,
            float(attention.scale or head_dim**-0.5),
            bool(attention.causal),
            float(attention.softcap or 0.0),
        )
        buffers = (*self.buffers[key], *self.buffers[value])
        ending = (str(key_spec), str(value_spec), str(self.config.kernel.value))
        with self.graph.inserting_before(attention.node):
            if key.kind == READ_ONLY:
                target, args = torch.ops.hqmq.attend.default, (*buffers, *attend, *ending)
            else:
                medians = self._medians(specs, key, value)
                target = torch.ops.hqmq.write_attend.default
                exact = self.config.prefill == "exact"
                args = (key.tokens, value.tokens, *self._slots(key), *buffers, *attend, *medians)
                args = (*args, exact, *ending, first_reader, last_reader)
            args = tuple(self.now(a) if isinstance(a, Node) else a for a in args)
            node = self.graph.call_function(target, (self.now(attention.query), *args))
        node.meta = {k: v for k, v in attention.node.meta.items() if k != "eager_input_vals"}
        attention.node.replace_all_uses_with(node)
        self.replaced[attention.node] = node

    def now(self, node: Node) -> Node:
        """What stands in the place of a node of the matches: an attention may read an earlier one."""
        return self.replaced.get(node, node)

    def read_dense(self, write: CacheWrite) -> None:
        """Write in an op of its own; the readers get a dense tensor (`passes/read_dense.py`)."""
        dense, (spec,) = write.dense, self._specs(write)
        with self.graph.inserting_before(self.now(dense.anchor)):
            (median,) = self._medians([spec], write)
            args = (self.now(write.tokens), *self._slots(write), *self.buffers[write])
            ending = (str(spec), str(self.config.kernel.value))
            if not dense.nodes:
                self.graph.call_function(torch.ops.hqmq.write.default, (*args, median, *ending))
                return
            reads = (0, dense.length, median, self.config.prefill == "exact", *ending)
            whole = self.graph.call_function(torch.ops.hqmq.write_read.default, (*args, *reads))
        for old, (first, length) in dense.nodes.items():
            if first == 0 and length == dense.length:
                new = whole
            else:
                end = length if first == 0 else self._sum(whole, first, length)
                with self.graph.inserting_after(whole):
                    new = self.graph.call_function(
                        torch.ops.aten.slice.Tensor, (whole, 2, first, end)
                    )
            whole.meta.setdefault("stack_trace", old.meta.get("stack_trace"))
            new.meta.setdefault("stack_trace", old.meta.get("stack_trace"))
            for user in list(old.users):
                if user not in dense.inside and user.target is not torch.ops.aten.sym_size.int:
                    user.replace_input_with(old, new)

    def _sum(self, whole: Node, first: Node | int, length: Node | int) -> Node | int:
        if isinstance(first, int) and isinstance(length, int):
            return first + length
        with self.graph.inserting_before(whole):
            return self.graph.call_function(operator.add, (first, length))

    def _slots(self, write: CacheWrite) -> tuple[Any, ...]:
        """Arguments positions, start, keep, limit of the ops."""
        limit = 0 if write.write_kind == GROWING else self._length(write)
        start = write.start if write.positions is None else 0
        return write.positions, start, write.keep or 0, 0 if write.keep else limit

    def _medians(self, specs: list[CacheSpec], *writes: CacheWrite) -> list[Node | None]:
        return [
            med3x.insert(self.graph, spec, write.tokens, self.buffers[write])
            for spec, write in zip(specs, writes, strict=True)
        ]

    def _specs(self, *writes: CacheWrite) -> list[CacheSpec]:
        return [self.bindings[self.bound[write]].spec for write in writes]

    def _length(self, write: CacheWrite) -> Any:
        length = write.base.meta["val"].shape[2]
        return length if isinstance(length, int) else self._size_node(length)

    def _size_node(self, value: torch.SymInt) -> Node | int:
        """A node that holds the value of a symbolic size, if a scalar input does."""
        for node in self.graph.find_nodes(op="placeholder"):
            held = node.meta.get("val")
            if isinstance(held, torch.SymInt) and held.node.expr == value.node.expr:
                return node
        return 0  # unknown: the op does not check the upper bound

    # -- outputs and leftovers -------------------------------------------------------------------
    def drop_outputs(self) -> list[int | None]:
        outputs = output_args(self.graph)
        gone = {place for binding in self.bindings for place in binding.outputs}
        kept, places = [], []
        for i, node in enumerate(outputs):
            places.append(None if i in gone else len(kept))
            if i not in gone:
                kept.append(node)
        (output,) = self.graph.find_nodes(op="output")
        output.args = (tuple(kept),)
        return places

    def drop_cache_inputs(self) -> list[int]:
        writes = list(self.buffers)
        for write in writes:
            for node in write.erase:
                if not node.users and not node._erased:
                    self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        for write in writes:
            for node in write.erase:
                if not node._erased and not node.users:
                    self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        pasts = [write.past for write in writes if write.past is not None]
        for view in pasts:
            if part_of(view) is not None and not view._erased:
                self.drop_sizes(view)
        self.graph.eliminate_dead_code()
        caches = {tensor_of(past) for past in pasts}
        for cache in caches:
            self.drop_sizes(cache)
            if cache.users:
                raise RuntimeError(f"hqmq: cache {cache.name} still read by {list(cache.users)}")
            self.graph.erase_node(cache)
        return [i for i, node in enumerate(self.placeholders) if node not in caches]

    def drop_sizes(self, cache: Node) -> None:
        """Take sizes of a cache from elsewhere."""
        for user in list(cache.users):
            if user.target is torch.ops.aten.sym_size.int:
                size = user.meta["val"]
                user.replace_all_uses_with(size if isinstance(size, int) else self._size_node(size))
                self.graph.erase_node(user)


def _hint(value: Symbolic) -> int:
    return value if isinstance(value, int) else value.node.hint


def _value(scalar: Node | int | None) -> Symbolic | None:
    return scalar.meta["val"] if isinstance(scalar, Node) else scalar
