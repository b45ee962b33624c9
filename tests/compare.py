"""A compiled model and an eager one with the oracle, fed the same tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hqmq_compile.backend
from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from tests.models.tiny import cache_keyword, prompt, tiny
from tests.oracle import OracleCache

TOLERANCE = 1e-3  # what the project promises, relative, in float32
TYPICAL = 2e-5  # what is measured: 1e-7 to 2e-6
MOST_TIES = 40  # of some thousand tokens; one mean that is rounded otherwise makes a block of them


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative difference of two tensors in the 2-norm; infinite where one of them is not finite."""
    difference = (actual.double() - expected.double()).norm() / expected.double().norm()
    return difference.item() if difference.isfinite() else float("inf")


@pytest.fixture
def cheap(monkeypatch):
    """Rewritten graphs run as they are: inductor takes most of the time of a test, and is torch's.

    What is special to inductor is tested in `test_inductor.py`.
    """
    monkeypatch.setattr(
        hqmq_compile.backend, "compile_fx", lambda gm, inputs, config_patches=None: gm.forward
    )


class Pair:
    """A compiled tiny model beside its eager twin, whose cache is an `OracleCache`.

    Args:
        name: of `tests.models.tiny`.
        kind: "static" or "dynamic".
        config: of hqmq, for both.
        room: `max_cache_len` of the static cache.
        batch: sequences.
        padding: tokens of left padding of each sequence.
        inference: run under `inference_mode` instead of `no_grad`.
        settings: of the tiny model.
    """

    def __init__(
        self,
        name: str,
        kind: str,
        config: HQMQConfig,
        *,
        room: int = 128,
        batch: int = 1,
        padding: tuple[int, ...] = (),
        inference: bool = False,
        **settings,
    ):
        self.kind, self.config, self.room = kind, config, room
        self.batch, self.padding = max(batch, len(padding)), padding
        self.context = torch.inference_mode if inference else torch.no_grad
        self.model, self.twin = tiny(name, **settings), tiny(name, **settings)
        self.model.forward = torch.compile(
            self.model.forward, backend=hqmq, options={"config": config}
        )
        self.keyword = cache_keyword(self.model)
        self.calls = 0
        self.cache = self.new_cache()
        self.start()

    def new_cache(self):
        if self.kind == "static":
            return StaticCache(config=self.model.config, max_cache_len=self.room)
        return DynamicCache(config=self.model.config)

    def start(self) -> None:
        """A new sequence for the oracle."""
        room = self.room if self.kind == "static" else 0
        self.oracle = OracleCache(self.twin.config, self.config, room)
        self.oracle.watch(self.cache)
        self.length = 0

    def reset(self) -> None:
        """`cache.reset()`, and a new sequence."""
        with self.context():
            self.cache.reset()
        self.start()

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens."""
        self.length -= count
        self.cache.crop(-count)
        self.oracle.crop(-count)

    def call(self, count: int) -> float:
        """Both models on `count` new tokens; returns the relative error of the logits."""
        self.calls += 1
        ids = prompt(count, batch=self.batch, seed=self.calls)
        options = {}
        self.length += count
        real = torch.ones(self.batch, self.length, dtype=torch.long)
        if self.padding:
            for row, pads in enumerate(self.padding):
                real[row, :pads] = 0
            options["attention_mask"] = real
        with self.context():
            actual = self.model(ids, **{self.keyword: self.cache}, **options).logits
            expected = self.twin(ids, **{self.keyword: self.oracle}, **options).logits
        seen = real[:, -count:].bool()
        return error(actual[seen], expected[seen])

    def calls_of(self, *counts: int) -> list[float]:
        return [self.call(count) for count in counts]

    @property
    def packed(self) -> list:
        """The `PackedKV` of all keys and values; fails where one is not packed."""
        tensors = [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
        assert all(getattr(t, "is_packed", False) for t in tensors), "a cache is not packed"
        return [t.packed for t in tensors]

    def check_packed(self) -> None:
        """The comparison proves something only if the codec was at work, and exactly as planned."""
        packed = self.packed
        slots = [p.packed_slots for p in packed]
        assert max(slots) > 0, "nothing was packed"
        assert self.oracle.ties <= MOST_TIES, "too many ties to be ties"
        if self.config.window == 0:
            assert sum(p.capped_outliers for p in packed) == 0, "the oracle has no pool limit here"
