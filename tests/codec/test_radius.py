import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hqmq_compile.codec import radius
from hqmq_compile.codec.spec import CacheSpec

LOG8 = CacheSpec("key", 128)
HALF = CacheSpec("key", 128, scale="float16")


def test_log8_table():
    table = radius.scale_table(torch.device("cpu"))
    assert table[0] == 0 and table[128] == 1 and table[136] == 2 and table[1] == 2.0**-15.875
    assert bool((table[1:] > table[:-1]).all())


@given(st.floats(2.0**-15, 2.0**15, width=32))
def test_log8_is_the_smallest_scale_that_reaches_amax(amax):
    amax = torch.tensor([amax])
    code = radius.scale_encode(LOG8, amax)
    table = radius.scale_table(amax.device)
    assert table[code.int()] >= amax > table[code.int() - 1]


def test_log8_powers_of_two_are_exact():
    powers = torch.tensor([2.0**k for k in range(-15, 16)])
    codes = radius.scale_encode(LOG8, powers)
    assert torch.equal(radius.scale_decode(LOG8, codes), powers)


@pytest.mark.parametrize("value, code", [
    (0.0, 1), (1e-30, 1), (1.0, 128), (7e4, 255), (torch.inf, 255), (torch.nan, 255),
])  # fmt: skip
def test_log8_limits(value, code):
    assert radius.scale_encode(LOG8, torch.tensor([value])).item() == code


@pytest.mark.parametrize("value, stored", [
    (0.0, 2.0**-24), (1e-30, 2.0**-24), (1.5, 1.5), (1e9, 65504.0),
    (torch.inf, torch.nan), (torch.nan, torch.nan),
])  # fmt: skip
def test_float16_limits(value, stored):
    got = radius.scale_encode(HALF, torch.tensor([value]))
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.tensor([stored]).half(), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [4, 60, 64, 80, 128, 192, 256])
def test_groups_of_any_head_dim(dim):
    spec = CacheSpec("key", dim)
    radii = torch.rand(3, spec.chunks)
    groups = radius.group_amax(spec, radii)
    assert groups.shape == (3, spec.scale_groups)
    assert torch.equal(groups[:, -1], radii[:, 16 * (spec.scale_groups - 1) :].amax(-1))
    wide = radius.per_chunk(spec, groups).expand(3, spec.chunks)
    assert bool((wide >= radii).all())
    assert torch.equal(wide[:, -1], groups[:, -1]) and torch.equal(wide[:, 0], groups[:, 0])


@pytest.mark.parametrize("change, codes, levels", [
    ({}, (0, 15), (1, 16)),
    ({"med3x": 3.0}, (1, 15), (1, 15)),
    ({"zero_level": True}, (0, 15), (0, 15)),
    ({"med3x": 3.0, "outlier_flag": "bit"}, (0, 15), (1, 16)),
    ({"radius_bits": 3}, (0, 7), (1, 8)),
], ids=str)  # fmt: skip
def test_levels(change, codes, levels):
    spec = dataclasses.replace(HALF, **change)
    radii = torch.linspace(0, 1.2, 32).view(1, 32)
    got = radius.radius_codes(spec, radii, torch.ones(1, 1))
    assert (got.min().item(), got.max().item()) == codes
    level = got + spec.level_offset
    assert (level.min().item(), level.max().item()) == levels and spec.top_level == levels[1]
    inside = (radii >= levels[0] / spec.top_level) & (radii <= 1)
    error = (level / spec.top_level - radii).abs()[inside]
    assert error.max() <= 0.5 / spec.top_level + 1e-6


def test_not_a_number_gets_a_legal_code():
    radii = torch.tensor([[torch.nan, torch.inf, 1.0]])
    for scale in (1.0, torch.nan, torch.inf):
        got = radius.radius_codes(HALF, radii, torch.full((1, 1), scale))
        assert got.min() >= 0 and got.max() <= 15
