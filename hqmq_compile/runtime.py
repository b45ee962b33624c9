"""One compiled graph at run time: bind the caches, call, wrap the outputs (O(1) in the context).

    user's tensor            what happens to it
    HQMQTensor, packed       its buffers are passed in
    HQMQTensor, materialised packed again, if nothing aliases it
    plain tensor             quantized, and swapped in place for an HQMQTensor, if nothing aliases it
    none (born here)         an empty packed store is made

A tensor in another layout, or of several caches, is one `PackedParts`, each part a binding of its own.

If a cache that the graph writes in place cannot be packed, the graph runs as the user wrote it, and a
warning says why: at no moment is a wrong number returned.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .cache.adopt import adopt, adopt_as, exclusive, swap_out
from .cache.buffers import Buffers
from .cache.parts import Layout, Packed, PackedParts
from .cache.store import PackedKV
from .cache.tensor import HQMQTensor
from .codec.spec import CacheSpec
from .explain import GraphReport
from .passes.normalize import PlaceholderInfo
from .passes.pipeline import Result
from .passes.rewrite import Binding

log = logging.getLogger("hqmq.runtime")


class NotAdoptable(Exception):
    """Why a cache of this call cannot be packed."""


class CompiledGraph:
    """Callable that Dynamo runs in place of a rewritten graph."""

    def __init__(
        self, result: Result, compiled: Callable, report: GraphReport, kernel: str = "auto"
    ) -> None:
        self.result = result
        self.kernel = kernel
        self.rewritten = result.rewritten
        self.compiled = compiled
        self.report = report
        report.kernel = kernel
        self.sizes = Sizes(result.infos)
        self._warned: set[str] = set()

    def __call__(self, *args: Any) -> Sequence[Any]:
        try:
            bound: dict[int, PackedParts] = {}
            stores = [self._bind(i, b, args, bound) for i, b in enumerate(self.rewritten.bindings)]
            self._check_pairs(stores)
        except NotAdoptable as reason:
            return self._run_original(args, str(reason))
        inputs = [args[i] for i in self.rewritten.kept_args]
        inputs.extend(self._common_blocks(stores, symbol) for symbol in self.rewritten.blocks)
        for store in stores:
            inputs.extend(store.buffers)
        results = self.compiled(*inputs)
        return self._outputs(results, stores, args)

    # -- before the call -------------------------------------------------------------------------
    def _bind(
        self, index: int, binding: Binding, args: Sequence[Any], bound: dict[int, PackedParts]
    ) -> PackedKV:
        if binding.arg is None:
            batch, heads, length = self.sizes(args, binding.batch, binding.heads, binding.length)
            store = PackedKV.empty(
                binding.spec, batch, heads, length, growing=binding.growing, device=binding.device
            )
        elif binding.layout is not None:
            if binding.arg not in bound:
                bound[binding.arg] = self._parts_of(binding, args)
            store = bound[binding.arg].parts[binding.layout.parts.index(binding.part)]
        else:
            store = self._store_of(index, binding, args)
        if binding.growing or binding.read_only:  # room, and a branch of its own
            (count,) = self.sizes(args, binding.count)
            store.prepare_append(count)
        return store

    def _store_of(self, index: int, binding: Binding, args: Sequence[Any]) -> PackedKV:
        tensor = args[binding.arg]
        if binding.out_of_place:
            return self._copy_of(index, binding, args)
        if isinstance(tensor, HQMQTensor):
            # A graph writes behind the back of a packed slice, too: both must be alone.
            if not tensor.repack(writes=not (binding.growing or binding.read_only)):
                raise NotAdoptable(f"{binding.source}: a view or a slice of it is alive")
            store = tensor.packed
            if store.spec == binding.spec:
                return store
            # Packed by another model or config: pack anew under ours.
            dense, written = store.dequantize(), None if binding.growing else store.written
            tensor._replace(
                PackedKV.from_dense(binding.spec, dense, written, growing=store.growing)
            )
            return tensor.packed
        if binding.growing:
            # The graph does not write this tensor, so a copy is as good where something aliases it.
            if exclusive(tensor) is not None:
                return PackedKV.from_dense(binding.spec, tensor, growing=True, write=self._write)
            adopt(tensor, binding.spec, None, growing=True, write=self._write)
            return tensor.packed
        reason = exclusive(tensor)
        if reason is not None:
            raise NotAdoptable(f"{binding.source}: {reason}")
        if binding.read_only:
            adopt(tensor, binding.spec, None, growing=True, write=self._write)
            return tensor.packed
        start = self.result.starts[index]
        if start is None:
            raise NotAdoptable(f"{binding.source}: the slots written depend on more than integers")
        log.info("hqmq: packing %s in place", binding.source)
        adopt(tensor, binding.spec, start(list(args)), write=self._write)
        return tensor.packed

    def _copy_of(self, index: int, binding: Binding, args: Sequence[Any]) -> PackedKV:
        """A store of its own: the user's tensor stays what it is."""
        tensor = args[binding.arg]
        if isinstance(tensor, HQMQTensor) and tensor.repack(writes=False):
            if tensor.packed.spec == binding.spec:
                return tensor.packed.clone()
            return PackedKV.from_dense(binding.spec, tensor.dequantize(), tensor.packed.written)
        start = self.result.starts[index]
        if start is None:
            raise NotAdoptable(f"{binding.source}: the slots written depend on more than integers")
        dense = tensor.dense if isinstance(tensor, HQMQTensor) else tensor
        return PackedKV.from_dense(binding.spec, dense, start(list(args)), write=self._write)

    def _parts_of(self, binding: Binding, args: Sequence[Any]) -> PackedParts:
        """The packed form of a tensor in another layout, or of several caches."""
        tensor, layout, growing = args[binding.arg], binding.layout, binding.growing
        places = {b.part: i for i, b in enumerate(self.rewritten.bindings) if b.arg == binding.arg}
        specs = [self.rewritten.bindings[places[part]].spec for part in layout.parts]

        def pack(dense: torch.Tensor, written: list[int | None]) -> PackedParts:
            return PackedParts.from_dense(
                layout, specs, dense, written, growing=growing, write=self._write
            )

        def starts() -> list[int | None]:
            found = [self.result.starts[places[part]] for part in layout.parts]
            if growing or None not in found:
                return [None if growing else start(list(args)) for start in found]
            raise NotAdoptable(f"{binding.source}: the slots written depend on more than integers")

        if isinstance(tensor, HQMQTensor):
            if not tensor.repack(writes=not growing):
                raise NotAdoptable(f"{binding.source}: a view or a slice of it is alive")
            packed = tensor.packed
            if getattr(packed, "layout", None) != layout:  # another graph took it for another cache
                tensor._replace(pack(packed.dequantize(), starts()))
            elif packed.spec != tuple(specs):
                written = [None if growing else part.written for part in packed.parts]
                tensor._replace(pack(packed.dequantize(), written))
            return tensor.packed
        reason = exclusive(tensor)
        if reason is None:
            written = starts()
            log.info("hqmq: packing %s in place", binding.source)
            adopt_as(tensor, lambda: pack(tensor, written))
            return tensor.packed
        if not growing:
            raise NotAdoptable(f"{binding.source}: {reason}")
        return pack(tensor, starts())  # the graph does not write it, so a copy is as good

    def _write(self, spec: CacheSpec, buffers: Buffers, tokens: torch.Tensor, start: int) -> None:
        """Store a sequence by whatever serves this device."""
        torch.ops.hqmq.write(tokens, None, start, 0, 0, *buffers, None, str(spec), self.kernel)

    def _check_pairs(self, stores: list[PackedKV]) -> None:
        """Dynamo gives the lengths of keys and values a symbol each: they must agree."""
        for value, binding in zip(stores, self.rewritten.bindings, strict=True):
            if binding.keys is None:
                continue
            key = stores[binding.keys]
            if (key.length, key.start) != (value.length, value.start):
                raise NotAdoptable(
                    f"{binding.source}: {key.length} cached keys but {value.length} cached values"
                )

    def _common_blocks(self, stores: list[PackedKV], symbol: torch.SymInt) -> int:
        """Give all stores whose capacity is `symbol` the same number of blocks."""
        changing = [
            s for s, b in zip(stores, self.rewritten.bindings, strict=True) if b.blocks is symbol
        ]
        blocks = max(s.blocks for s in changing)
        for store in changing:
            if store.blocks != blocks:
                store.reserve(blocks)
        return blocks

    # -- after the call --------------------------------------------------------------------------
    def _outputs(self, results: Sequence[Any], stores: list[PackedKV], args: Sequence[Any]):
        outputs: list[Any] = [
            None if i is None else results[i] for i in self.rewritten.kept_outputs
        ]
        live, born = [], {}
        for binding, store in zip(self.rewritten.bindings, stores, strict=True):
            if binding.read_only:
                tensor = args[binding.arg]
            elif binding.growing:
                count, keep = self.sizes(args, binding.count, binding.keep)
                tensor = HQMQTensor(_returned(binding.returned, store.appended(count, keep)))
            elif binding.out_of_place:
                tensor = HQMQTensor(store)
            elif binding.arg is None:
                tensor = born.get(tuple(binding.outputs))
                if tensor is None:
                    tensor = HQMQTensor(self._born(binding, stores))
                    born[tuple(binding.outputs)] = tensor
            else:
                tensor = args[binding.arg]
            for place in binding.outputs:
                outputs[place] = tensor
            live.append(weakref.ref(tensor))
        self.report.live = live
        return tuple(outputs)

    def _born(self, binding: Binding, stores: list[PackedKV]) -> Packed:
        """The packed form of a static cache that this call made."""
        mine = {
            b.part: store
            for b, store in zip(self.rewritten.bindings, stores, strict=True)
            if b.arg is None and b.outputs == binding.outputs
        }
        if binding.layout is None:
            return mine[()]
        return PackedParts(binding.layout, [mine[part] for part in binding.layout.parts])

    def _run_original(self, args: Sequence[Any], reason: str) -> Sequence[Any]:
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("hqmq: this call runs without compression: %s", reason)
        self.report.fallback = reason
        args = list(args)
        for binding in self.rewritten.bindings:
            if binding.arg is not None and isinstance(args[binding.arg], HQMQTensor):
                args[binding.arg] = args[binding.arg].materialize(reason)
        with torch.no_grad():
            return self.result.original(*args)


def _returned(layout: Layout | None, store: PackedKV) -> Packed:
    return store if layout is None else PackedParts(layout, [store])


class UnmatchedGraph:
    """A graph without a match that met packed caches: they become plain tensors again, then it runs."""

    def __init__(self, compiled: Callable, kept_args: list[int], reason: str) -> None:
        self.compiled, self.kept_args, self.reason = compiled, kept_args, reason

    def __call__(self, *args: Any) -> Sequence[Any]:
        args = [args[i] for i in self.kept_args]
        for arg in args:
            if isinstance(arg, HQMQTensor):
                log.warning("hqmq: unpacking a cache for a graph without a match: %s", self.reason)
                swap_out(arg)
        return self.compiled(*args)


class Sizes:
    """Evaluates the symbolic sizes of a graph from its arguments."""

    def __init__(self, infos: list[PlaceholderInfo]) -> None:
        self.places: dict[Any, tuple[int, int | None]] = {}
        for info in infos:
            if isinstance(info.value, torch.SymInt):
                self._note(info.value, info.index, None)
            elif isinstance(info.value, torch.Tensor):
                for dim, size in enumerate(info.value.shape):
                    self._note(size, info.index, dim)

    def _note(self, size: Any, index: int, dim: int | None) -> None:
        if isinstance(size, torch.SymInt) and size.node.expr.is_symbol:
            self.places.setdefault(size.node.expr, (index, dim))

    def __call__(self, args: Sequence[Any], *sizes: int | torch.SymInt) -> list[int]:
        return [s if isinstance(s, int) else self._evaluate(s.node.expr, args) for s in sizes]

    def _evaluate(self, expr: Any, args: Sequence[Any]) -> int:
        if expr.is_Integer:
            return int(expr)
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        env = {}
        for symbol in expr.free_symbols:
            index, dim = self.places[symbol]
            env[symbol] = args[index] if dim is None else args[index].shape[dim]
        return int(sympy_interp(PythonReferenceAnalysis, env, expr))
