"""Writes without a window: every token is encoded as it comes."""

import pytest
import torch

from hqmq_compile.cache import write as reference
from hqmq_compile.codec import med3x
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import (
    DEVICES,
    SPECS,
    assert_same_cache,
    copy_to,
    empty,
    immediate,
    random_tokens,
)

SLOTS = 64


def run(device, spec, writes, *, batch=1, heads=1, keep=0, median=None, as_positions=False):
    expected = empty(spec, batch, heads, SLOTS)
    got = copy_to(expected, device)
    for i, (start, count) in enumerate(writes):
        tokens = random_tokens(spec, batch, heads, count, i)
        given = None if median is None else median(tokens)
        reference.write(spec, expected, tokens, start, keep, given)
        moved = None if given is None else given.to(device)
        if as_positions:
            positions = torch.arange(start, start + count, device=device)
            launch.write(spec, got, tokens.to(device), positions, 0, keep, median=moved)
        else:
            launch.write(spec, got, tokens.to(device), None, start, keep, median=moved)
        assert_same_cache(spec, expected, got, keep or SLOTS)
    return expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_write_now_matches_reference(name, device):
    run(device, immediate(name), [(0, 20), (20, 1)], heads=2)


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_fills_a_pool_matches_reference(device):
    spec = immediate("odd-dim", pool=0.03)
    writes = [(0, 5), (5, 1), (6, 1), (7, 3), (10, 6), (16, 1)]
    assert int(run(device, spec, writes).state[3]) > 0


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_rewind_matches_reference(device):
    run(device, immediate("odd-dim"), [(0, 40), (18, 1), (3, 5), (30, 20)])


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_gap_matches_reference(device):
    run(device, immediate("paper"), [(0, 10), (35, 2)], heads=2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7])
def test_write_now_first_mean_matches_reference(count, device):
    expected = run(device, immediate("odd-dim"), [(0, count), (count, 1)], heads=2)
    assert expected.means.abs().max() > 0


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_sliding_matches_reference(device):
    run(device, immediate("value"), [(0, 40), (40, 1), (40, 5), (39, 60)], keep=40)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scope", ["token", "batch"])
def test_write_now_with_given_median_matches_reference(scope, device):
    spec = immediate("paper", med3x_scope=scope)

    def median(tokens):  # the graph computes it on what it writes
        return 0.9 * med3x.median(med3x.chunk_norms(tokens), scope)

    run(device, spec, [(0, 20), (20, 3)], batch=2, heads=2, median=median)


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_batch_median_matches_reference(device):
    run(device, immediate("paper", med3x_scope="batch"), [(0, 20), (20, 3)], batch=2)


@pytest.mark.parametrize("device", DEVICES)
def test_write_now_at_positions_matches_reference(device):
    run(device, immediate("value"), [(0, 20), (20, 1), (3, 2)], as_positions=True)
