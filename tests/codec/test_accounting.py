import dataclasses

import pytest

from hqmq_compile.codec.accounting import bits_per_element, packed_bits
from hqmq_compile.codec.spec import CacheSpec


def test_bits_of_the_method():
    # 12 + 4 bits a chunk, one 16-bit scale a token: the 4.125 bits of the paper's Gaussian figure.
    assert packed_bits(CacheSpec("key", 128, scale="float16")).total == 4.125
    assert packed_bits(CacheSpec("key", 64)).total == 4.125
    assert packed_bits(CacheSpec("value", 64, secondary=42, radius_bits=3)).total == 3.375


def test_window_sinks_and_means():
    spec = CacheSpec("key", 128, center="block", window=64, sink_tokens=4)
    bits = bits_per_element(spec, 4096)
    packed = 4032 / 4096
    assert bits.codes == 4 * packed and bits.scales == 0.125 * packed
    assert bits.means == 0.25 * packed
    assert bits.recent == 16 * 64 / 4096 and bits.sinks == 16 * 4 / 4096
    assert bits.total == sum(bits)
    assert bits_per_element(spec, 100).codes == 0
    assert bits_per_element(spec, 100).recent == 16
    assert bits_per_element(spec, 2).sinks == 16


def test_first_mean_is_stored_once():
    spec = CacheSpec("key", 128, center="first")
    assert bits_per_element(spec, 1000).means == 16 / 1000


def test_pool_counts_whole():
    spec = CacheSpec("key", 64, med3x=3.0)
    assert packed_bits(spec).outliers == (128 * 32 + 2 * 8) / 4096
    wide = dataclasses.replace(spec, outliers="16bit", outlier_flag="bit")
    assert packed_bits(wide).outliers == 128 * 64 / 4096
    assert packed_bits(wide).codes == 17 / 4


def test_buffers_agree():
    import torch

    from hqmq_compile.codec.codec import encode_blocks

    for spec in (
        CacheSpec("key", 80, center="block", med3x=3.0),
        CacheSpec("value", 64, secondary=42, radius_bits=3),
        CacheSpec("key", 64, med3x=3.0, outliers="16bit", outlier_flag="bit", scale="float16"),
    ):
        coded = encode_blocks(spec, torch.randn(1, 1, 1, spec.block, spec.head_dim))
        stored = sum(t.numel() * t.element_size() for t in coded[:5] if t is not None)
        expected = packed_bits(spec).total * spec.block * spec.head_dim / 8
        assert stored == pytest.approx(expected)


def test_length_must_be_positive():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        bits_per_element(CacheSpec("key", 64), 0)
