"""What packed caches occupy, measured in processes of their own: storages and resident memory.

The measuring is `benchmarks/memory.py`; here are the promises. The model is random and small beside
its cache.
"""

from __future__ import annotations

import os
import sys

import pytest

pytest.importorskip("transformers")
from benchmarks import memory

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.slow,
]

MIB = 1 << 20
# Minutes on two cores: in CI on demand, as the tests of the larger models.
minutes = pytest.mark.skipif(
    bool(os.environ.get("CI")) and not os.environ.get("HQMQ_ALL_MODELS"),
    reason="takes minutes: set HQMQ_ALL_MODELS=1 to run it in CI",
)
# What packing may need besides the caches, whatever their size: see SCRATCH in cache/write_now.py.
SCRATCH = 32 * MIB
# Resident memory comes in pages, and the interpreter has some of its own: seen, 2 KiB over the promise.
NOISE = MIB // 4


def check_adoption(kind: str, context: int, layers: int) -> None:
    found = memory.isolated("adoption", kind=kind, context=context, preset="4bit", layers=layers)
    promised, dense = memory.PROMISED[context], found["dense_bytes"]
    # The measurement sees the 16-bit cache, both ways.
    assert 0.99 * dense <= found["filled_storages"] <= 1.01 * dense
    assert 0.97 * dense <= found["filled"] <= 1.03 * dense
    assert found["packed_slots"] >= context - 128
    assert found["after_storages"] <= promised * dense, found
    assert found["after"] <= promised * dense + NOISE, found
    # One step is enough, and later ones change little.
    assert found["one_step"] <= promised * dense + MIB, found
    # What the caches say of themselves is what the process holds.
    assert found["reported"] == pytest.approx(found["after_storages"], rel=0.01)
    # Every tensor is released before the next one is packed: one packed tensor is the extra.
    assert found["peak"] <= found["filled"] + promised * dense / (2 * layers) + SCRATCH, found
    after_each = found["while_adopting"]
    assert len(after_each) == 2 * layers
    assert all(b < a for a, b in zip([found["filled"], *after_each], after_each, strict=False))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_adopted_cache_4k(kind):
    check_adoption(kind, 4096, layers=2)


@minutes
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_adopted_cache_32k(kind):
    check_adoption(kind, 32768, layers=1)


@minutes
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_compiled_prefill_never_holds_a_dense_cache(kind):
    settings = dict(kind=kind, context=4096, layers=12, chunk=0, steps=0)
    found = memory.isolated("prefill", preset="4bit", backend="hqmq", **settings)
    dense = found["dense_bytes"]
    assert found["packed_slots"] >= 4096 - 128
    assert found["after"] <= memory.PROMISED[4096] * dense, found
    assert found["peak"] < dense, found
