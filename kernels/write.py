"""Writing with a window: new tokens enter the 16-bit ring, blocks behind the window are packed.

Two launches, whatever happens: `pack_kernel` encodes every block that this write completes (and,
when the sequence is rewound, what the ring still holds); `commit_kernel` then writes the ring, the
sinks and the state. All decisions are taken on the device, from the state vector and the position;
the first launch leaves them in a small plan for the second, which overwrites the state.
The reference is `_write_windowed` in `hqmq_compile/cache/write.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache.buffers import Buffers
from ..codec.spec import CacheSpec
from .common import layout, load_vector4, store4, tables
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
from .read import (
    CAPPED,
    first_slot,
    load_state,
    overlay_tokens,
    read_values,
    tile_slots,
    token_arguments,
)

# The plan, int64: the state before, the state after, then what the call does.
OLD_START, OLD_LENGTH, OLD_EXTENT, SLOT, COUNT, NEW_START, NEW_PACKED, NEW_LENGTH, NEW_EXTENT, REWIND = (
    tl.constexpr(i) for i in range(10)
)  # fmt: skip
PLAN_SIZE = 16


@triton.jit
def accepted(logical, n, limit):
    """Whether the slots lie in the user's tensor. Nothing is written otherwise: a device cannot raise."""
    return (logical >= 0) & ((limit == 0) | (logical + n <= limit))


@triton.jit
def _pack_row_block(
    buf, tab, x0, x1, x2, x3, bh, head, capacity, first, multiplier, L: tl.constexpr
):
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


@triton.jit(do_not_specialize=["start", "n", "keep", "limit"])
def pack_kernel(
    buf, tab, tokens, strides, positions, plan, heads, capacity, start, n, keep, limit, multiplier,
    L: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Encodes the blocks that this write completes; grid `(B * H, programs that share the blocks)`."""
    bh = tl.program_id(0)
    head = bh % heads
    T: tl.constexpr = L.block
    old_start, packed, length, extent = load_state(buf.state)
    logical = first_slot(positions, start, HAS_POSITIONS)
    ok = accepted(logical, n, limit)
    count = tl.where(ok, n, 0).to(tl.int64)
    slot = tl.where(ok, old_start + logical, length)
    rewind = slot < packed
    kept_packed = tl.where(rewind, slot // T * T, packed)
    kept_length = tl.where(rewind, slot, length)
    new_length = tl.maximum(kept_length, slot + count)
    new_start = old_start
    if keep > 0:
        new_start = tl.maximum(old_start, new_length - keep)
    new_packed = tl.maximum(kept_packed, (new_length - L.window) // T * T)
    # What lives in the ring is packed first when the sequence is rewound, a part of a block as well.
    flush_stop = tl.where(rewind & (length > packed), (length + T - 1) // T * T, 0)
    new_extent = tl.maximum(tl.maximum(extent, new_length), flush_stop)
    if (bh == 0) & (tl.program_id(1) == 0):
        tl.store(plan + OLD_START, old_start)
        tl.store(plan + OLD_LENGTH, length)
        tl.store(plan + OLD_EXTENT, extent)
        tl.store(plan + SLOT, slot)
        tl.store(plan + COUNT, count)
        tl.store(plan + NEW_START, new_start)
        tl.store(plan + NEW_PACKED, new_packed)
        tl.store(plan + NEW_LENGTH, new_length)
        tl.store(plan + NEW_EXTENT, new_extent)
        tl.store(plan + REWIND, rewind.to(tl.int64))

    # Blocks that a sliding window has left behind are not worth packing, unless the attention of
    # this very call comes later and reads them. Nor is it worth flushing what is packed anew.
    short = slot + count - tl.minimum(slot, kept_length) <= L.window
    first = tl.maximum(kept_packed, tl.where(short, old_start, new_start) // T * T)
    to_pack = tl.maximum((new_packed - first) // T, 0).to(tl.int32)
    flush_first = tl.maximum(packed, new_packed)
    to_flush = tl.maximum((flush_stop - flush_first) // T, 0).to(tl.int32)
    for i in range(tl.program_id(1), to_pack + to_flush, tl.num_programs(1)):
        flush = i >= to_pack
        block_first = tl.where(flush, flush_first + (i - to_pack) * T, first + i * T)
        # Before the tokens come, the sequence ends where it is rewound to.
        ends = rewind & (flush == 0)
        x0, x1, x2, x3 = read_values(
            buf, tab, bh, head, capacity, block_first, tl.where(ends, slot, packed),
            tl.where(ends, slot, length), extent, L, T, True,
        )  # fmt: skip
        if flush == 0:  # what was packed before passed through the ring
            dtype: tl.constexpr = buf.ring.dtype.element_ty
            x0, x1 = x0.to(dtype).to(tl.float32), x1.to(dtype).to(tl.float32)
            x2, x3 = x2.to(dtype).to(tl.float32), x3.to(dtype).to(tl.float32)
            x0, x1, x2, x3, replaced = overlay_tokens(
                x0, x1, x2, x3, tokens, strides, bh // heads, head, block_first, slot, count, L, T
            )
        PAD: tl.constexpr = L.pad
        inside = (tl.arange(0, PAD) < L.chunks)[None, :]
        x0, x1 = tl.where(inside, x0, 0.0), tl.where(inside, x1, 0.0)
        x2, x3 = tl.where(inside, x2, 0.0), tl.where(inside, x3, 0.0)
        _pack_row_block(buf, tab, x0, x1, x2, x3, bh, head, capacity, block_first, multiplier, L)


@triton.jit(do_not_specialize=["n"])
def commit_kernel(
    buf, tab, tokens, strides, plan, heads, capacity, n,
    L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Writes ring, sinks and state; grid `(B * H, programs that share the tiles of T slots)`."""
    bh = tl.program_id(0)
    head = bh % heads
    length, extent = tl.load(plan + OLD_LENGTH), tl.load(plan + OLD_EXTENT)
    slot, count = tl.load(plan + SLOT), tl.load(plan + COUNT)
    rewind = tl.load(plan + REWIND) > 0
    new_packed = tl.load(plan + NEW_PACKED)
    stop = slot + count
    # A rewound block returns to the ring up to `slot`; a gap before `slot` keeps what was there.
    end = tl.where(rewind, slot, length)
    oldest = tl.where(rewind, slot // L.block * L.block, tl.minimum(slot, length))
    oldest = tl.maximum(oldest, new_packed)
    r = tl.arange(0, T)
    tile0 = oldest // T
    tiles = tl.where(stop > oldest, (stop + T - 1) // T - tile0, 0).to(tl.int32)
    for i in range(tl.program_id(1), tiles, tl.num_programs(1)):
        tile = (tile0 + i) * T
        x0, x1, x2, x3 = _incoming(
            buf,
            tab,
            tokens,
            strides,
            bh,
            head,
            heads,
            capacity,
            tile,
            slot,
            count,
            end,
            extent,
            L,
            T,
        )
        here = (tile + r >= oldest) & (tile + r < stop)
        row = bh.to(tl.int64) * L.ring + tile % L.ring
        store4(buf.ring + row * L.dim, r, L.dim, here, x0, x1, x2, x3, L.chunks, L.pad)
    if L.sinks > 0:
        oldest = tl.minimum(slot, end)
        stop = tl.minimum(stop, L.sinks)
        tile0 = oldest // T
        tiles = tl.where(stop > oldest, (stop + T - 1) // T - tile0, 0).to(tl.int32)
        for i in range(tl.program_id(1), tiles, tl.num_programs(1)):
            tile = (tile0 + i) * T
            x0, x1, x2, x3 = _incoming(
                buf, tab, tokens, strides, bh, head, heads, capacity, tile, slot, count, end, extent,
                L, T,
            )  # fmt: skip
            here = (tile + r >= oldest) & (tile + r < stop)
            row = bh.to(tl.int64) * L.sinks + tile
            store4(buf.sinks + row * L.dim, r, L.dim, here, x0, x1, x2, x3, L.chunks, L.pad)
    if (bh == 0) & (tl.program_id(1) == 0):
        tl.store(buf.state, tl.load(plan + NEW_START))
        tl.store(buf.state + 1, new_packed)
        tl.store(buf.state + 2, tl.load(plan + NEW_LENGTH))
        tl.store(buf.state + 4, tl.load(plan + NEW_EXTENT))


@triton.jit
def _incoming(
    buf, tab, tokens, strides, bh, head, heads, capacity, tile, slot, count, end, extent,
    L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """A tile of the tokens, or, before the first of them, of what stays: packed, nothing in the ring."""
    PAD: tl.constexpr = L.pad
    x0 = tl.zeros([T, PAD], tl.float32)
    x1, x2, x3 = x0, x0, x0
    if tile < slot:
        x0, x1, x2, x3 = read_values(
            buf, tab, bh, head, capacity, tile, end, end, extent, L, T, True
        )
    x0, x1, x2, x3, replaced = overlay_tokens(
        x0, x1, x2, x3, tokens, strides, bh // heads, head, tile, slot, count, L, T
    )
    return x0, x1, x2, x3


def write_windowed(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    start: int,
    keep: int,
    limit: int,
) -> torch.Tensor:
    """Write `tokens` `[B, H, n, D]` at logical slots from `positions[0]` or `start` on, in place.

    Returns the plan, int64; its first element is START before the write.
    """
    batch, heads, n, _ = tokens.shape
    L = layout(spec)
    plan = torch.empty(PLAN_SIZE, dtype=torch.int64, device=tokens.device)
    tokens, strides = token_arguments(tokens, buffers.state)
    table = tables(spec, heads, tokens.device)
    at = buffers.state if positions is None else positions
    pack_kernel[(batch * heads, max(1, n // spec.block))](
        buffers, table, tokens, strides, at, plan, heads, buffers.capacity,
        start, n, keep, limit, float(spec.med3x),
        L=L, HAS_POSITIONS=positions is not None, num_warps=8 if L.pad <= 32 else 16,
        enable_fp_fusion=False,
    )  # fmt: skip
    tile = tile_slots(L)
    commit_kernel[(batch * heads, min(triton.cdiv(n, tile), L.ring // tile))](
        buffers, table, tokens, strides, plan, heads, buffers.capacity, n,
        L=L, T=tile, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return plan
