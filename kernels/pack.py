"""Packing one whole block of tokens: its mean, its outliers, its codes, into their places."""

from __future__ import annotations

import triton
import triton.language as tl

from .common import load_vector4
from .encode import (
    chunk_norms,
    filled_rows,
    finite_rows,
    fit_pool,
    half_mean,
    outlier_word,
    outliers_of,
    pool_int8,
    quantize,
    row_median,
    shared_exponent,
    store_words,
    tree_sum,
)
from .read import CAPPED


@triton.jit
def _part_of(x, part, PARTS: tl.constexpr):
    """Rows part * T / PARTS and following of `[T, PAD]` or `[T]` numbers."""
    if PARTS == 1:
        return x
    T: tl.constexpr = x.shape[0]
    number = tl.arange(0, PARTS)
    if len(x.shape) == 1:
        pieces = tl.reshape(x, [PARTS, T // PARTS])
        return tl.sum(tl.where(number[:, None] == part, pieces, 0), 0)
    else:
        pieces = tl.reshape(x, [PARTS, T // PARTS, x.shape[1]])
        return tl.sum(tl.where(number[:, None, None] == part, pieces, 0), 0)


@triton.jit
def pack_block(
    buf, tab, x0, x1, x2, x3, bh, head, capacity, first, multiplier, begin, end,
    PARTS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Encodes a block of tokens, given whole as components `[block, PAD]`, into its place.

    Several programs may get the same block: each stores the tokens of parts begin..end-1 of PARTS,
    and the one of part 0 also what belongs to the whole block.
    """
    T: tl.constexpr = L.block
    PAD: tl.constexpr = L.pad
    r = tl.arange(0, T)
    row = bh.to(tl.int64) * capacity + first % capacity
    block = row // T
    c = tl.arange(0, PAD)
    inside = c < L.chunks
    filled = filled_rows(x0, x1, x2, x3)
    if L.center == "block":
        mean_at = buf.means + block * L.dim + 4 * c
        good = filled & finite_rows(x0, x1, x2, x3)
        count = tl.sum(good.to(tl.int32), 0)
        good = good[:, None]
        m0 = half_mean(tree_sum(tl.where(good, x0, 0.0), L.block_steps), count)
        m1 = half_mean(tree_sum(tl.where(good, x1, 0.0), L.block_steps), count)
        m2 = half_mean(tree_sum(tl.where(good, x2, 0.0), L.block_steps), count)
        m3 = half_mean(tree_sum(tl.where(good, x3, 0.0), L.block_steps), count)
        tl.store(mean_at, m0, mask=inside)
        tl.store(mean_at + 1, m1, mask=inside)
        tl.store(mean_at + 2, m2, mask=inside)
        tl.store(mean_at + 3, m3, mask=inside)
        # Read back, rather than used as it is: the layout of the sum must not spread to the tile.
        tl.debug_barrier()
    if L.center != "none":
        m_row = block if L.center == "block" else bh.to(tl.int64)
        f0, f1, f2, f3 = load_vector4(buf.means + m_row * L.dim, L.chunks, PAD)
        x0, x1, x2, x3 = x0 - f0[None, :], x1 - f1[None, :], x2 - f2[None, :], x3 - f3[None, :]

    norms = chunk_norms(x0, x1, x2, x3)
    kept = tl.zeros([T, PAD], tl.int32)
    slot = kept
    exponent = tl.zeros([T], tl.int32)
    if L.flag != "none":
        found = outliers_of(norms, row_median(norms, L), multiplier, filled, L)
        is_kept, slot, used, left = fit_pool(found, norms, L.pool)
        kept = is_kept.to(tl.int32)
        if L.int8:
            amax = tl.maximum(
                tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))
            )
            amax = tl.max(tl.where(is_kept, amax, 0.0), 1)
            TILES: tl.constexpr = L.tiles
            for tile in tl.static_range(TILES):
                of_tile = shared_exponent(tl.max(tl.where(r // 32 == tile, amax, 0.0), 0))
                tl.store(buf.exponents + block * TILES + tile, of_tile.to(tl.int8))
                exponent = tl.where(r // 32 == tile, of_tile, exponent)
        if begin == 0:
            if left > 0:
                tl.atomic_add(buf.state + CAPPED, left.to(tl.int64))
            PPAD: tl.constexpr = L.pool_pad
            p = tl.arange(0, PPAD)
            unused = (p >= used) & (p < L.pool)
            if L.int8:
                pool = buf.pool.to(tl.pointer_type(tl.int32))
                tl.store(pool + block * L.pool + p, tl.zeros([PPAD], tl.int32), mask=unused)
            else:
                at = buf.pool + block * L.pool * 4 + p * 4
                for i in tl.static_range(4):
                    tl.store(at + i, tl.zeros([PPAD], buf.pool.dtype.element_ty), mask=unused)

    for part in range(begin, end):
        _store_part(
            buf, tab, x0, x1, x2, x3, norms, kept, slot, exponent, filled.to(tl.int32), head, row,
            block, part, PARTS, L,
        )  # fmt: skip


@triton.jit
def _store_part(
    buf, tab, x0, x1, x2, x3, norms, kept, slot, exponent, filled, head, row, block, part,
    PARTS: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Encodes and stores one part of the tokens of a block; kept, filled: 0 or 1."""
    COUNT: tl.constexpr = L.block // PARTS
    x0, x1 = _part_of(x0, part, PARTS), _part_of(x1, part, PARTS)
    x2, x3 = _part_of(x2, part, PARTS), _part_of(x3, part, PARTS)
    norms = _part_of(norms, part, PARTS)
    kept = _part_of(kept, part, PARTS) > 0
    filled = _part_of(filled, part, PARTS) > 0
    r = part * COUNT + tl.arange(0, COUNT)
    word = quantize(
        x0, x1, x2, x3, norms, kept, filled, tab, head, buf.scales + (row + r) * L.groups, r >= 0,
        L, 1 if PARTS == 1 else 4,
    )  # fmt: skip
    if L.flag != "none":
        slot = _part_of(slot, part, PARTS)
        word = tl.where(kept, outlier_word(slot, L), word)
        entry = block * L.pool + slot
        if L.int8:
            exponent = _part_of(exponent, part, PARTS)
            pool = buf.pool.to(tl.pointer_type(tl.int32))
            tl.store(pool + entry, pool_int8(x0, x1, x2, x3, exponent[:, None]), mask=kept)
        else:
            store_pool16(buf.pool + entry * 4, x0, x1, x2, x3, kept, L)
    store_words(buf.codes, row + r, r >= 0, word, L)


@triton.jit
def store_pool16(at, x0, x1, x2, x3, kept, L: tl.constexpr):
    limit: tl.constexpr = L.pool_limit
    dtype: tl.constexpr = at.dtype.element_ty
    tl.store(at, tl.clamp(x0, -limit, limit).to(dtype), mask=kept)
    tl.store(at + 1, tl.clamp(x1, -limit, limit).to(dtype), mask=kept)
    tl.store(at + 2, tl.clamp(x2, -limit, limit).to(dtype), mask=kept)
    tl.store(at + 3, tl.clamp(x3, -limit, limit).to(dtype), mask=kept)
