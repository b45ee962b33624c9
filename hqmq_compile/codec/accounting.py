"""Bits that are stored per element of the user's cache tensor, part by part.

All stored bits count: unused bits of an index field, padding of a row, scales, the whole outlier
pool whether used or not, block means, and the 16-bit window and sink tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from .spec import CHUNK, CacheSpec


class Bits(NamedTuple):
    """Bits per element. Packed parts are averages over all tokens, packed or not."""

    codes: float
    scales: float
    outliers: float  # pool and exponents
    means: float
    recent: float  # window tokens that are not packed yet
    sinks: float

    @property
    def total(self) -> float:
        return sum(self)


def packed_bits(spec: CacheSpec) -> Bits:
    """Bits per element of packed tokens alone: a long context, without window and sinks."""
    token, block = spec.head_dim, spec.head_dim * spec.block
    pool = spec.pool_slots * CHUNK * spec.pool_dtype.itemsize * 8 + spec.tiles * 8
    return Bits(
        codes=spec.row_bytes * 8 / token,
        scales=spec.scale_groups * spec.scale_dtype.itemsize * 8 / token,
        outliers=pool / block,
        means=16 / spec.block if spec.center == "block" else 0.0,
        recent=0.0,
        sinks=0.0,
    )


def bits_per_element(spec: CacheSpec, length: int = 4096) -> Bits:
    """Bits per element of a cache that holds `length` tokens.

    Of these, `block * floor((length - window) / block)` are packed and the others are in the
    window in the cache's own dtype (window = 0: all are packed as they come). Sinks are stored
    twice. Codebooks are shared constants and do not count.
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    packed = length
    if spec.window:
        packed = max(0, length - spec.window) // spec.block * spec.block
    share = packed / length
    wide = spec.torch_dtype.itemsize * 8
    sinks = min(spec.sink_tokens, length) * wide / length
    bits = Bits(*(part * share for part in packed_bits(spec)))
    if spec.center == "first":
        bits = bits._replace(means=16 / length)
    return bits._replace(recent=(length - packed) * wide / length, sinks=sinks)
