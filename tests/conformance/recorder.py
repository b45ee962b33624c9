"""The hqmq backend with a record of which graphs ran in each call, and a counter for comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from hqmq_compile.explain import GraphReport, _records


@dataclasses.dataclass
class Call:
    """What one call of a compiled model did.

    Attributes:
        found: attentions with a cache in the graphs that ran.
        rewritten: those whose caches are packed.
        direct: those that read packed bits, not a dense copy made in the call.
        reasons: why the others did not.
        packed, tensors: tensors of the caches that are packed after it, and all.
        silent: reasons of attentions that are said to have no cache.
    """

    found: int = 0
    rewritten: int = 0
    direct: int = 0
    packed: int = 0
    tensors: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    silent: list[str] = dataclasses.field(default_factory=list)


class Recorder:
    """A backend for `torch.compile` that knows what its graphs did.

    Args:
        config: of hqmq; None runs the graphs as they are, to count them.
    """

    def __init__(self, config: HQMQConfig | None) -> None:
        self.config = config
        self.graphs = 0
        self.ran: list[GraphReport] = []

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable:
        self.graphs += 1
        if self.config is None:
            return gm.forward
        compiled = hqmq(gm, inputs, options={"config": self.config})
        report = _records[-1][1]

        def run(*args: Any) -> Any:
            self.ran.append(report)
            report.fallback = ""
            return compiled(*args)

        return run

    def take(self, tensors: Iterable[Tensor]) -> Call:
        """What happened since the last time; `tensors` are those of the caches now."""
        states = [getattr(tensor, "is_packed", False) for tensor in tensors]
        call = Call(packed=sum(states), tensors=len(states))
        for report in self.ran:
            if report.problem:
                call.reasons.append(report.problem)
            for entry in report.attentions:
                if entry.form and not entry.is_cache:
                    call.silent.append(entry.reason)
                elif entry.form:
                    call.found += 1
                    done = entry.rewritten and not report.fallback
                    call.rewritten += done
                    call.direct += done and not entry.dense
                    call.reasons += [entry.reason or report.fallback or entry.dense]
        call.reasons = [reason for reason in call.reasons if reason]
        self.ran.clear()
        return call
