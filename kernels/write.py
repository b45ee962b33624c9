"""Writing with a window: new tokens enter the 16-bit ring, blocks behind the window are packed.

All decisions are taken on the device, from the state vector and the position, and the number of
launches depends on n alone:

    n <= block     `step_kernel` does everything, one program a head
    n > block      `pack_kernel` encodes the completed blocks in parallel; then `commit_kernel` writes
                   the ring, the sinks and the state, as a small plan tells it

A rewind first packs what the ring still holds. The reference is `_write_windowed` in
`hqmq_compile/cache/write.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache.buffers import Buffers
from ..codec.spec import CacheSpec
from .common import layout, store4, tables
from .pack import pack_block
from .read import (
    ARRIVED,
    EXTENT,
    LENGTH,
    PACKED,
    START,
    first_slot,
    load_state,
    overlay_tokens,
    read_values,
    tile_slots,
    token_arguments,
)

# The plan, int64. Attention needs its first element; the rest is for `commit_kernel`.
OLD_START, SLOT, COUNT, KEPT, END, OLD_EXTENT, NEW_START, NEW_PACKED, NEW_LENGTH, NEW_EXTENT = (
    tl.constexpr(i) for i in range(10)
)
PLAN_SIZE = 16


@triton.jit
def accepted(logical, n, limit):
    """Whether the slots lie in the user's tensor. Nothing is written otherwise: a device cannot raise."""
    return (logical >= 0) & ((limit == 0) | (logical + n <= limit))


@triton.jit
def last_to_arrive(state):
    """Whether all other programs of this launch have come here before: they have read the state.

    The counter in the state vector is 0 again afterwards.
    """
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1)
    last = tl.atomic_add(state + ARRIVED, tl.full([], 1, tl.int64)) == programs - 1
    if last:
        tl.store(state + ARRIVED, tl.zeros([], tl.int64))
    return last


@triton.jit
def commit_state(state, start, packed, length, extent):
    tl.store(state + START, start)
    tl.store(state + PACKED, packed)
    tl.store(state + LENGTH, length)
    tl.store(state + EXTENT, extent)


@triton.jit
def _pack_and_plan(
    buf, tab, tokens, strides, positions, heads, capacity, start, n, keep, limit, multiplier,
    L: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Packs this program's share of the blocks that the write completes, and plans the rest.

    Returns old start, slot, count, kept, end, extent, and the new start, packed, length, extent.
    The tokens are `count` from `slot` on. What comes before them and stays, slots kept..slot-1, is
    read as if the sequence ended at `end` with all of it packed.
    """
    bh = tl.program_id(0)
    head = bh % heads
    T: tl.constexpr = L.block
    old_start, packed, length, extent = load_state(buf.state)
    logical = first_slot(positions, start, HAS_POSITIONS)
    ok = accepted(logical, n, limit)
    count = tl.where(ok, n, 0).to(tl.int64)
    slot = tl.where(ok, old_start + logical, length)
    rewind = slot < packed
    # A rewound block returns to the ring up to `slot`; a gap before `slot` keeps what was there.
    end = tl.where(rewind, slot, length)
    kept = tl.where(rewind, slot // T * T, tl.minimum(slot, length))
    kept_packed = tl.where(rewind, kept, packed)
    new_length = tl.maximum(end, slot + count)
    new_start = old_start
    if keep > 0:
        new_start = tl.maximum(old_start, new_length - keep)
    new_packed = tl.maximum(kept_packed, (new_length - L.window) // T * T)
    # What lives in the ring is packed first when the sequence is rewound, a part of a block as well.
    flush_stop = tl.where(rewind & (length > packed), (length + T - 1) // T * T, 0)
    new_extent = tl.maximum(tl.maximum(extent, new_length), flush_stop)

    # Blocks that a sliding window has left behind are not worth packing, unless the attention of
    # this very call comes later and reads them. Nor is it worth flushing what is packed anew.
    short = slot + count - tl.minimum(slot, end) <= L.window
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
        pack_block(buf, tab, x0, x1, x2, x3, bh, head, capacity, block_first, multiplier, L)
    return (
        old_start, slot, count, kept, end, extent, new_start, new_packed, new_length, new_extent
    )  # fmt: skip


@triton.jit
def _store_tokens(
    out, slots, buf, tab, tokens, strides, bh, heads, capacity, slot, count, end, extent, oldest, stop,
    L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Slots oldest..stop-1, of what stays and of the tokens, into `out` (ring or sinks) of `slots`."""
    PAD: tl.constexpr = L.pad
    r = tl.arange(0, T)
    tile0 = oldest // T
    tiles = tl.where(stop > oldest, (stop + T - 1) // T - tile0, 0).to(tl.int32)
    for i in range(tl.program_id(1), tiles, tl.num_programs(1)):
        tile = (tile0 + i) * T
        x0 = tl.zeros([T, PAD], tl.float32)
        x1, x2, x3 = x0, x0, x0
        if tile < slot:
            x0, x1, x2, x3 = read_values(
                buf, tab, bh, bh % heads, capacity, tile, end, end, extent, L, T, True
            )
        x0, x1, x2, x3, replaced = overlay_tokens(
            x0, x1, x2, x3, tokens, strides, bh // heads, bh % heads, tile, slot, count, L, T
        )
        here = (tile + r >= oldest) & (tile + r < stop)
        row = bh.to(tl.int64) * slots + tile % slots
        store4(out + row * L.dim, r, L.dim, here, x0, x1, x2, x3, L.chunks, PAD)


@triton.jit
def _store_recent(
    buf, tab, tokens, strides, heads, capacity, slot, count, kept, end, extent, new_packed,
    L: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Writes this program's share of the tiles of ring and sinks."""
    bh = tl.program_id(0)
    stop = slot + count
    _store_tokens(
        buf.ring, L.ring, buf, tab, tokens, strides, bh, heads, capacity, slot, count, end, extent,
        tl.maximum(kept, new_packed), stop, L, T,
    )  # fmt: skip
    if L.sinks > 0:
        _store_tokens(
            buf.sinks, L.sinks, buf, tab, tokens, strides, bh, heads, capacity, slot, count, end,
            extent, tl.minimum(slot, end), tl.minimum(stop, L.sinks), L, T,
        )  # fmt: skip


@triton.jit(do_not_specialize=["start", "n", "keep", "limit"])
def step_kernel(
    buf, tab, tokens, strides, positions, plan, heads, capacity, start, n, keep, limit, multiplier,
    L: tl.constexpr, T: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """The whole write of a few tokens; grid `(B * H,)`. The last program commits the state."""
    old_start, slot, count, kept, end, extent, new_start, new_packed, new_length, new_extent = (
        _pack_and_plan(
            buf, tab, tokens, strides, positions, heads, capacity, start, n, keep, limit,
            multiplier, L, HAS_POSITIONS,
        )
    )  # fmt: skip
    tl.debug_barrier()  # the blocks were read from the ring that is written now
    _store_recent(
        buf, tab, tokens, strides, heads, capacity, slot, count, kept, end, extent, new_packed, L, T
    )
    if last_to_arrive(buf.state):
        tl.store(plan + OLD_START, old_start)
        commit_state(buf.state, new_start, new_packed, new_length, new_extent)


@triton.jit(do_not_specialize=["start", "n", "keep", "limit"])
def pack_kernel(
    buf, tab, tokens, strides, positions, plan, heads, capacity, start, n, keep, limit, multiplier,
    L: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Packs the blocks that a write completes; grid `(B * H, programs that share the blocks)`."""
    old_start, slot, count, kept, end, extent, new_start, new_packed, new_length, new_extent = (
        _pack_and_plan(
            buf, tab, tokens, strides, positions, heads, capacity, start, n, keep, limit,
            multiplier, L, HAS_POSITIONS,
        )
    )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(plan + OLD_START, old_start)
        tl.store(plan + SLOT, slot)
        tl.store(plan + COUNT, count)
        tl.store(plan + KEPT, kept)
        tl.store(plan + END, end)
        tl.store(plan + OLD_EXTENT, extent)
        tl.store(plan + NEW_START, new_start)
        tl.store(plan + NEW_PACKED, new_packed)
        tl.store(plan + NEW_LENGTH, new_length)
        tl.store(plan + NEW_EXTENT, new_extent)


@triton.jit
def commit_kernel(
    buf, tab, tokens, strides, plan, heads, capacity, L: tl.constexpr, T: tl.constexpr
):
    """Writes ring, sinks and state; grid `(B * H, programs that share the tiles of T slots)`."""
    new_packed = tl.load(plan + NEW_PACKED)
    _store_recent(
        buf, tab, tokens, strides, heads, capacity, tl.load(plan + SLOT), tl.load(plan + COUNT),
        tl.load(plan + KEPT), tl.load(plan + END), tl.load(plan + OLD_EXTENT), new_packed, L, T,
    )  # fmt: skip
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        commit_state(
            buf.state, tl.load(plan + NEW_START), new_packed, tl.load(plan + NEW_LENGTH),
            tl.load(plan + NEW_EXTENT),
        )  # fmt: skip


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
    arguments = (
        buffers, table, tokens, strides, buffers.state if positions is None else positions, plan,
        heads, buffers.capacity, start, n, keep, limit, float(spec.med3x),
    )  # fmt: skip
    options = {
        "L": L,
        "HAS_POSITIONS": positions is not None,
        "num_warps": 8 if L.pad <= 32 else 16,
        "enable_fp_fusion": False,
    }
    if n <= spec.block:
        step_kernel[(batch * heads,)](*arguments, T=16, **options)
        return plan
    pack_kernel[(batch * heads, n // spec.block)](*arguments, **options)
    tile = tile_slots(L)
    commit_kernel[(batch * heads, min(triton.cdiv(n, tile), L.ring // tile))](
        buffers, table, tokens, strides, plan, heads, buffers.capacity,
        L=L, T=tile, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return plan
