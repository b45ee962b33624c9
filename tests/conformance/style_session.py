"""Runs one row of hand-written style: a compiled attention beside the oracle."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from hqmq_compile import HQMQConfig
from tests.compare import error
from tests.conformance.oracle import FollowedPast
from tests.conformance.recorder import Recorder
from tests.conformance.session import CONFIG, LOSSLESS, Result
from tests.conformance.styles import Style
from tests.hand_written import BATCH, DIM, HEADS, QUERY_HEADS, fused

EXACT_CALLS = 3


class _Loop:
    """A user's loop around a compiled style.

    Args:
        style: a fresh one.
        config: of hqmq; None for the graphs as they are.
    """

    def __init__(self, style: Style, config: HQMQConfig | None) -> None:
        torch._dynamo.reset()
        self.style, self.recorder = style, Recorder(config)
        self.run = torch.compile(style.target, backend=self.recorder)
        self.generator = torch.Generator().manual_seed(0)
        self.offset = 2 * torch.randn(HEADS, 1, DIM, generator=self.generator)
        self.length = 0
        self.packed = _pasts(style, config or CONFIG, follow=True)
        self.plain = _pasts(style, config or CONFIG, follow=False)

    def _tokens(self, heads: int, count: int, offset: Tensor | float = 0.0) -> Tensor:
        x = torch.randn(BATCH, heads, count, DIM, generator=self.generator)
        wild = torch.rand(BATCH, heads, count, DIM // 4, generator=self.generator) < 0.04
        return x * (1 + 7 * wild.repeat_interleave(4, -1)) + offset

    @torch.no_grad()
    def __call__(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The output, what the oracle gives, and what is right where nothing is packed."""
        layers = range(self.style.layers)
        tokens = [
            (
                self._tokens(QUERY_HEADS, count),
                self._tokens(HEADS, count, self.offset),
                self._tokens(HEADS, count),
            )
            for _ in layers
        ]
        actual = self.style.drive(self.run, [fused(*t) for t in tokens], self.length)
        outs = []
        for pasts in (self.packed, self.plain):
            seen = []
            for past, (_, key, value) in zip(pasts, tokens, strict=True):
                if self.style.writes(self.length):
                    slot = self.length + self.style.origin
                    seen.append(past.write(*self.style.cached(key, value), slot))
                else:
                    past.follow()
                    seen.append(tuple(stored.values for stored in past.stored))
            outs.append(self.style.expected([t[0] for t in tokens], seen, self.length))
        self.length += count
        return actual, *outs


def _pasts(style: Style, config: HQMQConfig, follow: bool) -> list[FollowedPast]:
    def tensors_of(layer: int):
        return lambda: style.caches[layer] if follow else (None, None)

    return [FollowedPast(config, n, 256, tensors_of(n)) for n in range(style.layers)]


def run(make: type[Style]) -> Result:
    """Measure one row of the table."""
    begin = time.perf_counter()
    result = Result(attentions=make.attentions)
    try:
        loop, calls = _Loop(make(), CONFIG), []
        for count in make.calls:
            actual, expected, plain = loop(count)
            tensors = {id(t): t for pair in loop.style.caches for t in pair}
            calls.append(loop.recorder.take(tensors.values()))
            result.oracle = max(result.oracle, error(actual, expected))
            result.effect = max(result.effect, error(expected, plain))
        result.count(calls)
        result.graphs = loop.recorder.graphs
        loop = _Loop(make(), LOSSLESS)
        for count in make.calls[:EXACT_CALLS]:
            actual, _, plain = loop(count)
            result.exact = max(result.exact, error(actual, plain))
        loop = _Loop(make(), None)
        for count in make.calls:
            loop(count)
        result.plain_graphs = loop.recorder.graphs
    except Exception as failure:
        result.problem = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    finally:
        torch._dynamo.reset()
    result.seconds = time.perf_counter() - begin
    return result
