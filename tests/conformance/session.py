"""Runs one row: a compiled tiny model beside its eager twins, through a pattern of prompts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from torch import Tensor

from hqmq_compile import HQMQConfig
from tests.compare import error
from tests.conformance import models, oracle
from tests.conformance.architectures import STATIC, Architecture
from tests.conformance.recorder import Call, Recorder

ROOM = 96
CONFIG = HQMQConfig(window=8, block=8, sink_tokens=2)
LOSSLESS = HQMQConfig(window=ROOM, block=8, sink_tokens=2)
RESET = "reset"
EXACT_PART = "the part beside the latent stays exact"


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Lengths of the prompts and steps of a session, and what surrounds them.

    Attributes:
        calls: number of new tokens of each call, or `RESET` (static caches; a new dynamic one).
        padding: tokens of left padding of each sequence; their number is the batch.
    """

    calls: tuple[int | str, ...]
    padding: tuple[int, ...] = (0,)


PATTERNS = {
    "prompts": Pattern((37, 1, 1, 1, 11, 1, 1)),
    "padded": Pattern((37, 1, 1, 1), padding=(0, 5)),
    "reset": Pattern((37, 1, 1, 1, RESET, 37, 1, 1)),
}
EXACT_CALLS = (37, 1)  # of a session whose window is longer than the text


@dataclasses.dataclass
class Result:
    """What a row measured.

    Attributes:
        attentions: in the model, as many as keep a cache.
        found: attentions with a cache that the passes saw, in the call where they saw fewest.
        rewritten: of these, whose caches are packed, in the call with fewest.
        direct: of these, that read packed bits, in the call with fewest.
        packed, tensors: tensors of the caches that are packed after the call with fewest, of how many.
        reasons: why not all do.
        silent: what the report says of attentions that it believes to have no cache.
        oracle: largest relative error of the logits against the oracle.
        exact: largest relative error where nothing is packed, against the plain eager model.
        effect: how much packing changed the logits; where nothing, the oracle proves nothing.
        ties: tokens that the witness decided.
        graphs, plain_graphs: compiled by hqmq, and by the same session under backend="eager".
        problem: an exception that ended the session.
    """

    attentions: int = 0
    found: int = 0
    rewritten: int = 0
    direct: int = 0
    packed: int = 0
    tensors: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)
    silent: list[str] = dataclasses.field(default_factory=list)
    oracle: float = 0.0
    exact: float = 0.0
    effect: float = 0.0
    ties: int = 0
    graphs: int = 0
    plain_graphs: int = 0
    problem: str = ""
    seconds: float = 0.0

    @property
    def full(self) -> bool:
        """Whether all is packed; of a latent (MLA), what stands beside it is meant to stay exact."""
        kept = self.tensors // 2 if any(EXACT_PART in r for r in self.reasons) else self.tensors
        done = self.rewritten == self.attentions > 0 and self.packed >= kept
        return done and not self.problem

    def count(self, calls: list[Call]) -> None:
        """Take the worst of all calls."""
        fewest = min(calls, key=lambda call: call.packed)
        self.packed, self.tensors = fewest.packed, fewest.tensors
        self.found = min(call.found for call in calls)
        self.rewritten = min(call.rewritten for call in calls)
        self.direct = min(call.direct for call in calls)
        self.reasons = list(dict.fromkeys(r for call in calls for r in call.reasons))
        self.silent = list(dict.fromkeys(r for call in calls for r in call.silent))


class Side:
    """One model with one cache, on its way through a pattern."""

    def __init__(self, model: Any, cache: Any, pattern: Pattern, keyword: str) -> None:
        self.model, self.cache, self.pattern, self.keyword = model, cache, pattern, keyword
        self.batch = len(pattern.padding)
        self.given = models.encoded(model, self.batch)
        self.length = self.calls = 0

    def __call__(self, count: int) -> Tensor:
        """Logits of the real tokens of the next call, `[n, vocabulary]`."""
        self.calls += 1
        ids = models.tokens(count, self.batch, seed=self.calls)
        name = "decoder_input_ids" if self.given else "input_ids"
        options = {name: ids, self.keyword: self.cache, "use_cache": True, **self.given}
        self.length += count
        real = torch.ones(self.batch, self.length, dtype=torch.long)
        for row, pads in enumerate(self.pattern.padding):
            real[row, :pads] = 0
        if any(self.pattern.padding):
            options["attention_mask"] = real
        with torch.no_grad():
            logits = self.model(**options).logits
        return logits[real[:, -count:].bool()]

    def start(self, cache: Any) -> None:
        self.cache, self.length = cache, 0


# By model and cache: how attention is computed hardly ever matters, and is looked at where it may.
_plain_counts: dict[tuple[int, str], int] = {}


def run(architecture: Architecture, kind: str, attention: str) -> Result:
    """Measure one row of the table."""
    begin = time.perf_counter()
    result = Result()
    try:
        _packed_session(result, architecture, kind, attention)
        _exact_session(result, architecture, kind, attention)
        key = (id(architecture), kind)
        if result.graphs > _plain_counts.get(key, 0):
            _plain_counts[key] = _plain_graphs(architecture, kind, attention)
        result.plain_graphs = _plain_counts[key]
    except Exception as failure:
        result.problem = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
    finally:
        torch._dynamo.reset()
    result.seconds = time.perf_counter() - begin
    return result


class _Trio:
    """Compiled, oracle (or none) and plain eager model."""

    def __init__(self, architecture: Architecture, kind: str, attention: str, config) -> None:
        torch._dynamo.reset()
        self.kind, self.config = kind, config
        self.pattern = PATTERNS[architecture.pattern]
        self.recorder = Recorder(config)
        made = [models.tiny(architecture, attention) for _ in range(2)]
        keyword = models.cache_keyword(made[0])
        self.attentions = len(models.attentions(made[0]))
        made[0].forward = torch.compile(made[0].forward, backend=self.recorder)
        sides = [Side(m, None, self.pattern, keyword) for m in (*made, made[1])]
        self.compiled, self.twin, self.plain = sides
        self.ties = 0
        self.pasts: list = []
        self.start()

    def start(self) -> None:
        """New sequences."""
        if self.compiled.cache is not None and self.kind == STATIC:
            self.compiled.cache.reset()
            self.compiled.start(self.compiled.cache)
        else:
            self.compiled.start(models.new_cache(self.compiled.model, self.kind, ROOM))
        self.plain.start(models.new_cache(self.plain.model, self.kind, ROOM))
        if self.config is not None:
            twin = oracle.followed(self.compiled.cache, self.config, ROOM)
            self.twin.start(twin)
            self.pasts += oracle.pasts(twin)


def _packed_session(result: Result, architecture, kind: str, attention: str) -> None:
    trio = _Trio(architecture, kind, attention, CONFIG)
    result.attentions = trio.attentions
    calls = []
    for count in trio.pattern.calls:
        if count == RESET:
            trio.start()
            continue
        actual = trio.compiled(count)
        calls.append(trio.recorder.take(models.cache_tensors(trio.compiled.cache)))
        expected, plain = trio.twin(count), trio.plain(count)
        result.oracle = max(result.oracle, error(actual, expected))
        result.effect = max(result.effect, error(expected, plain))
    result.count(calls)
    result.graphs = trio.recorder.graphs
    result.ties = sum(s.ties for past in trio.pasts for s in past.stored)


def _exact_session(result: Result, architecture, kind: str, attention: str) -> None:
    trio = _Trio(architecture, kind, attention, LOSSLESS)
    for count in EXACT_CALLS:
        result.exact = max(result.exact, error(trio.compiled(count), trio.plain(count)))


def _plain_graphs(architecture, kind: str, attention: str) -> int:
    trio = _Trio(architecture, kind, attention, None)
    for count in trio.pattern.calls:
        if count == RESET:
            trio.start()
        else:
            trio.compiled(count)
    return trio.recorder.graphs
