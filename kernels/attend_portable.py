"""Decode attention over packed caches, in portable Triton: split-KV, then a reduction.

A program takes one KV head, up to `ROWS` query rows (query tokens of its query heads), and one in
`splits` tiles of slots. It unpacks a tile into registers and goes on as flash attention, in float32.
Block means stay out of the tile: the score of a mean is one dot product for a whole block.
The reference is `hqmq_compile/cache/attend.py`; the fast kernel for Hopper is `attend.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache.buffers import Buffers
from ..codec.spec import CacheSpec
from .common import layout, load4, store4, tables
from .read import (
    add_mean,
    first_slot,
    load_mean,
    load_state,
    overlay_tokens,
    read_tile,
    tile_slots,
    token_arguments,
)

LOG2E = tl.constexpr(1.4426950408889634)
NO_MASK, BOOL_MASK, ADDED_MASK = (tl.constexpr(i) for i in range(3))


@triton.jit
def _dot4(a0, a1, a2, a3, b0, b1, b2, b3, PRECISION: tl.constexpr):
    """Sum over components of a_i · b_i^T."""
    s = tl.dot(a0, tl.trans(b0), input_precision=PRECISION)
    s = tl.dot(a1, tl.trans(b1), s, input_precision=PRECISION)
    s = tl.dot(a2, tl.trans(b2), s, input_precision=PRECISION)
    return tl.dot(a3, tl.trans(b3), s, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit(
    do_not_specialize=["first", "length", "start", "n", "mask_batch", "mask_head", "mask_row"]
)
def attend_kernel(
    query, query_strides, key, value, key_tab, value_tab, key_tokens, key_strides,
    value_tokens, value_strides, positions, origin, mask, mask_batch, mask_head, mask_row,
    mask_column, part_acc, part_top, part_sum, heads, group, n, key_capacity, value_capacity,
    first, length, start, scale, softcap,
    K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, ROWS: tl.constexpr, MASK: tl.constexpr,
    CAUSAL: tl.constexpr, SOFTCAP: tl.constexpr, FRESH: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid `(splits, B * H, row tiles)`; partial results go to `[splits, B * Hq * n, ...]`."""
    bh = tl.program_id(1)
    b = bh // heads
    head = bh % heads
    rows = group * n
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    in_rows = row < rows
    token = row % n
    query_head = head * group + row // n
    q_at = query + b.to(tl.int64) * query_strides[0]
    q_offset = query_head.to(tl.int64) * query_strides[1] + token.to(tl.int64) * query_strides[2]
    q0, q1, q2, q3 = load4(q_at, q_offset, 1, in_rows, K.chunks, K.pad)
    start_slot = tl.load(origin)
    base = start_slot + first
    fresh_slot = start_slot
    if FRESH:
        fresh_slot += first_slot(positions, start, HAS_POSITIONS)
    k_start, k_packed, k_length, k_extent = load_state(key.state)
    v_start, v_packed, v_length, v_extent = load_state(value.state)

    seen = tl.zeros([], tl.int32) + length
    if CAUSAL:
        seen = tl.minimum(seen, n)
    tile0 = base // T
    tiles = ((base + seen - 1) // T - tile0 + 1).to(tl.int32)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    VPAD: tl.constexpr = V.pad
    acc0 = tl.zeros([ROWS, VPAD], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    r = tl.arange(0, T)
    m_at = mask + b.to(tl.int64) * mask_batch
    m_offset = query_head.to(tl.int64) * mask_head + token.to(tl.int64) * mask_row
    # One in `splits` tiles, so that what a mask leaves visible is shared evenly.
    for i in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = (tile0 + i) * T
        index = tile + r - base
        visible = in_rows[:, None] & ((index >= 0) & (index < seen))[None, :]
        if CAUSAL:
            visible = visible & (index[None, :] <= token[:, None])
        bias = tl.zeros([ROWS, T], tl.float32)
        if MASK != NO_MASK:
            at = m_at + m_offset[:, None] + index[None, :] * mask_column
            if MASK == BOOL_MASK:
                visible = visible & (tl.load(at, mask=visible, other=0) != 0)
            else:
                bias = tl.load(at, mask=visible, other=float("-inf")).to(tl.float32)
                visible = visible & (bias > float("-inf"))
        if tl.max(visible.to(tl.int32)) > 0:
            k0, k1, k2, k3, centered = read_tile(
                key, key_tab, bh, head, key_capacity, tile, k_packed, k_length, k_extent,
                K, T, False, False,
            )  # fmt: skip
            if FRESH:
                k0, k1, k2, k3, replaced = overlay_tokens(
                    k0, k1, k2, k3, key_tokens, key_strides, b, head, tile, fresh_slot, n,
                    K, T, False,
                )  # fmt: skip
                centered = centered & (replaced == 0)
            score = _dot4(q0, q1, q2, q3, k0, k1, k2, k3, PRECISION)
            if K.center != "none":
                if (tile < k_packed) | (tile + T > k_length):
                    m0, m1, m2, m3 = load_mean(key, bh, key_capacity, tile, K)
                    of_mean = q0 * m0[None, :] + q1 * m1[None, :]
                    of_mean += q2 * m2[None, :] + q3 * m3[None, :]
                    of_mean = tl.sum(of_mean, 1)
                    score += tl.where(centered[None, :], of_mean[:, None], 0.0)
            score *= scale
            if SOFTCAP:
                score = _tanh(score / softcap) * softcap
            score = tl.where(visible, score + bias, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2((score - safe[:, None]) * LOG2E)
            shrink = tl.exp2((top - safe) * LOG2E)
            top = higher
            total = total * shrink + tl.sum(weight, 1)

            v0, v1, v2, v3, centered = read_tile(
                value, value_tab, bh, head, value_capacity, tile, v_packed, v_length, v_extent,
                V, T, False, False,
            )  # fmt: skip
            if V.center != "none":
                if (tile < v_packed) | (tile + T > v_length):
                    m0, m1, m2, m3 = load_mean(value, bh, value_capacity, tile, V)
                    v0, v1, v2, v3 = add_mean(v0, v1, v2, v3, m0, m1, m2, m3, centered)
            if FRESH:
                v0, v1, v2, v3, replaced = overlay_tokens(
                    v0, v1, v2, v3, value_tokens, value_strides, b, head, tile, fresh_slot, n,
                    V, T, False,
                )  # fmt: skip
            acc0 = tl.dot(weight, v0, acc0 * shrink[:, None], input_precision=PRECISION)
            acc1 = tl.dot(weight, v1, acc1 * shrink[:, None], input_precision=PRECISION)
            acc2 = tl.dot(weight, v2, acc2 * shrink[:, None], input_precision=PRECISION)
            acc3 = tl.dot(weight, v3, acc3 * shrink[:, None], input_precision=PRECISION)

    all_rows = tl.num_programs(1) * rows
    out = tl.program_id(0).to(tl.int64) * all_rows + bh * rows + row
    tl.store(part_top + out, top, mask=in_rows)
    tl.store(part_sum + out, total, mask=in_rows)
    store4(part_acc, out, V.dim, in_rows, acc0, acc1, acc2, acc3, V.chunks, V.pad)


@triton.jit(do_not_specialize=["splits", "rows_per_head"])
def reduce_kernel(
    part_acc, part_top, part_sum, sinks, out, splits, query_heads, rows_per_head,
    DIM: tl.constexpr, PAD: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the splits of one query row; grid `(B * Hq * n,)`. Sinks add weight, but no value."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0)
    s = tl.arange(0, SPLITS)
    here = s < splits
    at = s * rows.to(tl.int64) + row
    tops = tl.load(part_top + at, mask=here, other=float("-inf"))
    sums = tl.load(part_sum + at, mask=here, other=0.0)
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + row // rows_per_head % query_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((tops - safe) * LOG2E)
    total = tl.sum(sums * weights, 0)
    if HAS_SINKS:
        total += tl.exp2((sink - safe) * LOG2E)
    d = tl.arange(0, PAD)
    acc = tl.load(
        part_acc + at[:, None] * DIM + d[None, :],
        mask=here[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(acc * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


def _splits(programs: int, tiles: int, processors: int) -> int:
    """Shares of the tiles, so that the programs fill the device about twice over."""
    return max(1, min(tiles, 2 * processors // programs, 128))


def attend(
    query: torch.Tensor,
    key_spec: CacheSpec,
    key: Buffers,
    value_spec: CacheSpec,
    value: Buffers,
    first: int,
    length: int,
    *,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float,
    sinks: torch.Tensor | None,
    origin: torch.Tensor,
    processors: int,
    tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    positions: torch.Tensor | None = None,
    start: int = 0,
) -> torch.Tensor:
    """Attention of few query tokens `[B, Hq, n, D]`, as `launch.attend`.

    Args:
        mask: 4 dimensions, expanded to `[B, Hq, n, length]` (any strides), bool or additive.
        origin: int64 tensor whose first element counts as START.
        processors: of the device.
        tokens: keys and values of this call `[B, H, n, D]`, which stand over what is stored at
            logical slots from `positions[0]` or `start` on.
    """
    batch, query_heads, n, _ = query.shape
    heads = key.codes.shape[1]
    group = query_heads // heads
    K, V = layout(key_spec), layout(value_spec)
    tile = min(tile_slots(K), tile_slots(V))
    rows_at_once = min(max(16, triton.next_power_of_2(group * n)), 32 if K.pad <= 32 else 16)
    row_tiles = triton.cdiv(group * n, rows_at_once)
    visible = min(length, n) if causal else length
    tiles = triton.cdiv(visible, tile) + 1
    splits = _splits(batch * heads * row_tiles, tiles, processors)
    if query.stride(-1) != 1:
        query = query.contiguous()
    rows = batch * query_heads * n
    part_acc = query.new_empty(splits, rows, V.dim, dtype=torch.float32)
    part = query.new_empty(2, splits, rows, dtype=torch.float32)
    out = query.new_empty(batch, query_heads, n, V.dim)
    kind, strides = 0, (0, 0, 0, 0)
    if mask is not None:
        kind, strides = (1 if mask.dtype == torch.bool else 2), mask.stride()
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    fresh_key, key_strides = token_arguments(tokens and tokens[0], key.state)
    fresh_value, value_strides = token_arguments(tokens and tokens[1], key.state)
    # Half-precision queries are exact in tf32, and so nearly are the codes.
    precision = "tf32x3" if query.dtype == torch.float32 else "tf32"
    attend_kernel[(splits, batch * heads, row_tiles)](
        query, query.stride()[:3], key, value,
        tables(key_spec, heads, query.device), tables(value_spec, heads, query.device),
        fresh_key, key_strides, fresh_value, value_strides,
        key.state if positions is None else positions, origin,
        key.state if mask is None else mask, *strides, part_acc, part[0], part[1],
        heads, group, n, key.capacity, value.capacity, first, length, start, scale, softcap,
        K=K, V=V, T=tile, ROWS=rows_at_once, MASK=kind, CAUSAL=causal, SOFTCAP=softcap > 0,
        FRESH=tokens is not None, HAS_POSITIONS=positions is not None, PRECISION=precision,
        num_warps=4,
    )  # fmt: skip
    reduce_kernel[(rows,)](
        part_acc, part[0], part[1], key.state if sinks is None else sinks, out,
        splits, query_heads, n, DIM=V.dim, PAD=triton.next_power_of_2(V.dim),
        SPLITS=triton.next_power_of_2(splits), HAS_SINKS=sinks is not None, num_warps=4,
    )  # fmt: skip
    return out
