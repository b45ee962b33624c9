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
def pack_block(buf, tab, x0, x1, x2, x3, bh, head, capacity, first, multiplier, L: tl.constexpr):
    """Encodes a whole block of tokens, given as components `[block, PAD]`, into its place."""
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
    kept = tl.zeros([T, PAD], tl.int1)
    if L.flag != "none":
        found = outliers_of(norms, row_median(norms, L), multiplier, filled, L)
        kept, slot, used, left = fit_pool(found, norms, L.pool)
        if left > 0:
            tl.atomic_add(buf.state + CAPPED, left.to(tl.int64))
    word = quantize(
        x0, x1, x2, x3, norms, kept, filled, tab, head, buf.scales + (row + r) * L.groups, r >= 0,
        L, 1,
    )  # fmt: skip
    if L.flag != "none":
        word = tl.where(kept, outlier_word(slot, L), word)
        entry = block * L.pool + slot
        PPAD: tl.constexpr = L.pool_pad
        p = tl.arange(0, PPAD)
        unused = (p >= used) & (p < L.pool)
        if L.int8:
            amax = tl.maximum(
                tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))
            )
            amax = tl.max(tl.where(kept, amax, 0.0), 1)
            exponent = tl.zeros([T], tl.int32)
            TILES: tl.constexpr = L.tiles
            for tile in tl.static_range(TILES):
                of_tile = shared_exponent(tl.max(tl.where(r // 32 == tile, amax, 0.0), 0))
                tl.store(buf.exponents + block * TILES + tile, of_tile.to(tl.int8))
                exponent = tl.where(r // 32 == tile, of_tile, exponent)
            pool = buf.pool.to(tl.pointer_type(tl.int32))
            tl.store(pool + block * L.pool + p, tl.zeros([PPAD], tl.int32), mask=unused)
            tl.store(pool + entry, pool_int8(x0, x1, x2, x3, exponent[:, None]), mask=kept)
        else:
            at = buf.pool + block * L.pool * 4 + p * 4
            for i in tl.static_range(4):
                tl.store(at + i, tl.zeros([PPAD], buf.pool.dtype.element_ty), mask=unused)
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
