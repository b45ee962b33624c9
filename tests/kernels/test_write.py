"""Writes with a window: ring, packing, sinks, rewinds, gaps and sliding windows."""

import pytest
import torch

from hqmq_compile.cache import write as reference
from hqmq_compile.cache.read import read_slots
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import (
    DEVICES,
    SPECS,
    assert_same_cache,
    copy_to,
    empty,
    random_tokens,
    small,
)

SLOTS = 80


def run(device, spec, writes, *, batch=1, heads=1, keep=0, slots=SLOTS, as_positions=False):
    """The same writes, (logical slot, count) each, by both; compares after every one."""
    expected = empty(spec, batch, heads, slots)
    got = copy_to(expected, device)
    for i, (start, count) in enumerate(writes):
        tokens = random_tokens(spec, batch, heads, count, i)
        reference.write(spec, expected, tokens, start, keep)
        if as_positions:
            positions = torch.arange(start, start + count, device=device)
            launch.write(spec, got, tokens.to(device), positions, 0, keep)
        else:
            launch.write(spec, got, tokens.to(device), None, start, keep)
        assert_same_cache(spec, expected, got, keep or slots)
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_write_prefill_and_append_matches_reference(name, device):
    run(device, small(name), [(0, 40), (40, 8)], heads=2)


@pytest.mark.parametrize("device", DEVICES)
def test_write_single_tokens_matches_reference(device):
    state = run(device, small("odd-dim"), [(0, 30), (30, 1), (31, 1), (32, 1)]).state
    assert state.tolist()[1:3] == [16, 33]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outliers", ["int8x4", "16bit"])
def test_write_full_pool_matches_reference(outliers, device):
    spec = small("odd-dim", pool=0.02, outliers=outliers)
    assert int(run(device, spec, [(0, 50)]).state[3]) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slot", [0, 16, 21])
def test_write_rewind_matches_reference(slot, device):
    run(device, small("odd-dim"), [(0, 70), (slot, 2), (slot + 2, 20)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_rewind_and_prefill_again_matches_reference(device):
    run(device, small("key"), [(0, 60), (0, 75)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_rewind_into_the_sinks_matches_reference(device):
    run(device, small("value"), [(0, 40), (2, 1), (3, 40)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_overwrites_in_the_ring_matches_reference(device):
    run(device, small("value"), [(0, 40), (34, 3), (33, 12)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_gap_matches_reference(device):
    run(device, small("odd-dim"), [(1, 20), (30, 2), (60, 3)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_gap_over_leftovers_matches_reference(device):
    run(device, small("odd-dim"), [(0, 70), (10, 2), (40, 3)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_sliding_matches_reference(device):
    run(device, small("odd-dim"), [(0, 48), (48, 1), (48, 1), (48, 20), (47, 60)], keep=48)


@pytest.mark.parametrize("device", DEVICES)
def test_write_at_positions_matches_reference(device):
    run(device, small("value"), [(0, 40), (40, 1), (20, 3)], heads=2, as_positions=True)


@pytest.mark.parametrize("device", DEVICES)
def test_write_long_window_matches_reference(device):
    spec = small("value", window=40, block=32)
    run(device, spec, [(0, 75), (75, 5)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_zero_tokens_matches_reference(device):
    spec = small("odd-dim")
    expected, got = empty(spec, 1, 1, SLOTS), copy_to(empty(spec, 1, 1, SLOTS), device)
    tokens = random_tokens(spec, 1, 1, 50)
    tokens[:, :, 3:9] = 0
    tokens[:, :, 16:32] = 0
    reference.write(spec, expected, tokens, 0)
    launch.write(spec, got, tokens.to(device))
    assert_same_cache(spec, expected, got, SLOTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", ["log8", "float16"])
def test_write_non_finite_tokens_matches_reference(scale, device):
    spec = small("odd-dim", scale=scale)
    expected, got = empty(spec, 1, 1, SLOTS), copy_to(empty(spec, 1, 1, SLOTS), device)
    tokens = random_tokens(spec, 1, 1, 50)
    tokens[0, 0, 6, 5] = float("nan")
    tokens[0, 0, 20, 9] = float("inf")
    reference.write(spec, expected, tokens, 0)
    launch.write(spec, got, tokens.to(device))
    want, have = (read_slots(spec, b, 0, SLOTS) for b in (expected, copy_to(got, "cpu")))
    if scale == "log8":  # which codeword a chunk with a NaN gets is not defined
        assert have.isfinite().all()
        want[:, :, [6, 20]] = have[:, :, [6, 20]]
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_write_strided_tokens_matches_reference(device):
    spec = small("value")
    expected, got = empty(spec, 2, 2, SLOTS), copy_to(empty(spec, 2, 2, SLOTS), device)
    tokens = random_tokens(spec, 2, 40, 2).transpose(1, 2)
    reference.write(spec, expected, tokens, 0)
    launch.write(spec, got, tokens.to(device))
    assert_same_cache(spec, expected, got, SLOTS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 16])
def test_write_rejects_invalid_slots(window, device):
    spec = small("value", window=window)
    buffers = copy_to(empty(spec, 1, 1, SLOTS), device)
    tokens = random_tokens(spec, 1, 1, 4).to(device)
    with pytest.raises(IndexError, match="longer cache"):
        launch.write(spec, buffers, tokens, None, SLOTS - 3, limit=SLOTS)
    # Positions that only the device knows: nothing is written.
    launch.write(spec, buffers, tokens)
    before = copy_to(buffers, "cpu")
    for first in (-1, SLOTS - 3):
        positions = torch.arange(first, first + 4, device=device)
        launch.write(spec, buffers, tokens, positions, limit=SLOTS)
    for a, b in zip(before, copy_to(buffers, "cpu"), strict=True):
        assert torch.equal(a, b)
