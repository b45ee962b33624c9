"""Baselines do what their names say: error against bits, and bits counted."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks import baselines as b
from benchmarks.quality_cases import BASELINES, SETS, config, label, method, named

DIM = 64


@pytest.fixture(scope="module")
def gaussian():
    return torch.randn(1, 2, 256, DIM, generator=torch.Generator().manual_seed(1))


def db(codec: b.Baseline, x: torch.Tensor) -> float:
    """Signal to noise."""
    if hasattr(codec, "fit"):
        codec.fit(torch.randn(1, 2, 512, DIM, generator=torch.Generator().manual_seed(2)), 0)
    y = codec.read_back(x, 0, [])
    assert y.shape == x.shape
    return 10 * math.log10(x.square().sum() / (y - x).square().sum())


# Codec, bits an element of packed tokens at D = 64, and decibels on Gaussian data (± 0.5).
KNOWN = [
    (b.Int(width=8), 8.25, 44.6),
    (b.Int(width=4), 4.25, 19.3),
    (b.Int(width=2), 2.25, 2.9),
    (b.IntGroups(width=4), 5.0, 22.1),
    (b.IntGroups(width=4, along="tokens", block=32), 5.0, 22.1),
    (b.IntGroups(width=4, group=64), 4.5, 21.0),
    (b.Float8(), 8.0, 31.5),
    (b.Rotated(width=4), 4.25, 20.2),  # Lloyd-Max: 20.22
    (b.Rotated(width=3), 3.25, 14.6),  # 14.62
    (b.Rotated(width=3, center=True, block=64), 3.5, 14.7),
    (b.RandomVQ(), 3.75, 15.8),
    (b.Spherical(), 4.25, 18.8),
    (b.LearnedVQ(index_bits=8), 2.25, 10.1),
    (b.AdditiveVQ(index_bits=8), 2.25, 9.5),
]


@pytest.mark.parametrize("codec, bits, decibels", KNOWN, ids=lambda p: type(p).__name__)
def test_error_and_bits(codec, bits, decibels, gaussian):
    assert codec.packed_bits(DIM) == pytest.approx(bits)
    measured = db(codec, gaussian)
    assert measured == pytest.approx(decibels, abs=0.5)
    assert measured < 20 * math.log10(2) * bits  # the rate-distortion bound


def test_lloyd_max_levels():
    """Max (1960): 1 bit ±0.7979, 2 bits ±0.4528 and ±1.5104."""
    torch.testing.assert_close(b.lloyd_max(1), torch.tensor([-0.7979, 0.7979]), rtol=0, atol=1e-4)
    four = torch.tensor([-1.5104, -0.4528, 0.4528, 1.5104])
    torch.testing.assert_close(b.lloyd_max(2), four, rtol=0, atol=1e-4)


def test_a_channel_of_outliers():
    """What KIVI, centring and Med3x are for: a channel that is large in every token."""
    x = torch.randn(1, 1, 256, DIM)
    x[..., 5] += 40
    bulk = torch.arange(DIM) != 5

    def noise(codec):
        return (codec.read_back(x, 0, []) - x)[..., bulk].square().mean()

    broken = noise(b.Int())
    assert broken > 0.5
    assert noise(b.IntGroups(along="tokens", block=32)) < 0.01 * broken
    assert noise(b.Int(center=True, block=64)) < 0.05 * broken
    outliers = b.IntOutliers()
    assert noise(outliers) < 0.05 * broken
    # One chunk of 16 in each token: 80 bits for four elements, and a flag.
    assert outliers.packed_bits(DIM) == pytest.approx(4 + 16 / DIM + (1 + 80 / 16) / 4, rel=0.02)


def test_the_norm_is_in_the_search():
    """The nearest of rows of different lengths is not the one with the largest inner product."""
    table = torch.tensor([[1.0, 0, 0, 0], [3.0, 1, 0, 0], [0, 0, 0, 0]])
    x = torch.tensor([[1.2, 0.1, 0, 0], [2.5, 0.5, 0, 0], [0.1, -0.3, 0, 0]])
    assert b.nearest_row(x, table).tolist() == [0, 1, 2]


def test_learned_codebooks_refuse_unseen_layers(gaussian):
    with pytest.raises(RuntimeError, match="calibrate"):
        b.LearnedVQ().read_back(gaussian, 3, [])


def test_every_token_on_its_own(gaussian):
    """The stored form of a token does not depend on later blocks: what one pass relies on."""
    for name in BASELINES:
        for codec in (method(name).key, method(name).value):
            if hasattr(codec, "fit"):
                continue
            whole = codec.read_back(gaussian, 0, [])
            half = codec.read_back(gaussian[:, :, :128], 0, [])
            torch.testing.assert_close(whole[:, :, :128], half, rtol=1e-5, atol=1e-5)


def test_cases_by_name():
    assert named(["presets", "int4", "4bit"]) == ["3bit", "4bit", "5bit", "paper", "int4"]
    assert config("KIVI-4") is None
    changed = config('3bit{"block": 128, "med3x": {"pool": 0.05}}')
    assert changed.block == 128 and changed.med3x.pool == 0.05 and changed.med3x.multiplier == 3
    assert changed.key.secondary == 42
    with pytest.raises(ValueError, match="no preset"):
        method("nothing")
    for case in SETS["all"]:
        keys, values = method(case).bits(DIM, 4096)
        assert 2 < keys < 17 and 2 < values < 17
    labels = [label(case) for cases in SETS.values() for case in cases]
    assert len(set(labels)) == len({case for cases in SETS.values() for case in cases})
    short = '3bit{"value": {"secondary": 10, "radius_bits": 2}, "med3x": null, "block": 32}'
    assert label(short) == "3bit, V 8+2, no Med3x, block 32"


def test_another_codec_for_the_first_layer(gaussian):
    method = BASELINES["TurboQuant 4 bit, helpers, layer 0 int8"]()
    plain = BASELINES["TurboQuant 4 bit, helpers"]()
    assert db(method.key, gaussian) > 40 > db(plain.key, gaussian)
    assert torch.equal(method.key.read_back(gaussian, 1, []), plain.key.read_back(gaussian, 1, []))
    assert method.bits_at(DIM, 4096, 30) == pytest.approx(
        plain.bits_at(DIM, 4096, 30) + 4 / 60, rel=0.01
    )
    with pytest.raises(ValueError, match="different times"):
        b.ByLayer(first=b.Int(), rest=plain.key)
