import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqmq_compile.codec import med3x
from hqmq_compile.codec.spec import CacheSpec

SPEC = CacheSpec("key", 16, med3x=3.0, block=64)


def test_median_per_token_is_the_lower_median():
    norms = torch.tensor([[[[4.0, 1.0, 3.0, 2.0]]]])
    assert med3x.median(norms, "token").tolist() == [[[[2.0]]]]


def test_median_per_batch_pools_batch_and_valid_tokens():
    norms = torch.rand(2, 3, 5, 7)
    valid = torch.rand(2, 3, 5) < 0.6
    got = med3x.median(norms, "batch", valid)
    assert got.shape == (1, 3, 1, 1)
    for head in range(3):
        assert got[0, head, 0, 0] == norms[:, head][valid[:, head]].median()
    assert torch.equal(med3x.median(norms, "batch")[0, 1, 0, 0], norms[:, 1].reshape(-1).median())


def test_unknown_scope():
    with pytest.raises(ValueError, match="unknown Med3x scope 'row'"):
        med3x.median(torch.rand(1, 1, 1, 4), "row")


def test_threshold_is_strict_and_finite():
    norms = torch.tensor([3.0, 3.0001, torch.inf, torch.nan])
    assert med3x.outlier_mask(SPEC, norms, torch.tensor(1.0)).tolist() == [0, 1, 0, 0]
    assert not med3x.outlier_mask(SPEC, norms, torch.tensor(torch.nan)).any()


def naive_fit(mask, norms, slots, taken):
    free = [s for s in range(slots) if not taken[s]]
    candidates = [i for i, m in enumerate(mask) if m]
    best = sorted(candidates, key=lambda i: (-norms[i], i))[: len(free)]
    number = dict(zip(sorted(best), free, strict=False))
    kept = [i in number for i in range(len(mask))]
    return kept, [number.get(i, 0) for i in range(len(mask))], len(candidates) - len(best)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.integers(1, 6), st.integers(1, 24))
def test_fit_pool_matches_a_naive_search(data, slots, count):
    rows = 3
    mask = torch.tensor([[data.draw(st.booleans()) for _ in range(count)] for _ in range(rows)])
    # few distinct values: ties
    norms = torch.tensor(
        [[float(data.draw(st.integers(1, 3))) for _ in range(count)] for _ in range(rows)]
    )
    taken = torch.tensor([[data.draw(st.booleans()) for _ in range(slots)] for _ in range(rows)])
    for used in (None, taken):
        got = med3x.fit_pool(mask, norms, slots, used)
        occupied = torch.zeros_like(taken) if used is None else used
        for row in range(rows):
            expected = naive_fit(
                mask[row].tolist(), norms[row].tolist(), slots, occupied[row].tolist()
            )
            assert tuple(part[row].tolist() for part in got) == expected


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_shared_exponent_is_the_smallest(amax):
    e = med3x.shared_exponent(torch.tensor([amax])).item()
    assert amax <= 127 * 2.0**e
    assert e == -126 or amax > 127 * 2.0 ** (e - 1)


def test_exponent_corners():
    amax = torch.tensor([0.0, 127.0, 127.00001, 1e-44, 3.4e38])
    assert med3x.shared_exponent(amax).tolist() == [0, 0, 1, -126, 122]
    e = torch.arange(-126, 128, dtype=torch.int8)
    assert torch.equal(med3x.power_of_two(e), torch.tensor([2.0**k for k in range(-126, 128)]))


def test_tiles_ignore_what_is_not_kept():
    values = torch.zeros(64, 4, 4)
    values[0, 0, 1], values[40, 2, 3], values[41, 0, 0] = -254.0, 1.0, torch.nan
    kept = torch.zeros(64, 4, dtype=torch.bool)
    kept[0, 0] = kept[40, 2] = True
    assert med3x.tile_exponents(SPEC, values, kept).tolist() == [1, -6]
