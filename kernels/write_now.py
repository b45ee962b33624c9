"""Writing without a window: every token is encoded as it arrives, against a frozen mean.

One launch, decided on the device as in `write.py`, with one program for every block that the tokens
touch. Outliers take free slots in the pool of their block, so the other tokens of the block stay as
they are.
The reference is `hqmq_compile/cache/write_now.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..cache.buffers import LENGTH, Buffers
from ..cache.write_now import _batch_median
from ..codec.codec import first_mean
from ..codec.spec import CacheSpec
from .common import Layout, layout, load4, load_vector4, load_words, outlier_mask, store4, tables
from .encode import (
    chunk_norms,
    filled_rows,
    finite_rows,
    fit_pool,
    outlier_word,
    outliers_of,
    quantize,
    row_median,
    store_words,
)
from .pack import store_pool16
from .read import CAPPED, first_slot, load_state, token_arguments
from .write import OLD_START, PLAN_SIZE, accepted, commit_state, last_to_arrive

NO_MEDIAN = (0, 0, 0)


@triton.jit
def _free_slots(buf, row, block_slot, low, high, extent, L: tl.constexpr):
    """Number of free pool slots below each one, and in all, for the tokens at rows low..high-1.

    row: int64, first row of the block; block_slot: int64, its first slot. A slot is taken if a token
    of the block outside low..high-1 uses it. Returns `[pool_pad]` inclusive counts, and the total.
    """
    T: tl.constexpr = L.block
    PAD: tl.constexpr = L.pad
    PPAD: tl.constexpr = L.pool_pad
    r = tl.arange(0, T)
    # Rows beyond the extent were never written, or cropped.
    others = ((r < low) | (r >= high)) & (block_slot + r < extent)
    word = load_words(buf.codes, row + r, others, L)
    filled = tl.load(buf.scales + (row + r) * L.groups, mask=others, other=0) != 0
    used = outlier_mask(word, filled & others, L)
    slot = (word >> L.radius_bits) & ((1 << L.index_bits) - 1)
    slot = tl.where(used, tl.minimum(slot, L.pool), L.pool)  # the bin of those that use none
    taken = tl.histogram(tl.reshape(slot, [T * PAD]), PPAD)
    p = tl.arange(0, PPAD)
    free = ((taken == 0) & (p < L.pool)).to(tl.int32)
    return tl.cumsum(free, 0), tl.sum(free, 0)


@triton.jit
def _nth_free(counts, order, N: tl.constexpr, L: tl.constexpr):
    """The slot of the order-th free one, by bisection on the inclusive counts; `[N]` int32."""
    PPAD: tl.constexpr = L.pool_pad
    STEPS: tl.constexpr = L.pool_steps
    slot = tl.zeros([N], tl.int32)  # how many slots have a count of at most `order`
    for step in tl.static_range(STEPS):
        probe = slot + ((PPAD // 2) >> step)
        before = tl.gather(counts, probe - 1, 0)
        slot = tl.where(before <= order, probe, slot)
    return slot


@triton.jit(do_not_specialize=["start", "n", "keep", "limit"])
def encode_kernel(
    buf, tab, tokens, strides, positions, median, median_strides, plan, heads, capacity, start, n,
    keep, limit, multiplier,
    L: tl.constexpr, T: tl.constexpr, AT_ONCE: tl.constexpr, HAS_POSITIONS: tl.constexpr,
    HAS_MEDIAN: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """Encodes the tokens of one block, T at most; grid `(B * H, blocks that n tokens can touch)`.

    SINGLE: n is 1, and the mean of a first write is the token itself.
    """
    bh = tl.program_id(0)
    b, head = bh // heads, bh % heads
    B: tl.constexpr = L.block
    PAD: tl.constexpr = L.pad
    old_start, packed, length, extent = load_state(buf.state)
    logical = first_slot(positions, start, HAS_POSITIONS)
    ok = accepted(logical, n, limit)
    count = tl.where(ok, n, 0).to(tl.int64)
    slot = tl.where(ok, old_start + logical, length)
    stop = slot + count
    new_length = tl.maximum(length, stop)
    new_start = old_start
    if keep > 0:
        new_start = tl.maximum(old_start, new_length - keep)
    # Tokens in blocks that leave the window with this very call are not encoded.
    begin = tl.maximum(slot, new_start // B * B)
    block_slot = (begin // B + tl.program_id(1)) * B
    low = tl.maximum(begin - block_slot, 0).to(tl.int32)
    high = tl.minimum(stop - block_slot, B).to(tl.int32)
    if high > low:
        r = tl.arange(0, T)
        live = r < high - low
        token = (block_slot + low - slot).to(tl.int32) + r
        base = tokens + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
        x0, x1, x2, x3 = load4(base, token.to(tl.int64), strides[2], live, L.chunks, PAD)
        filled = filled_rows(x0, x1, x2, x3)
        if L.center == "first":
            mean_at = buf.means + bh.to(tl.int64) * L.dim
            f0, f1, f2, f3 = load_vector4(mean_at, L.chunks, PAD)
            if SINGLE:
                if length == 0:
                    good = (filled & finite_rows(x0, x1, x2, x3))[:, None]
                    f0, f1 = _half(x0, good), _half(x1, good)
                    f2, f3 = _half(x2, good), _half(x3, good)
                    at = mean_at + 4 * tl.arange(0, PAD)
                    inside = tl.arange(0, PAD) < L.chunks
                    tl.store(at, f0.to(tl.float16), mask=inside)
                    tl.store(at + 1, f1.to(tl.float16), mask=inside)
                    tl.store(at + 2, f2.to(tl.float16), mask=inside)
                    tl.store(at + 3, f3.to(tl.float16), mask=inside)
            x0, x1, x2, x3 = x0 - f0[None, :], x1 - f1[None, :], x2 - f2[None, :], x3 - f3[None, :]
        norms = chunk_norms(x0, x1, x2, x3)
        row = bh.to(tl.int64) * capacity + block_slot % capacity
        rows = row + low + r
        kept = tl.zeros([T, PAD], tl.int1)
        if L.flag != "none":
            if HAS_MEDIAN:
                at = median + b * median_strides[0] + head * median_strides[1]
                middle = tl.load(at + token * median_strides[2], mask=live, other=0.0)
            else:
                middle = row_median(norms, L)
            found = outliers_of(norms, middle, multiplier, filled & live, L)
            kept = found
            if tl.max(tl.max(found.to(tl.int32), 1), 0) > 0:
                counts, room = _free_slots(buf, row, block_slot, low, high, extent, L)
                kept, order, used, left = fit_pool(found, norms, room)
                if left > 0:
                    tl.atomic_add(buf.state + CAPPED, left.to(tl.int64))
                place = _nth_free(counts, tl.reshape(order, [T * PAD]), T * PAD, L)
                place = tl.reshape(place, [T, PAD])
                entry = row // B * L.pool + place
                store_pool16(buf.pool + entry * 4, x0, x1, x2, x3, kept, L)
            else:
                place = tl.zeros([T, PAD], tl.int32)
        word = quantize(
            x0, x1, x2, x3, norms, kept, filled, tab, head, buf.scales + rows * L.groups, live,
            L, AT_ONCE,
        )  # fmt: skip
        if L.flag != "none":
            word = tl.where(kept, outlier_word(place, L), word)
        store_words(buf.codes, rows, live, word, L)
    if L.sinks > 0:
        if tl.program_id(1) == 0:
            _store_sinks(buf, tokens, strides, b, head, bh, slot, tl.minimum(stop, L.sinks), L)
    if last_to_arrive(buf.state):
        tl.store(plan + OLD_START, old_start)
        commit_state(buf.state, new_start, new_length, new_length, tl.maximum(extent, stop))


@triton.jit
def _store_sinks(buf, tokens, strides, b, head, bh, slot, stop, L: tl.constexpr):
    T: tl.constexpr = 16
    base = tokens + b.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    out = buf.sinks + bh.to(tl.int64) * (L.sinks * L.dim)
    for i in range(slot, stop, T):
        at = i + tl.arange(0, T).to(tl.int64)
        live = at < stop
        x0, x1, x2, x3 = load4(base, at - slot, strides[2], live, L.chunks, L.pad)
        store4(out, at, L.dim, live, x0, x1, x2, x3, L.chunks, L.pad)


@triton.jit
def _half(x, good):
    """The float16 mean of the only row of `[1, PAD]`, as float32."""
    mean = tl.sum(tl.where(good, x, 0.0), 0)
    return tl.clamp(mean, -65504.0, 65504.0).to(tl.float16).to(tl.float32)


def _median_argument(spec, buffers, tokens, median):
    """(tensor, strides over [B, H, n]) of the Med3x median, or None to compute it per token."""
    if not spec.med3x:
        return None, NO_MEDIAN
    if median is None:
        if spec.med3x_scope == "token":
            return None, NO_MEDIAN
        median = _batch_median(spec, buffers, tokens)
    if median.dim() == 1:
        median = median.view(1, -1, 1, 1)
    median = median.float().expand(*tokens.shape[:3], 1)
    return median, median.stride()[:3]


def _shape_of_encode(L: Layout, n: int) -> tuple[int, int, int]:
    """(tokens a program takes, secondary codewords tried at once, warps)."""
    rows = min(triton.next_power_of_2(n), L.block)
    chunks = rows * L.pad
    at_once = max(1, min(64, 2048 // chunks))
    return rows, at_once, 4 if chunks <= 512 else 8 if chunks <= 2048 else 16


def write_now(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    positions: torch.Tensor | None,
    start: int,
    keep: int,
    limit: int,
    median: torch.Tensor | None,
) -> torch.Tensor:
    """Write `tokens` `[B, H, n, D]` at logical slots from `positions[0]` or `start` on, in place.

    Returns the plan, int64; its first element is START before the write.
    """
    batch, heads, n, _ = tokens.shape
    L = layout(spec)
    if spec.center == "first" and n > 1:  # frozen by the first write
        fresh = buffers.state[LENGTH] == 0
        buffers.means.copy_(torch.where(fresh, first_mean(tokens), buffers.means))
    median, median_strides = _median_argument(spec, buffers, tokens, median)
    plan = torch.empty(PLAN_SIZE.value, dtype=torch.int64, device=tokens.device)
    tokens, strides = token_arguments(tokens, buffers.state)
    rows, at_once, warps = _shape_of_encode(L, n)
    encode_kernel[(batch * heads, triton.cdiv(n - 1, spec.block) + 1)](
        buffers, tables(spec, heads, tokens.device), tokens, strides,
        buffers.state if positions is None else positions,
        buffers.state if median is None else median, median_strides, plan,
        heads, buffers.capacity, start, n, keep, limit, float(spec.med3x),
        L=L, T=rows, AT_ONCE=at_once, HAS_POSITIONS=positions is not None,
        HAS_MEDIAN=median is not None, SINGLE=n == 1, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return plan
