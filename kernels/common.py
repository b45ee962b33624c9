"""What the Triton kernels share: the layout of a packed cache at compile time, tables, decoding.

A tile is `T` slots of one batch row and KV head. Its values are kept as four tensors `[T, PAD]`
float32, component i of every quaternion chunk, with PAD >= chunks a power of two: decoding, the
nearest codeword and the radii are then elementwise, and any head dimension works.

The reference is `hqmq_compile/codec/codec.py`; kernels that write are compiled without fused
multiply-add, so that they round as it does.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..codec import codebook, radius
from ..codec.spec import CacheSpec
from ..codec.tables import cached_table


# -- host side ---------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Layout:
    """A `CacheSpec` as the kernels are compiled for it: equal layouts share one binary."""

    chunks: int
    pad: int  # chunks rounded up to a power of two, at least 16 (for `tl.dot`)
    word_bits: int
    radius_bits: int
    index_bits: int
    level_offset: int
    top_level: int
    lowest_level: int
    row_bytes: int
    groups: int  # scales per token
    log_scale: bool
    flag: str  # how a word marks an outlier: "escape", "bit", or "none" without Med3x
    int8: bool  # outliers are int8x4 with a power of two per tile; else 16 bits
    pool: int  # outlier slots of a block
    pool_limit: float
    tiles: int
    center: str
    least_squares: bool
    secondary: int
    per_head: bool  # codebooks differ between heads
    block: int
    window: int
    ring: int
    sinks: int

    @property
    def dim(self) -> int:
        return 4 * self.chunks

    @property
    def block_steps(self) -> int:
        """Halvings of a block."""
        return self.block.bit_length() - 1

    @property
    def pool_pad(self) -> int:
        """Power of two above `pool` (one bin more, for "none"), for histograms."""
        return max(128, triton.next_power_of_2(self.pool + 1))

    @property
    def pool_steps(self) -> int:
        return self.pool_pad.bit_length() - 1

    @property
    def offset8(self) -> int:
        """First byte of the plane of 8-bit fields in a row; the planes are in order 16, 8, 4, 2, 1."""
        return 2 * self.chunks if self.word_bits & 16 else 0

    @property
    def offset4(self) -> int:
        return self.offset8 + (self.chunks if self.word_bits & 8 else 0)

    @property
    def offset2(self) -> int:
        return self.offset4 + ((self.chunks + 1) // 2 if self.word_bits & 4 else 0)

    @property
    def offset1(self) -> int:
        return self.offset2 + ((self.chunks + 3) // 4 if self.word_bits & 2 else 0)


@functools.lru_cache(maxsize=1024)
def layout(spec: CacheSpec) -> Layout:
    """The layout of a spec."""
    has_pool = bool(spec.med3x)
    return Layout(
        chunks=spec.chunks,
        pad=max(16, triton.next_power_of_2(spec.chunks)),
        word_bits=spec.word_bits,
        radius_bits=spec.radius_bits,
        index_bits=spec.index_bits,
        level_offset=spec.level_offset,
        top_level=spec.top_level,
        lowest_level=0 if spec.zero_level else 1,
        row_bytes=spec.row_bytes,
        groups=spec.scale_groups,
        log_scale=spec.scale == "log8",
        flag=spec.outlier_flag if has_pool else "none",
        int8=has_pool and spec.outliers == "int8x4",
        pool=spec.pool_slots,
        pool_limit=127.0 if spec.pool_dtype == torch.int8 else torch.finfo(spec.pool_dtype).max,
        tiles=spec.tiles,
        center=spec.center,
        least_squares=spec.least_squares,
        secondary=spec.secondary,
        per_head=spec.codebook == "haar",
        block=spec.block,
        window=spec.window,
        ring=spec.ring_slots,
        sinks=spec.sink_tokens,
    )


class Tables(NamedTuple):
    """Constant tensors of a spec, kept per device."""

    codewords: torch.Tensor  # int32 [heads or 1, 2^(index_bits - 1)]: four int8, unused entries 0
    secondary: torch.Tensor  # float32 [heads or 1, S, 4]
    scales: torch.Tensor  # float32 [256]


@cached_table(512)
def _codeword_table(spec: CacheSpec, heads: int, device: torch.device) -> torch.Tensor:
    words = codebook.codewords(spec, heads, "cpu")
    padded = torch.zeros(len(words), 2 ** (spec.index_bits - 1), 4, dtype=torch.int8)
    padded[:, : words.shape[1]] = words
    return padded.view(torch.int32).squeeze(-1).to(device)


@functools.lru_cache(maxsize=512)
def _tables(spec: CacheSpec, heads: int, device: torch.device) -> Tables:
    return Tables(
        _codeword_table(spec, heads, device),
        codebook.secondaries(spec, heads, device),
        radius.scale_table(device),
    )


@functools.lru_cache(maxsize=4096)
def _codebook_of(spec: CacheSpec) -> CacheSpec:
    # Only what the codebook depends on, so that layers share tables.
    haar = spec.codebook == "haar"
    return CacheSpec(
        role=spec.role if haar else "key",
        head_dim=4,
        secondary=spec.secondary,
        codebook=spec.codebook,
        seed=spec.seed if haar else 0,
        layer=spec.layer if haar else 0,
        first_head=spec.first_head if haar else 0,
    )


def tables(spec: CacheSpec, heads: int, device: torch.device) -> Tables:
    """The tables of a spec for `heads` KV heads from `first_head` on."""
    heads = heads if spec.codebook == "haar" else 1
    return _tables(_codebook_of(spec), heads, device)


# -- device side -------------------------------------------------------------------------------
@triton.jit
def rint(x):
    """Nearest integer of float32 below 2^22 in magnitude, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def power_of_two(exponent):
    """2^exponent as float32 for int32 exponents; below -126 as -126."""
    return ((tl.maximum(exponent, -126) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def signed_byte(word, i: tl.constexpr):
    """Byte i of int32 words as a signed float32."""
    return ((word << (24 - 8 * i)) >> 24).to(tl.float32)


@triton.jit
def load4(
    base, rows, stride, live, CHUNKS: tl.constexpr, PAD: tl.constexpr, WHOLE: tl.constexpr = True
):
    """Rows of dense vectors as four components.

    base: pointer to row 0; rows: `[T]` row numbers, `stride` elements apart; live: `[T]` bool.
    WHOLE loads vectors and splits them. Otherwise components are loaded one by one: slower, but in
    the layout that decoding has, where both meet and dense rows are rare.
    """
    T: tl.constexpr = rows.shape[0]
    if WHOLE:
        d = tl.arange(0, 4 * PAD)
        x = tl.load(
            base + rows[:, None] * stride + d[None, :],
            mask=live[:, None] & (d < 4 * CHUNKS)[None, :],
            other=0.0,
        ).to(tl.float32)
        even, odd = tl.split(tl.reshape(x, [T, PAD, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
    else:
        c = tl.arange(0, PAD)
        at = base + rows[:, None] * stride + 4 * c[None, :]
        mask = live[:, None] & (c < CHUNKS)[None, :]
        x0 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(at + 1, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(at + 2, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(at + 3, mask=mask, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def store4(base, rows, stride, live, x0, x1, x2, x3, CHUNKS: tl.constexpr, PAD: tl.constexpr):
    """The inverse of `load4`, in the dtype of `base`."""
    T: tl.constexpr = rows.shape[0]
    d = tl.arange(0, 4 * PAD)
    x = tl.reshape(tl.join(tl.join(x0, x2), tl.join(x1, x3)), [T, 4 * PAD])
    tl.store(
        base + rows[:, None] * stride + d[None, :],
        x.to(base.dtype.element_ty),
        mask=live[:, None] & (d < 4 * CHUNKS)[None, :],
    )


@triton.jit
def load_vector4(base, CHUNKS: tl.constexpr, PAD: tl.constexpr):
    """One dense vector as four components `[PAD]`."""
    c = tl.arange(0, PAD)
    inside = c < CHUNKS
    x0 = tl.load(base + 4 * c, mask=inside, other=0.0).to(tl.float32)
    x1 = tl.load(base + 4 * c + 1, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(base + 4 * c + 2, mask=inside, other=0.0).to(tl.float32)
    x3 = tl.load(base + 4 * c + 3, mask=inside, other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def load_words(codes, rows, live, L: tl.constexpr):
    """Words `[T, PAD]` int32 of packed rows (int64 row numbers `[T]`); 0 where not live."""
    PAD: tl.constexpr = L.pad
    c = tl.arange(0, PAD)[None, :]
    row = codes + rows[:, None] * L.row_bytes
    mask = live[:, None] & (c < L.chunks)
    word = tl.zeros([rows.shape[0], PAD], tl.int32)
    if L.word_bits & 16:
        if L.row_bytes % 2 == 0:
            field = tl.load(row.to(tl.pointer_type(tl.int16)) + c, mask=mask, other=0)
            word = field.to(tl.int32) & 0xFFFF
        else:
            word = tl.load(row + 2 * c, mask=mask, other=0).to(tl.int32)
            word |= tl.load(row + 2 * c + 1, mask=mask, other=0).to(tl.int32) << 8
    if L.word_bits & 8:
        field = tl.load(row + L.offset8 + c, mask=mask, other=0).to(tl.int32)
        word |= field << (L.word_bits & 16)
    if L.word_bits & 4:
        field = tl.load(row + L.offset4 + c // 2, mask=mask, other=0).to(tl.int32)
        word |= ((field >> (c % 2 * 4)) & 15) << (L.word_bits & 24)
    if L.word_bits & 2:
        field = tl.load(row + L.offset2 + c // 4, mask=mask, other=0).to(tl.int32)
        word |= ((field >> (c % 4 * 2)) & 3) << (L.word_bits & 28)
    if L.word_bits & 1:
        field = tl.load(row + L.offset1 + c // 8, mask=mask, other=0).to(tl.int32)
        word |= ((field >> (c % 8)) & 1) << (L.word_bits & 30)
    return word


@triton.jit
def scale_value(scales, code, L: tl.constexpr):
    """float32 scales of stored scale codes; `scales` is the table."""
    if L.log_scale:
        return tl.load(scales + code.to(tl.int32))
    else:
        return code.to(tl.float32)


@triton.jit
def outlier_mask(word, filled, L: tl.constexpr):
    """`[T, PAD]` bool: is the chunk in the pool?"""
    if L.flag == "bit":
        return (word >> (L.radius_bits + L.index_bits)) != 0
    else:
        PAD: tl.constexpr = L.pad
        inside = tl.arange(0, PAD)[None, :] < L.chunks
        return ((word & ((1 << L.radius_bits) - 1)) == 0) & filled[:, None] & inside


@triton.jit
def decode(buf, tab, head, rows, live, block, offset, L: tl.constexpr, EXACT: tl.constexpr):
    """Decode packed rows, without their mean.

    rows: int64 `[T]` row numbers over the whole of `buf.codes`; live: `[T]` bool; block: number of
    their block over the whole of `buf.pool`; offset: `[T]` slot numbers in the block; EXACT rounds
    as the reference, else there are fewer divisions.
    Returns four components `[T, PAD]` float32, 0 where not live, and `filled` `[T]` bool.
    """
    PAD: tl.constexpr = L.pad
    GROUPS: tl.constexpr = L.groups
    c = tl.arange(0, PAD)[None, :]
    word = load_words(buf.codes, rows, live, L)
    scale_row = buf.scales + rows * L.groups
    code = tl.load(scale_row, mask=live, other=0)
    filled = code != 0
    scale = tl.broadcast_to(scale_value(tab.scales, code, L)[:, None], word.shape)
    for group in tl.static_range(1, GROUPS):
        code = tl.load(scale_row + group, mask=live, other=0)
        scale = tl.where(c // 16 == group, scale_value(tab.scales, code, L)[:, None], scale)

    index = word >> L.radius_bits
    half = index & ((1 << (L.index_bits - 1)) - 1)
    table = tab.codewords
    if L.per_head:
        table += head * (1 << (L.index_bits - 1))
    packed = tl.load(table + half)
    level = (word & ((1 << L.radius_bits) - 1)) + L.level_offset
    level = tl.where((index >> (L.index_bits - 1)) & 1 != 0, -level, level).to(tl.float32)
    x0, x1, x2, x3 = (
        signed_byte(packed, 0), signed_byte(packed, 1), signed_byte(packed, 2), signed_byte(packed, 3)
    )  # fmt: skip
    top = 127.0 * L.top_level
    if EXACT:
        x0 = tl.div_rn(x0 * level, tl.full(x0.shape, top, tl.float32)) * scale
        x1 = tl.div_rn(x1 * level, tl.full(x0.shape, top, tl.float32)) * scale
        x2 = tl.div_rn(x2 * level, tl.full(x0.shape, top, tl.float32)) * scale
        x3 = tl.div_rn(x3 * level, tl.full(x0.shape, top, tl.float32)) * scale
    else:
        factor = level * (scale * (1.0 / top))
        x0, x1, x2, x3 = x0 * factor, x1 * factor, x2 * factor, x3 * factor
    # A word of zeros has level 1 where code 0 is an ordinary level, but only in empty rows,
    # whose scale is 0.
    if L.flag != "none":
        outlier = outlier_mask(word, filled, L)
        slot = tl.minimum(index & ((1 << L.index_bits) - 1), L.pool - 1)
        entry = block * L.pool + slot
        if L.int8:
            exponent = tl.load(buf.exponents + block * L.tiles + offset // 32, mask=live, other=0)
            power = power_of_two(exponent.to(tl.int32))[:, None]
            stored = tl.load(buf.pool.to(tl.pointer_type(tl.int32)) + entry, mask=outlier, other=0)
            x0 = tl.where(outlier, signed_byte(stored, 0) * power, x0)
            x1 = tl.where(outlier, signed_byte(stored, 1) * power, x1)
            x2 = tl.where(outlier, signed_byte(stored, 2) * power, x2)
            x3 = tl.where(outlier, signed_byte(stored, 3) * power, x3)
        else:
            at = buf.pool + entry * 4
            x0 = tl.where(outlier, tl.load(at, mask=outlier, other=0.0).to(tl.float32), x0)
            x1 = tl.where(outlier, tl.load(at + 1, mask=outlier, other=0.0).to(tl.float32), x1)
            x2 = tl.where(outlier, tl.load(at + 2, mask=outlier, other=0.0).to(tl.float32), x2)
            x3 = tl.where(outlier, tl.load(at + 3, mask=outlier, other=0.0).to(tl.float32), x3)
    return x0, x1, x2, x3, filled
