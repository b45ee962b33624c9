"""Encoding a tile of tokens: norms, outliers and their pool slots, nearest codewords, radii, words.

The same arithmetic in the same order as `hqmq_compile/codec/codec.py`, so that both give the same
bits but for near ties (kernels that use this must be compiled with `enable_fp_fusion=False`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import power_of_two, rint, signed_byte

FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
HALF_MAX = tl.constexpr(65504.0)
HALF_TINY = tl.constexpr(5.960464477539063e-08)
INF_BITS = tl.constexpr(0x7F800000)


@triton.jit
def dot4(a0, a1, a2, a3, b0, b1, b2, b3):
    return (a0 * b0 + a1 * b1) + (a2 * b2 + a3 * b3)


@triton.jit
def any_in_row(mask):
    """`[T, PAD]` bool to `[T]`."""
    return tl.max(mask.to(tl.int32), 1) > 0


@triton.jit
def filled_rows(x0, x1, x2, x3):
    """`[T]` bool: tokens that are not all zeros."""
    return any_in_row((x0 != 0) | (x1 != 0) | (x2 != 0) | (x3 != 0))


@triton.jit
def finite_rows(x0, x1, x2, x3):
    largest = FLOAT_MAX  # comparisons with NaN are false
    good = (tl.abs(x0) <= largest) & (tl.abs(x1) <= largest)
    good = good & (tl.abs(x2) <= largest) & (tl.abs(x3) <= largest)
    return any_in_row(good == 0) == 0


@triton.jit
def chunk_norms(x0, x1, x2, x3):
    return tl.sqrt_rn(dot4(x0, x1, x2, x3, x0, x1, x2, x3))


@triton.jit
def tree_sum(x, STEPS: tl.constexpr):
    """Sum over the 2^STEPS rows of `[T, PAD]`: first half plus second half, and so on."""
    T: tl.constexpr = x.shape[0]
    PAD: tl.constexpr = x.shape[1]
    for step in tl.static_range(STEPS):
        x = tl.sum(tl.reshape(x, [2, T >> (step + 1), PAD]), 0)
    return tl.reshape(x, [PAD])


@triton.jit
def half_mean(total, count):
    """The mean of a block as it is stored: float16."""
    mean = tl.div_rn(total, tl.zeros_like(total) + tl.maximum(count, 1).to(tl.float32))
    return tl.clamp(mean, -HALF_MAX, HALF_MAX).to(tl.float16)


@triton.jit
def row_median(norms, L: tl.constexpr):
    """The lower median of every row's norms, `[T]` float32; NaN if one of them is.

    Bisection on the bits, which order as non-negative floats do.
    """
    PAD: tl.constexpr = L.pad
    inside = tl.arange(0, PAD)[None, :] < L.chunks
    bits = norms.to(tl.int32, bitcast=True)
    value = tl.zeros([norms.shape[0]], tl.int32)
    for step in range(31):
        probe = value | (1 << (30 - step))
        below = tl.sum(((bits < probe[:, None]) & inside).to(tl.int32), 1)
        value = tl.where(below < (L.chunks + 1) // 2, probe, value)
    nan = any_in_row((norms != norms) & inside)
    return tl.where(nan, float("nan"), value.to(tl.float32, bitcast=True))


@triton.jit
def outliers_of(norms, median, multiplier, filled, L: tl.constexpr):
    """`[T, PAD]` bool; median: `[T]`."""
    PAD: tl.constexpr = L.pad
    inside = tl.arange(0, PAD)[None, :] < L.chunks
    above = norms > (median * multiplier)[:, None]
    return above & (norms <= FLOAT_MAX) & filled[:, None] & inside


@triton.jit
def order_of(mask):
    """Place of every True of `[T, PAD]` bool among all of them, row by row; int32."""
    number = mask.to(tl.int32)
    in_row = tl.sum(number, 1)
    before = tl.cumsum(in_row, 0) - in_row
    return before[:, None] + tl.cumsum(number, 1) - number


@triton.jit
def fit_pool(outlier, norms, room):
    """The outliers that get one of `room` slots: the largest, and of equal ones the first.

    Returns kept `[T, PAD]` bool, their order (int32), how many they are, and how many are left out.
    """
    found = tl.sum(tl.sum(outlier.to(tl.int32), 1), 0)
    kept = outlier.to(tl.int32)
    if found > room:
        key = tl.where(outlier, norms.to(tl.int32, bitcast=True), -1)
        smallest = tl.zeros([], tl.int32)  # of the keys that get a slot
        for step in range(31):
            probe = smallest | (1 << (30 - step))
            enough = tl.sum(tl.sum((key >= probe).to(tl.int32), 1), 0) >= room
            smallest = tl.where(enough, probe, smallest)
        above = key > smallest
        tie = (key == smallest) & outlier
        left = room - tl.sum(tl.sum(above.to(tl.int32), 1), 0)
        kept = (above | (tie & (order_of(tie) < left))).to(tl.int32)
    kept = kept > 0
    return kept, order_of(kept), tl.minimum(found, room), tl.maximum(found - room, 0)


@triton.jit
def _right_product(x0, x1, x2, x3, a, b, c, d):
    """x · conj(s), s = (a, b, c, d)."""
    w0 = x0 * a + x1 * b + x2 * c + x3 * d
    w1 = x1 * a - x0 * b - x2 * d + x3 * c
    w2 = x1 * d - x0 * c + x2 * a - x3 * b
    w3 = x2 * b - (x0 * d + x1 * c) + x3 * a
    return w0, w1, w2, w3


@triton.jit
def _fused_product(x0, x1, x2, x3, a, b, c, d):
    """`_right_product` by fused operations: quicker, and rounded otherwise."""
    w0 = tl.fma(x3, d, tl.fma(x2, c, tl.fma(x1, b, x0 * a)))
    w1 = tl.fma(x3, c, tl.fma(x2, -d, tl.fma(x1, a, x0 * -b)))
    w2 = tl.fma(x3, -b, tl.fma(x2, a, tl.fma(x1, d, x0 * -c)))
    w3 = tl.fma(x3, a, tl.fma(x2, b, tl.fma(x1, -c, x0 * -d)))
    return w0, w1, w2, w3


@triton.jit
def _similarity(w0, w1, w2, w3):
    """The largest inner product with a Hurwitz unit."""
    a0, a1, a2, a3 = tl.abs(w0), tl.abs(w1), tl.abs(w2), tl.abs(w3)
    half_sum = (((a0 + a1) + a2) + a3) * 0.5
    return tl.maximum(tl.maximum(tl.maximum(tl.maximum(half_sum, a0), a1), a2), a3)


@triton.jit
def nearest(x0, x1, x2, x3, tab, head, L: tl.constexpr, AT_ONCE: tl.constexpr):
    """Half index and sign bit (int32 `[T, PAD]`) of the nearest codewords.

    AT_ONCE secondary codewords are tried in parallel: 1 for large tiles. Products are rounded otherwise
    than in the reference, so of two codewords that are equally near the other one may win.
    """
    T: tl.constexpr = x0.shape[0]
    PAD: tl.constexpr = L.pad
    book = tab.secondary
    if L.per_head:
        book += head * (4 * L.secondary)
    best = tl.zeros([T, PAD], tl.int32)
    most = tl.full([T, PAD], -1.0, tl.float32)
    if AT_ONCE == 1:
        for s in range(L.secondary):
            a, b = tl.load(book + 4 * s), tl.load(book + 4 * s + 1)
            c, d = tl.load(book + 4 * s + 2), tl.load(book + 4 * s + 3)
            w0, w1, w2, w3 = _fused_product(x0, x1, x2, x3, a, b, c, d)
            value = _similarity(w0, w1, w2, w3)
            best = tl.where(value > most, s, best)
            most = tl.maximum(value, most)
    else:
        y0, y1, y2, y3 = x0[:, :, None], x1[:, :, None], x2[:, :, None], x3[:, :, None]
        for s in range(0, L.secondary, AT_ONCE):
            j = s + tl.arange(0, AT_ONCE)[None, None, :]
            known = j < L.secondary
            a = tl.load(book + 4 * j, mask=known, other=0.0)
            b = tl.load(book + 4 * j + 1, mask=known, other=0.0)
            c = tl.load(book + 4 * j + 2, mask=known, other=0.0)
            d = tl.load(book + 4 * j + 3, mask=known, other=0.0)
            w0, w1, w2, w3 = _fused_product(y0, y1, y2, y3, a, b, c, d)
            value = tl.where(known, _similarity(w0, w1, w2, w3), -1.0)
            here = tl.max(value, 2)
            which = tl.min(tl.where(value == here[:, :, None], j, L.secondary - 1), 2)
            best = tl.where(here > most, which, best)
            most = tl.maximum(here, most)

    a, b = tl.load(book + 4 * best), tl.load(book + 4 * best + 1)
    c, d = tl.load(book + 4 * best + 2), tl.load(book + 4 * best + 3)
    w0, w1, w2, w3 = _right_product(x0, x1, x2, x3, a, b, c, d)
    largest, axis, axis_sign = tl.abs(w0), tl.zeros([T, PAD], tl.int32), w0 < 0
    axis, axis_sign = (
        tl.where(tl.abs(w1) > largest, 1, axis),
        tl.where(tl.abs(w1) > largest, w1 < 0, axis_sign),
    )
    largest = tl.maximum(largest, tl.abs(w1))
    axis, axis_sign = (
        tl.where(tl.abs(w2) > largest, 2, axis),
        tl.where(tl.abs(w2) > largest, w2 < 0, axis_sign),
    )
    largest = tl.maximum(largest, tl.abs(w2))
    axis, axis_sign = (
        tl.where(tl.abs(w3) > largest, 3, axis),
        tl.where(tl.abs(w3) > largest, w3 < 0, axis_sign),
    )
    largest = tl.maximum(largest, tl.abs(w3))
    half_sum = (((tl.abs(w0) + tl.abs(w1)) + tl.abs(w2)) + tl.abs(w3)) * 0.5
    is_axis = largest >= half_sum
    first = w0 < 0
    mixed = 4 + 4 * ((w1 < 0) ^ first).to(tl.int32) + 2 * ((w2 < 0) ^ first).to(tl.int32)
    mixed += ((w3 < 0) ^ first).to(tl.int32)
    sign = tl.where(is_axis, axis_sign, first).to(tl.int32)
    return 12 * best + tl.where(is_axis, axis, mixed), sign


@triton.jit
def _scale_code(scales, amax, L: tl.constexpr):
    """Scale codes of group maxima `[T]` (inf where something is not finite), and their values."""
    if L.log_scale:
        below = tl.zeros_like(amax).to(tl.int32)  # entries 1..255 of the table that are too small
        for step in tl.static_range(8):
            probe = below + (128 >> step)
            below = tl.where(tl.load(scales + probe) < amax, probe, below)
        code = tl.minimum(below + 1, 255)
        return code.to(tl.uint8), tl.load(scales + code)
    else:
        half = tl.minimum(tl.maximum(amax, HALF_TINY), HALF_MAX)
        code = tl.where(amax <= FLOAT_MAX, half, float("nan")).to(tl.float16)
        return code, code.to(tl.float32)


@triton.jit
def quantize(
    x0, x1, x2, x3, norms, kept, filled, tab, head, scale_row, live,
    L: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Words `[T, PAD]` int32, 0 where kept or empty; stores the scale codes.

    kept: outliers with a slot; scale_row: pointers `[T]` to the scale codes of the rows; live: the
    rows to store.
    """
    PAD: tl.constexpr = L.pad
    GROUPS: tl.constexpr = L.groups
    c = tl.arange(0, PAD)[None, :]
    half, sign = nearest(x0, x1, x2, x3, tab, head, L, AT_ONCE)
    radii = norms
    if L.least_squares:
        table = tab.codewords
        if L.per_head:
            table += head * (1 << (L.index_bits - 1))
        word = tl.load(table + half)
        y0, y1 = signed_byte(word, 0), signed_byte(word, 1)
        y2, y3 = signed_byte(word, 2), signed_byte(word, 3)
        radii = tl.div_rn(
            tl.abs(dot4(x0, x1, x2, x3, y0, y1, y2, y3)) * 127.0,
            dot4(y0, y1, y2, y3, y0, y1, y2, y3),
        )
    # NaN counts as infinite: maxima of Triton pass over NaN.
    counted = tl.where(radii <= FLOAT_MAX, radii, float("inf"))
    counted = tl.where(kept | (c >= L.chunks), 0.0, counted)
    scale = tl.full(radii.shape, 1.0, tl.float32)
    for group in tl.static_range(GROUPS):
        if GROUPS == 1:
            amax = tl.max(counted, 1)
        else:
            amax = tl.max(tl.where(c // 16 == group, counted, 0.0), 1)
        code, value = _scale_code(tab.scales, amax, L)
        scale = tl.where(c // 16 == group, value[:, None], scale)
        tl.store(scale_row + group, tl.where(filled, code, tl.zeros_like(code)), mask=live)
    if GROUPS == 1:
        scale = tl.broadcast_to(value[:, None], radii.shape)
    scale = tl.where(filled[:, None], scale, 1.0)
    level = tl.div_rn(radii, scale) * L.top_level
    level = tl.where(level == level, level, L.lowest_level)
    level = rint(tl.minimum(tl.maximum(level, L.lowest_level), L.top_level)).to(tl.int32)
    result = (half | (sign << (L.index_bits - 1))) << L.radius_bits
    result |= level - L.level_offset
    return tl.where(filled[:, None] & (kept == 0) & (c < L.chunks), result, 0)


@triton.jit
def outlier_word(slot, L: tl.constexpr):
    word = slot << L.radius_bits
    if L.flag == "bit":
        word |= 1 << (L.radius_bits + L.index_bits)
    return word


@triton.jit
def shared_exponent(amax):
    """The smallest e, at least -126, with amax <= 127 · 2^e; 0 for amax = 0. float32 to int32."""
    bits = amax.to(tl.int32, bitcast=True)
    e = (bits >> 23) - 126 - 7 + ((bits & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    return tl.where(amax > 0, tl.maximum(e, -126), 0)


@triton.jit
def pool_int8(x0, x1, x2, x3, exponent):
    """Four components as the bytes of int32; exponent: broadcastable int32."""
    power = tl.zeros_like(x0) + power_of_two(exponent)
    word = tl.zeros(x0.shape, tl.int32)
    word |= _as_byte(tl.div_rn(x0, power))
    word |= _as_byte(tl.div_rn(x1, power)) << 8
    word |= _as_byte(tl.div_rn(x2, power)) << 16
    word |= _as_byte(tl.div_rn(x3, power)) << 24
    return word


@triton.jit
def _as_byte(x):
    return rint(tl.clamp(x, -127.0, 127.0)).to(tl.int32) & 0xFF


@triton.jit
def store_words(codes, rows, live, word, L: tl.constexpr):
    """Packs words `[T, PAD]` into rows (int64 row numbers `[T]`) of planes."""
    PAD: tl.constexpr = L.pad
    T: tl.constexpr = word.shape[0]
    c = tl.arange(0, PAD)[None, :]
    row = codes + rows[:, None] * L.row_bytes
    mask = live[:, None] & (c < L.chunks)
    if L.word_bits & 16:
        if L.row_bytes % 2 == 0:
            tl.store(row.to(tl.pointer_type(tl.int16)) + c, word.to(tl.int16), mask=mask)
        else:
            tl.store(row + 2 * c, word.to(tl.uint8), mask=mask)
            tl.store(row + 2 * c + 1, (word >> 8).to(tl.uint8), mask=mask)
    if L.word_bits & 8:
        tl.store(row + L.offset8 + c, (word >> (L.word_bits & 16)).to(tl.uint8), mask=mask)
    if L.word_bits & 4:
        _store_plane(row + L.offset4, live, word >> (L.word_bits & 24), 4, T, L)
    if L.word_bits & 2:
        _store_plane(row + L.offset2, live, word >> (L.word_bits & 28), 2, T, L)
    if L.word_bits & 1:
        _store_plane(row + L.offset1, live, word >> (L.word_bits & 30), 1, T, L)


@triton.jit
def _store_plane(at, live, field, WIDTH: tl.constexpr, T: tl.constexpr, L: tl.constexpr):
    PER_BYTE: tl.constexpr = 8 // WIDTH
    BYTES: tl.constexpr = L.pad // PER_BYTE
    field = tl.reshape(field & ((1 << WIDTH) - 1), [T, BYTES, PER_BYTE])
    byte = tl.sum(field << (tl.arange(0, PER_BYTE) * WIDTH)[None, None, :], 2)
    j = tl.arange(0, BYTES)[None, :]
    tl.store(at + j, byte.to(tl.uint8), mask=live[:, None] & (j * PER_BYTE < L.chunks))
