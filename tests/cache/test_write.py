"""The packed store: what is written is what a plain simulation says, however it was chunked."""

from __future__ import annotations

import pytest
import torch

from hqmq_compile.cache import write as writes
from hqmq_compile.cache.buffers import PACKED
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.codec.codec import fake_quantize, first_mean
from hqmq_compile.codec.spec import CacheSpec

BLOCK, WINDOW = 16, 16
KEY = CacheSpec(
    "key",
    32,
    "float32",
    med3x=3.0,
    pool=0.5,
    center="block",
    window=WINDOW,
    block=BLOCK,
    sink_tokens=2,
)
VALUE = KEY.replace(role="value", secondary=42, radius_bits=3, med3x=0.0, center="none")
NOW = KEY.replace(center="first", window=0, outliers="16bit")
SPECS = pytest.mark.parametrize("spec", [KEY, VALUE], ids=["key", "value"])


def data(length: int, spec: CacheSpec = KEY, batch: int = 2, heads: int = 3) -> torch.Tensor:
    offset = 3 * torch.randn(1, heads, 1, spec.head_dim)
    return torch.randn(batch, heads, length, spec.head_dim) + offset


def expected(spec: CacheSpec, x: torch.Tensor) -> torch.Tensor:
    """What one sequence written front to back reads as."""
    length = x.shape[2]
    packed = max(length - spec.window, 0) // spec.block * spec.block
    out = torch.cat([fake_quantize(spec, x[:, :, :packed]), x[:, :, packed:]], dim=2)
    out[:, :, : spec.sink_tokens] = x[:, :, : spec.sink_tokens]
    return out


def append(store: PackedKV, x: torch.Tensor, keep: int = 0) -> PackedKV:
    store.prepare_append(x.shape[2])
    writes.write(store.spec, store.buffers, x, store.length, keep)
    return store.appended(x.shape[2], keep)


@SPECS
@pytest.mark.parametrize("chunks", [[100], [1] * 100, [37, 1, 1, 30, 31], [16, 16, 68], [5, 95]])
def test_growing_matches_blockwise_codec(spec, chunks):
    x = data(100)
    store = PackedKV.empty(spec, 2, 3, 0, growing=True)
    for part in x.split(chunks, dim=2):
        store = append(store, part)
    torch.testing.assert_close(store.dequantize(), expected(spec, x), rtol=0, atol=0)
    assert store.packed_slots == 80


@SPECS
def test_static_reads_zero_where_never_written(spec):
    x = data(70)
    store = PackedKV.empty(spec, 2, 3, 128)
    writes.write(spec, store.buffers, x, 0)
    out = store.dequantize()
    assert torch.equal(out[:, :, :70], expected(spec, x))
    assert not out[:, :, 70:].any()
    store.zero_()
    assert not store.dequantize().any()
    assert store.written == 0


def test_window_larger_than_text_is_lossless():
    spec = KEY.replace(window=512)
    x = data(300)
    assert torch.equal(PackedKV.from_dense(spec, x).dequantize(), x)


@SPECS
def test_adoption_equals_writing(spec):
    x = data(100)
    padded = torch.cat([x, torch.zeros(2, 3, 28, 32)], dim=2)
    adopted = PackedKV.from_dense(spec, padded, 100)
    written = PackedKV.empty(spec, 2, 3, 128)
    for part in x.split([90, 10], dim=2):
        writes.write(spec, written.buffers, part, written.written)
    assert torch.equal(adopted.dequantize(), written.dequantize())
    more = data(3)
    for store in (adopted, written):
        writes.write(spec, store.buffers, more, 100)
    assert torch.equal(adopted.dequantize(), written.dequantize())


@SPECS
def test_adoption_keeps_what_lies_behind_the_sequence(spec):
    x = data(128)
    store = PackedKV.from_dense(spec, x, 50)
    out = store.dequantize()
    assert torch.equal(out[:, :, :50], expected(spec, x[:, :, :50]))
    stale = fake_quantize(spec, x[:, :, 48:])[:, :, 2:]
    assert torch.equal(out[:, :, 50:], stale)


def test_ring_overwrite_is_exact():
    x, y = data(40), data(3)
    store = PackedKV.from_dense(KEY, torch.cat([x, torch.zeros(2, 3, 24, 32)], 2), 40)
    writes.write(KEY, store.buffers, y, 30)
    out = store.dequantize()
    assert torch.equal(out[:, :, 30:33], y)
    assert torch.equal(out[:, :, 33:40], x[:, :, 33:])
    assert store.written == 40


@SPECS
def test_rewind_follows_the_rule(spec):
    """Flush the ring, bring the block of the new end back as dequantized, go on from there."""
    x, y = data(90), data(40)
    store = PackedKV.from_dense(spec, torch.cat([x, torch.zeros(2, 3, 38, 32)], 2), 90)
    before = store.dequantize()
    writes.write(spec, store.buffers, y, 20)  # packed was 64
    out = store.dequantize()
    kept = before[:, :, :20].clone()
    history = torch.cat([kept, y], dim=2)  # 60 slots; packed to 32 again
    assert int(store.buffers.state[PACKED]) == 32
    assert torch.equal(out[:, :, : spec.sink_tokens], x[:, :, : spec.sink_tokens])
    torch.testing.assert_close(
        out[:, :, spec.sink_tokens : 16], before[:, :, spec.sink_tokens : 16]
    )
    assert torch.equal(out[:, :, 16:32], fake_quantize(spec, history[:, :, 16:32]))
    assert torch.equal(out[:, :, 32:60], history[:, :, 32:])
    # Later slots stay readable: packed ones as they were, those of the ring now packed.
    assert torch.equal(out[:, :, 60:64], before[:, :, 60:64])
    last = fake_quantize(spec, x[:, :, 64:90])
    assert torch.equal(out[:, :, 64:90], last)


def test_rewind_to_the_start_is_a_new_sequence():
    x, y = data(90), data(60)
    store = PackedKV.from_dense(KEY, torch.cat([x, torch.zeros(2, 3, 38, 32)], 2), 90)
    writes.write(KEY, store.buffers, y, 0)
    assert torch.equal(store.dequantize()[:, :, :60], expected(KEY, y))


@pytest.mark.parametrize("keep", [7, 24, 48])
def test_sliding_window_keeps_the_newest(keep):
    x = data(150)
    store = PackedKV.empty(KEY, 2, 3, 0, growing=True)
    for part in x.split([9, 1, 1, 40, 1, 1, 1, 50, 46], dim=2):
        store = append(store, part, keep)
    whole = expected(KEY, x)[:, :, -keep:]
    assert torch.equal(store.dequantize(), whole)
    assert store.buffers.capacity <= keep + 50 + 4 * BLOCK  # not the whole history


def test_static_sliding_window_wraps_around():
    keep = 40
    x = data(400)
    store = PackedKV.empty(KEY, 2, 3, keep)
    writes.write(KEY, store.buffers, x[:, :, :keep], 0)
    for i in range(keep, 400):
        writes.write(KEY, store.buffers, x[:, :, i : i + 1], keep, keep)
    assert torch.equal(store.dequantize(), expected(KEY, x)[:, :, -keep:])


def test_branches_never_write_into_each_other():
    x, a, b = data(60), data(40), data(40)
    root = PackedKV.empty(KEY, 2, 3, 0, growing=True)
    root = append(root, x)
    first = append(root, a)
    second = append(root, b)  # copies: `first` already wrote behind `root`
    assert torch.equal(first.dequantize(), expected(KEY, torch.cat([x, a], 2)))
    # The branch point lies in a block that `first` has packed: it comes back as dequantized.
    out, exact = second.dequantize(), torch.cat([x, b], 2)
    assert torch.equal(out[:, :, 80:], exact[:, :, 80:])
    assert torch.equal(out[:, :, :32], expected(KEY, exact)[:, :, :32])
    assert (out - exact).norm() < 0.1 * exact.norm()
    seen = root.dequantize()  # what was packed meanwhile reads packed, nothing else changed
    assert (seen - x).norm() < 0.1 * x.norm()
    assert root.length == 60


@pytest.mark.parametrize("stop", [0, 3, 33, 80, 99])
def test_crop_then_append(stop):
    x, y = data(100), data(50)
    store = PackedKV.empty(KEY, 2, 3, 0, growing=True)
    cut = append(store, x).crop(0, stop)
    before = cut.dequantize()
    assert before.shape[2] == stop
    out = append(cut, y).dequantize()
    assert torch.equal(out[:, :, stop:][:, :, -WINDOW:], y[:, :, -WINDOW:])
    whole = min(stop // BLOCK * BLOCK, 80)  # blocks packed before
    assert torch.equal(out[:, :, :whole], before[:, :, :whole])


def test_batch_operations_and_saving(tmp_path):
    x = data(100)
    store = PackedKV.from_dense(KEY, x, growing=True)
    dense = store.dequantize()
    index = torch.tensor([1, 0, 1])
    assert torch.equal(store.index_select(index).dequantize(), dense[index])
    assert torch.equal(store.repeat_interleave(2).dequantize(), dense.repeat_interleave(2, 0))
    torch.save(store.state_dict(), tmp_path / "store.pt")
    again = PackedKV.from_state_dict(torch.load(tmp_path / "store.pt", weights_only=True))
    assert torch.equal(again.dequantize(), dense)
    half = store.to(dtype=torch.float16)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.dequantize().float(), dense, atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize("start", [0, 70])
def test_reserve_keeps_the_content(start):
    x = data(90)
    store = PackedKV.empty(KEY, 2, 3, 0, growing=True)
    store = append(store, x, 90 - start)
    before = store.dequantize()
    store.reserve(store.blocks + 3)
    assert torch.equal(store.dequantize(), before)


def test_first_mean_is_frozen_by_the_first_write():
    spec = KEY.replace(center="first")
    x = data(100)
    store = PackedKV.empty(spec, 2, 3, 0, growing=True)
    for part in x.split([40, 60], dim=2):
        store = append(store, part)
    want = fake_quantize(spec, x[:, :, :80], mean=first_mean(x[:, :, :40]).float())
    assert torch.equal(store.dequantize()[:, :, 2:80], want[:, :, 2:])


def test_immediate_mode_encodes_each_token():
    x = data(75, NOW)
    store = PackedKV.empty(NOW, 2, 3, 0, growing=True)
    store = append(store, x[:, :, :30])
    for i in range(30, 75):
        store = append(store, x[:, :, i : i + 1])
    mean = first_mean(x[:, :, :30])
    want = fake_quantize(NOW, x, mean=mean.float())
    want[:, :, :2] = x[:, :, :2]
    torch.testing.assert_close(store.dequantize(), want, rtol=0, atol=0)
    assert store.packed_slots == 75


def test_immediate_rewrite_reuses_pool_slots():
    """Rewriting one token over and over never runs the pool of its block full."""
    spec = NOW.replace(pool=8 / 128)
    x = data(16, spec)
    x[:, :, 5, :4] = 100.0  # an outlier at every rewrite
    store = PackedKV.empty(spec, 2, 3, 32)
    writes.write(spec, store.buffers, x, 0)
    capped = store.capped_outliers
    for _ in range(20):
        writes.write(spec, store.buffers, x[:, :, 5:6], 5)
    out = store.dequantize()
    torch.testing.assert_close(out[:, :, 5, :4], x[:, :, 5, :4], rtol=1e-3, atol=0.05)
    assert store.capped_outliers == capped


def test_scattered_positions_are_written_one_by_one():
    x = data(64)
    store = PackedKV.from_dense(KEY, x)
    y = data(3)
    writes.write_slots(KEY, store.buffers, y, torch.tensor([60, 62, 63]))
    out = store.dequantize()
    assert torch.equal(out[:, :, [60, 62, 63]], y)
    assert torch.equal(out[:, :, 61], x[:, :, 61])


def test_out_of_range_is_one_clear_error():
    store = PackedKV.empty(KEY, 2, 3, 32)
    before = store.buffers.state.clone()
    with pytest.raises(IndexError, match=r"slots 30\.\.34 are outside a cache of 32 slots"):
        writes.write(KEY, store.buffers, data(5), 30, limit=32)
    assert torch.equal(store.buffers.state, before)


@SPECS
def test_memory_is_what_the_buffers_hold(spec):
    store = PackedKV.from_dense(spec.replace(block=64, window=64), data(1024))
    total = sum(t.untyped_storage().nbytes() for t in store.buffers)
    assert store.stored_bytes == total
    assert store.bits_per_element == 8 * total / store.shape.numel()
