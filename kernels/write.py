"""Writing with a window: new tokens enter the 16-bit ring, blocks behind the window are packed.

Two launches serve keys and values at once: `pack_kernel` encodes the blocks that the write completes,
and `commit_kernel` then writes the ring, the sinks and the state, as a small plan tells it. All
decisions are taken on the device, from the state vector and the position; the launches depend on
shapes alone. A long write has a program for each block, a short one several for the same block: they
all find its mean, median and outliers, and search the nearest codewords of some tokens each.

A rewind first packs what the ring still holds. The reference is `_write_windowed` in
`hqmq_compile/cache/write.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

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
PLAN_SIZE = tl.constexpr(16)
PARTS = 8  # programs that share a block of a short write


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
    buf, tab, tokens, strides, positions, plan, heads, capacity, start, n, keep, limit, multiplier,
    L: tl.constexpr, PARTS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Packs this program's share of the blocks that the write completes, and plans the rest.

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
    part = tl.program_id(1) % PARTS
    for i in range(tl.program_id(1) // PARTS, to_pack + to_flush, tl.num_programs(1) // PARTS):
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
        # A block that also holds packed tokens is read from where it goes: one program does it all.
        shared = (flush == 0) & (block_first >= packed) & (slot <= length)
        begin = tl.where(shared, part, 0)
        parts = tl.where(shared, part + 1, tl.where(part == 0, PARTS, 0))
        if parts > begin:
            pack_block(
                buf, tab, x0, x1, x2, x3, bh, head, capacity, block_first, multiplier, begin, parts,
                PARTS, L,
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
def _commit(buf, tab, tokens, strides, plan, heads, capacity, L: tl.constexpr, T: tl.constexpr):
    """Writes this program's share of the tiles of ring and sinks; one program writes the state."""
    bh = tl.program_id(0)
    slot, count, end = tl.load(plan + SLOT), tl.load(plan + COUNT), tl.load(plan + END)
    kept, extent, new_packed = (
        tl.load(plan + KEPT), tl.load(plan + OLD_EXTENT), tl.load(plan + NEW_PACKED)
    )  # fmt: skip
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
    if (bh == 0) & (tl.program_id(1) == 0):
        commit_state(
            buf.state, tl.load(plan + NEW_START), new_packed, tl.load(plan + NEW_LENGTH),
            tl.load(plan + NEW_EXTENT),
        )  # fmt: skip


@triton.jit(do_not_specialize=["start", "n", "keep", "limit"])
def pack_kernel(
    buf, tab, tokens, strides, capacity, multiplier, buf2, tab2, tokens2, strides2, capacity2,
    multiplier2, positions, plan, heads, start, n, keep, limit,
    L: tl.constexpr, L2: tl.constexpr, PARTS: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    WAITED_FOR: tl.constexpr,
):  # fmt: skip
    """Packs what a write completes; grid `(B * H, blocks at once * PARTS, caches)`.

    L2: layout of the second cache, or None. WAITED_FOR: `commit_kernel` starts while this runs.
    """
    if WAITED_FOR:
        tl.extra.cuda.gdc_launch_dependents()
    if L2 is None or tl.program_id(2) == 0:
        _pack_and_plan(
            buf, tab, tokens, strides, positions, plan, heads, capacity, start, n, keep, limit,
            multiplier, L, PARTS, HAS_POSITIONS,
        )  # fmt: skip
    else:
        _pack_and_plan(
            buf2, tab2, tokens2, strides2, positions, plan + PLAN_SIZE, heads, capacity2, start, n,
            keep, limit, multiplier2, L2, PARTS, HAS_POSITIONS,
        )  # fmt: skip


@triton.jit
def commit_kernel(
    buf, tab, tokens, strides, capacity, multiplier, buf2, tab2, tokens2, strides2, capacity2,
    multiplier2, plan, heads,
    L: tl.constexpr, L2: tl.constexpr, T: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Writes ring, sinks and state; grid `(B * H, programs that share the tiles of T slots, caches)`."""
    if WAITS:
        tl.extra.cuda.gdc_wait()
    if L2 is None or tl.program_id(2) == 0:
        _commit(buf, tab, tokens, strides, plan, heads, capacity, L, T)
    else:
        _commit(buf2, tab2, tokens2, strides2, plan + PLAN_SIZE, heads, capacity2, L2, T)


class Cache(NamedTuple):
    """One cache of a write, and the tokens `[B, H, n, D]` that go there."""

    spec: CacheSpec
    buffers: Buffers
    tokens: torch.Tensor


@functools.cache
def _overlaps(device: torch.device) -> bool:
    """Whether a kernel may start while the one that it waits for still runs (PDL)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def write_windowed(
    caches: Sequence[Cache], positions: torch.Tensor | None, start: int, keep: int, limit: int
) -> torch.Tensor:
    """Write into one cache, or into two of the same batch, heads and number of tokens, in place.

    The tokens go to logical slots from `positions[0]` or `start` on. Returns the plan of the first
    cache, int64; its first element is START before the write.
    """
    batch, heads, n, _ = caches[0].tokens.shape
    device = caches[0].tokens.device
    plan = torch.empty(len(caches) * PLAN_SIZE.value, dtype=torch.int64, device=device)
    arguments, layouts = [], []
    for spec, buffers, tokens in (caches[0], caches[-1]):
        tokens, strides = token_arguments(tokens, buffers.state)
        arguments += [
            buffers, tables(spec, heads, device), tokens, strides, buffers.capacity,
            float(spec.med3x),
        ]  # fmt: skip
        layouts.append(layout(spec))
    options = {
        "L": layouts[0],
        "L2": layouts[1] if len(caches) == 2 else None,
        "enable_fp_fusion": False,
    }
    block = min(L.block for L in layouts)
    parts = min(PARTS, block) if n <= block else 1
    overlaps = _overlaps(device)
    pack_kernel[(batch * heads, max(1, n // block) * parts, len(caches))](
        *arguments, caches[0].buffers.state if positions is None else positions, plan, heads, start,
        n, keep, limit, PARTS=parts, HAS_POSITIONS=positions is not None, WAITED_FOR=overlaps,
        num_warps=8 if max(L.pad for L in layouts) <= 32 else 16, **options,
    )  # fmt: skip
    tile = 16 if n <= block else min(tile_slots(L) for L in layouts)
    tiles = min(triton.cdiv(n, tile), max(L.ring for L in layouts) // tile)
    commit_kernel[(batch * heads, tiles, len(caches))](
        *arguments, plan, heads, T=tile, WAITS=overlaps, num_warps=4, launch_pdl=overlaps, **options
    )
    return plan
