"""Reading a packed cache: one tile of slots from wherever each slot lives, and the dense tensor.

Where a slot lives is in `cache/buffers.py`; `cache/read.py` is the reference. Everything that
depends on the state vector is decided on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache.buffers import Buffers
from ..codec.spec import CacheSpec
from .common import Layout, decode, layout, load4, load_vector4, store4, tables

# Places in the state vector, as the kernels see them (`cache/buffers.py`).
START, PACKED, LENGTH, CAPPED, EXTENT = (tl.constexpr(i) for i in range(5))
ARRIVED = tl.constexpr(7)  # programs of the running launch that are through; 0 between launches


@triton.jit
def load_state(state):
    """(start, packed, length, extent), int64 scalars."""
    return (
        tl.load(state + START),
        tl.load(state + PACKED),
        tl.load(state + LENGTH),
        tl.load(state + EXTENT),
    )


@triton.jit
def read_tile(
    buf, tab, bh, head, capacity, first, packed, length, extent,
    L: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Slots first..first+T-1 of a batch row and head as stored, but without block means.

    first: int64, a multiple of T; T divides the block. packed, length, extent: of the state
    vector. EXACT: see `decode`. WHOLE: see `load4`.
    Returns four components `[T, PAD]` float32, and `centered` `[T]` bool: the rows that lack a mean.
    """
    PAD: tl.constexpr = L.pad
    r = tl.arange(0, T)
    slot = first + r
    ring = (slot >= packed) & (slot < length)
    exact = ring
    if L.sinks > 0:
        exact = ring | ((slot < L.sinks) & (slot < length))
    coded = ((slot < packed) | ((slot >= length) & (slot < extent))) & (exact == 0)
    x0 = tl.zeros([T, PAD], tl.float32)
    x1, x2, x3 = x0, x0, x0
    centered = coded
    if (first < packed) | ((first + T > length) & (first < extent)):
        row = first % capacity
        block = (bh.to(tl.int64) * capacity + row) // L.block
        x0, x1, x2, x3, filled = decode(
            buf, tab, head, bh.to(tl.int64) * capacity + row + r, coded, block,
            (row % L.block).to(tl.int32) + r, L, EXACT,
        )  # fmt: skip
        centered = coded & filled
    if L.ring > 0:
        if (first + T > packed) & (first < length):
            row = bh.to(tl.int64) * L.ring + first % L.ring
            y0, y1, y2, y3 = load4(buf.ring + row * L.dim, r, L.dim, ring, L.chunks, L.pad, WHOLE)
            here = ring[:, None]
            x0, x1 = tl.where(here, y0, x0), tl.where(here, y1, x1)
            x2, x3 = tl.where(here, y2, x2), tl.where(here, y3, x3)
    if L.sinks > 0:
        if (first < L.sinks) & (first < length):
            sink = (slot < L.sinks) & (slot < length)
            row = bh.to(tl.int64) * L.sinks + first
            y0, y1, y2, y3 = load4(buf.sinks + row * L.dim, r, L.dim, sink, L.chunks, L.pad, WHOLE)
            here = sink[:, None]
            x0, x1 = tl.where(here, y0, x0), tl.where(here, y1, x1)
            x2, x3 = tl.where(here, y2, x2), tl.where(here, y3, x3)
    return x0, x1, x2, x3, centered


@triton.jit
def load_mean(buf, bh, capacity, first, L: tl.constexpr):
    """The mean of the coded slots of a tile from slot `first` on: four components `[PAD]`."""
    row = bh.to(tl.int64)
    if L.center == "block":
        row = (row * capacity + first % capacity) // L.block
    return load_vector4(buf.means + row * L.dim, L.chunks, L.pad)


@triton.jit
def add_mean(x0, x1, x2, x3, m0, m1, m2, m3, rows):
    """Adds a mean to the rows where `rows` `[T]` is True."""
    here = rows[:, None]
    x0 = tl.where(here, x0 + m0[None, :], x0)
    x1 = tl.where(here, x1 + m1[None, :], x1)
    x2 = tl.where(here, x2 + m2[None, :], x2)
    x3 = tl.where(here, x3 + m3[None, :], x3)
    return x0, x1, x2, x3


@triton.jit
def read_values(
    buf, tab, bh, head, capacity, first, packed, length, extent,
    L: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`read_tile` with the means added."""
    x0, x1, x2, x3, centered = read_tile(
        buf, tab, bh, head, capacity, first, packed, length, extent, L, T, EXACT, True
    )
    if L.center != "none":
        if (first < packed) | (first + T > length):
            m0, m1, m2, m3 = load_mean(buf, bh, capacity, first, L)
            x0, x1, x2, x3 = add_mean(x0, x1, x2, x3, m0, m1, m2, m3, centered)
    return x0, x1, x2, x3


@triton.jit
def first_slot(positions, start, HAS_POSITIONS: tl.constexpr):
    """Logical slot (int64) of the first token of a write."""
    if HAS_POSITIONS:
        return tl.load(positions).to(tl.int64)
    else:
        return tl.zeros([], tl.int64) + start


@triton.jit
def overlay_tokens(
    x0, x1, x2, x3, tokens, strides, b, head, first, slot, n,
    L: tl.constexpr, T: tl.constexpr, WHOLE: tl.constexpr = True,
):  # fmt: skip
    """Puts tokens of this call (absolute slots slot..slot+n-1) over a tile from slot `first` on.

    Returns the components and `[T]` bool, the rows that were replaced.
    """
    index = first + tl.arange(0, T) - slot
    here = (index >= 0) & (index < n)
    if (first + T > slot) & (first < slot + n):
        base = tokens + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        y0, y1, y2, y3 = load4(base, index, strides[2], here, L.chunks, L.pad, WHOLE)
        x0, x1 = tl.where(here[:, None], y0, x0), tl.where(here[:, None], y1, x1)
        x2, x3 = tl.where(here[:, None], y2, x2), tl.where(here[:, None], y3, x3)
    return x0, x1, x2, x3, here


@triton.jit(do_not_specialize=["first", "length", "start", "n"])
def dequantize_kernel(
    buf, tab, tokens, token_strides, positions, origin, out,
    heads, capacity, first, length, start, n,
    L: tl.constexpr, T: tl.constexpr, FRESH: tl.constexpr, HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """One tile of slots of one batch row and head; grid `(tiles, B * H)`."""
    bh = tl.program_id(1)
    head = bh % heads
    old_start, packed, filled_to, extent = load_state(buf.state)
    start_slot = tl.load(origin)
    base = start_slot + first
    tile = (base // T + tl.program_id(0)) * T
    x0, x1, x2, x3 = read_values(
        buf, tab, bh, head, capacity, tile, packed, filled_to, extent, L, T, True
    )
    if FRESH:
        slot = start_slot + first_slot(positions, start, HAS_POSITIONS)
        x0, x1, x2, x3, replaced = overlay_tokens(
            x0, x1, x2, x3, tokens, token_strides, bh // heads, head, tile, slot, n, L, T
        )
    index = tile + tl.arange(0, T) - base
    store4(
        out + bh.to(tl.int64) * length * L.dim, index, L.dim,
        (index >= 0) & (index < length), x0, x1, x2, x3, L.chunks, L.pad,
    )  # fmt: skip


def token_arguments(tokens: torch.Tensor | None, stand_in: torch.Tensor):
    """(tensor, strides) of tokens `[B, H, n, D]` for a kernel."""
    if tokens is None:
        return stand_in, (0, 0, 0)
    if tokens.stride(-1) != 1:
        tokens = tokens.contiguous()
    return tokens, tokens.stride()[:3]


def tile_slots(L: Layout) -> int:
    """Slots a tile of the reading kernels covers: at most 64, fewer for large heads."""
    return min(L.block, 64 if L.pad <= 16 else 32)


def dequantize(
    spec: CacheSpec,
    buffers: Buffers,
    first: int,
    length: int,
    out: torch.Tensor,
    *,
    origin: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Logical slots first..first+length-1 into `out` `[B, H, length, D]` (contiguous, any float).

    Args:
        origin: int64 tensor whose first element counts as START; default: the state vector.
        tokens: `[B, H, n, D]` that stand over what is stored, at logical slots from
            `positions[0]` or `start` on.
    """
    batch, heads, capacity, _ = buffers.codes.shape
    L = layout(spec)
    tile = tile_slots(L)
    fresh, strides = token_arguments(tokens, buffers.state)
    grid = (triton.cdiv(length, tile) + 1, batch * heads)
    dequantize_kernel[grid](
        buffers, tables(spec, heads, out.device), fresh, strides,
        buffers.state if positions is None else positions,
        buffers.state if origin is None else origin, out,
        heads, capacity, first, length, start, 0 if tokens is None else tokens.shape[2],
        L=L, T=tile, FRESH=tokens is not None, HAS_POSITIONS=positions is not None,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out
