"""The sessions of the end-to-end benchmark are what it says: filled, packed, equal inputs."""

import argparse
import time

import pytest
import torch

from benchmarks import decode_session, end_to_end, gpu, largest_batch, shapes
from benchmarks.common import Table
from hqmq_compile.config import HQMQConfig


@pytest.fixture
def no_clock(monkeypatch):
    def steps(step, count):
        start = time.perf_counter()
        for _ in range(count):
            step()
        return gpu.Steps([1.0] * count, time.perf_counter() - start, 0, 0)

    monkeypatch.setattr(gpu, "timed_steps", steps)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hqmq, default mode", "hqmq, DynamicCache"])
def test_contenders_start_from_the_same_cache(no_clock, fresh_dynamo, name):
    arguments = argparse.Namespace(
        seconds=0, steps=2, warmup=3, preset="4bit", layers=0, cases=[("tiny", 192, 1)]
    )
    arguments.contenders = [name]
    table = Table("", ("case", "rate", "step", "cache", "peak", "resident", "logits", "notes"))
    results = end_to_end.run(arguments, table, "cpu")
    (row,) = table.rows
    assert row[-1].endswith("all packed"), row
    assert "WHILE" not in row[-1], row
    (found,) = results.values()

    model = shapes.build("tiny", 0, "cpu")
    session = decode_session.Session(model, None, "static", 256)
    with torch.no_grad():
        decode_session.fill(session, 1, 192, HQMQConfig())  # eager attention reads what is packed
        want = session(torch.tensor([[7]])).float()
    got = found[name].logits
    assert (got - want).norm() < 0.02 * want.norm()
    assert end_to_end.ratios(results).rows


def test_largest_batch_is_found(monkeypatch):
    monkeypatch.setattr(gpu, "free", lambda: None)

    def make(batch):
        if batch > 37:
            raise torch.OutOfMemoryError
        return [torch.empty(batch, dtype=torch.uint8)]

    for guess in (20, 37, 40):
        assert largest_batch.largest(make, guess, lambda n: 8, "cpu") == (37, 37)


def test_packed_caches_are_smaller():
    config = shapes.config_of("llama-3-8b", 1)
    slots = 32768
    dense = shapes.cache_bytes(config, slots)
    packed = largest_batch.packed(config, HQMQConfig(), 1, slots, "meta")
    assert sum(t.nbytes for t in packed) < 0.3 * dense
    assert sum(t.nbytes for t in largest_batch.dense(config, 1, slots, "meta")) == dense
