"""What was rewritten, what was not, and why; what the packed caches occupy."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .passes.pipeline import Result

KIND_NAMES = {
    1: "in place, by position",
    2: "in place, a slice",
    3: "growing",
    4: "sliding window",
    5: "out of place",
    6: "born in the graph",
    7: "slab view",
    8: "paged",
    9: "read only",
    10: "latent (MLA)",
}
# Reasons of attentions that have no cache to pack: nothing that a user need be warned of.
_NO_CACHE = ("no cache: ", "constants of the graph")


@dataclasses.dataclass
class AttentionReport:
    """One attention, or one tensor that looks like a KV cache, in one compiled graph.

    Attributes:
        source: "file.py:line" of the model's code.
        module: path of the module, where the graph knows it.
        form: "sdpa", "eager", ...; "" for a cache that no attention reads.
        cache: name of the cache kind ("growing", ...), or "" when there is none.
        rewritten: whether it reads and writes a packed cache.
        reason: why not; "" when rewritten.
        dense: why attention reads a dense copy, made in each call, of the caches that are kept packed;
            "" where it reads packed bits.
        is_cache: False for an attention over this call's tokens alone, or over constants.
    """

    source: str
    module: str
    form: str
    cache: str
    rewritten: bool
    reason: str
    is_cache: bool
    dense: str = ""


@dataclasses.dataclass
class GraphReport:
    """One graph that the backend compiled."""

    attentions: list[AttentionReport]
    seconds: dict[str, float]
    problem: str = ""  # why the whole graph was left alone
    fallback: str = ""  # why a call of it ran without compression, last time
    kernel: str = "auto"  # as configured
    live: list[weakref.ref] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, result: Result) -> GraphReport:
        entries = []
        for match in result.matches:
            attention = match.attention
            write = match.key or match.value
            entries.append(
                AttentionReport(
                    source=(attention.source if attention else "")
                    or (write.source if write else ""),
                    module=attention.module if attention else "",
                    form=attention.form if attention else "",
                    cache=KIND_NAMES.get(match.kind, ""),
                    rewritten=match.reason is None,
                    reason=match.reason or "",
                    is_cache=not any(text in (match.reason or "") for text in _NO_CACHE),
                    dense=match.dense,
                )
            )
        return cls(entries, dict(result.seconds))

    @classmethod
    def unavailable(cls, problem: str) -> GraphReport:
        return cls([], {}, problem)


@dataclasses.dataclass
class Report:
    """Everything known of one model or function; `print(report)` shows it as a table."""

    graphs: list[GraphReport]

    @property
    def attentions(self) -> list[AttentionReport]:
        """Of all graphs, in order."""
        return [entry for graph in self.graphs for entry in graph.attentions]

    @property
    def caches(self) -> list[torch.Tensor]:
        """The packed caches of the last calls that are still alive.

        Of a growing cache's tensors, which share their buffers, only the newest counts.
        """
        return [tensor for tensor, _ in self._live()]

    def _live(self) -> list[tuple[torch.Tensor, GraphReport]]:
        found: dict[int, tuple[torch.Tensor, GraphReport]] = {}
        for graph in self.graphs:
            for tensor in (ref() for ref in graph.live):
                if tensor is None or not getattr(tensor, "is_packed", False):  # or unpacked since
                    continue
                place = tensor.packed.parts[0].buffers.codes.data_ptr()
                if place not in found or tensor.numel() >= found[place][0].numel():
                    found[place] = tensor, graph
        return list(found.values())

    @property
    def kernels(self) -> list[str]:
        """What serves the live caches: "C++", "Triton", or "plain torch: " and why."""
        from .ops import served_by

        return sorted(
            {
                served_by(graph.kernel, part.buffers.codes.device, part.spec)
                for tensor, graph in self._live()
                for part in tensor.packed.parts
            }
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes that the live packed caches occupy, all overheads counted."""
        return sum(c.stored_bytes for c in self.caches)

    @property
    def logical_bytes(self) -> int:
        """Bytes of the dense tensors that they stand for."""
        return sum(c.logical_bytes for c in self.caches)

    @property
    def bits_per_element(self) -> float:
        elements = sum(c.numel() for c in self.caches)
        return 8 * self.stored_bytes / elements if elements else 0.0

    @property
    def complete(self) -> bool:
        """Whether every attention with a cache was rewritten and no call fell back."""
        return all(a.rewritten for a in self.attentions if a.is_cache) and not any(
            g.problem or g.fallback for g in self.graphs
        )

    def __str__(self) -> str:
        lines = []
        for number, graph in enumerate(self.graphs):
            done = sum(a.rewritten for a in graph.attentions)
            spent = 1e3 * sum(graph.seconds.values())
            lines.append(
                f"graph {number}: {done} of {len(graph.attentions)} attentions rewritten"
                f" ({spent:.0f} ms in passes)"
            )
            if graph.problem:
                lines.append(f"  left alone: {graph.problem}")
            if graph.fallback:
                lines.append(f"  last fallback: {graph.fallback}")
            lines += _table(graph.attentions)
        if not self.graphs:
            lines.append("no graph was compiled by the hqmq backend yet")
        caches = self.caches
        if caches:
            lines.append(
                f"caches: {len(caches)} packed, {self.stored_bytes:,} bytes stored for"
                f" {self.logical_bytes:,} logical ({self.stored_bytes / self.logical_bytes:.3f},"
                f" {self.bits_per_element:.2f} bits an element)"
            )
            lines.append(f"attention of few query tokens by {', '.join(self.kernels)}")
        return "\n".join(lines)


def _table(entries: list[AttentionReport]) -> list[str]:
    head = ("source", "attention", "cache", "decision")
    rows, counts = [], []
    for e in entries:
        decision = f"packed, read dense: {e.dense}" if e.dense else "packed"
        row = (e.source, e.form or "-", e.cache or "-", decision if e.rewritten else e.reason)
        if rows and rows[-1] == row:  # the same line of a model's code, once per layer
            counts[-1] += 1
        else:
            rows.append(row)
            counts.append(1)
    rows = [
        (s if n == 1 else f"{s} (x{n})", *rest) for (s, *rest), n in zip(rows, counts, strict=True)
    ]
    if not rows:
        return []
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(3)]
    return [
        "  " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
        for row in [head, *rows]
    ]


# -- the record of live compiled models ------------------------------------------------------------
_records: list[tuple[list[weakref.ref], GraphReport]] = []


def record(report: GraphReport, example_inputs: Sequence[Any]) -> GraphReport:
    """Remember `report` under the parameters that its graph takes."""
    _records[:] = [r for r in _records if not r[0] or any(ref() is not None for ref in r[0])]
    owners = [weakref.ref(x) for x in example_inputs if isinstance(x, torch.nn.Parameter)]
    _records.append((owners, report))
    return report


def _live(model: torch.nn.Module) -> Report:
    mine = {id(p) for p in model.parameters()}
    return Report(
        [
            report
            for owners, report in _records
            if any(p is not None and id(p) in mine for p in (ref() for ref in owners))
        ]
    )


def explain(model_or_fn: torch.nn.Module | Callable, *args: Any, **kwargs: Any) -> Report:
    """Report what the hqmq backend does with a model or function.

    With arguments: traces `model_or_fn(*args, **kwargs)` on copies of the arguments and reports,
    without compiling and without touching the caller's caches. Without arguments: the report of the
    graphs that were compiled for this module so far, with the memory of its live caches.
    """
    if not args and not kwargs:
        if not isinstance(model_or_fn, torch.nn.Module):
            raise ValueError(
                "hqmq: explain() without arguments needs a module; pass the arguments of a call too"
            )
        return _live(model_or_fn)
    from .config import HQMQConfig
    from .passes import pipeline

    reports: list[GraphReport] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable:
        try:
            result = pipeline.run(gm, HQMQConfig(), analyze_only=True)
            reports.append(GraphReport.of(result))
        except Exception as error:
            reports.append(GraphReport.unavailable(f"analysis failed: {error!r}"))
        return gm.forward

    function = model_or_fn.forward if isinstance(model_or_fn, torch.nn.Module) else model_or_fn
    function = getattr(function, "_torchdynamo_orig_callable", function)
    args, kwargs = copy.deepcopy((args, kwargs))
    with torch.no_grad():
        torch.compile(function, backend=backend)(*args, **kwargs)
    return Report(reports)
