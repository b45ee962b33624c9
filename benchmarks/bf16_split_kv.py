"""Decode attention on a 16-bit KV cache, of our own: the baseline of every speed-up that we quote.

A plain split-KV ("flash decoding") kernel in Triton: each program reads the keys and values of one KV
head and one span of slots once for all query heads of the group, and a second kernel merges. It is
there so that no library's choice of kernel flatters us: `plans` lists what a benchmark may tune over,
`default_plan` is the fixed heuristic that needs no tuning. `hqmq_bench::bf16_split_kv` is the same as
a custom op, for whole models under `torch.compile`.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl

NOTHING = tl.constexpr(-1.0e30)  # a score below all others, without the NaN of inf - inf
LOG2E = 1.4426950408889634


# -- kernels -------------------------------------------------------------------------------------
@triton.jit
def _attend_tile(
    q, acc, top, total, keys, values, mask, mask_stride, first, stop, scale,
    DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Online softmax over slots first..first+TILE-1; with TAIL, only those below `stop`."""
    slot = first + tl.arange(0, TILE)
    at = slot[:, None] * DIM + tl.arange(0, DIM)[None, :]
    inside = slot < stop
    if TAIL:
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
    else:
        k = tl.load(keys + at)
    score = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        inside = inside & (tl.load(mask + slot * mask_stride, mask=inside, other=0) != 0)
    if MASKED or TAIL:
        score = tl.where(inside[None, :], score, float("-inf"))
    higher = tl.maximum(top, tl.max(score, 1))
    shrink = tl.exp2(top - higher)
    weight = tl.exp2(score - higher[:, None])
    total = total * shrink + tl.sum(weight, 1)
    if TAIL:
        v = tl.load(values + at, mask=(slot < stop)[:, None], other=0.0)
    else:
        v = tl.load(values + at)
    acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])
    return acc, higher, total


@triton.jit(do_not_specialize=["length", "span", "mask_batch", "splits"])
def split_kernel(
    query, keys, values, mask, mask_batch, mask_stride, part_acc, part_top, part_sum,
    heads, group, capacity, length, span, scale,
    DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One KV head, `span` slots (a multiple of TILE); grid `(splits, B * H)`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    split, bh = tl.program_id(0), tl.program_id(1)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    real = row < group
    q = tl.load(
        query + (bh * group + row)[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0
    )
    base = bh.to(tl.int64) * capacity * DIM
    keys += base
    values += base
    mask += (bh // heads).to(tl.int64) * mask_batch
    top = tl.full([ROWS], NOTHING, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    begin = split * span
    stop = tl.minimum(begin + span, length)
    whole = begin + tl.maximum(stop - begin, 0) // TILE * TILE
    for first in tl.range(begin, whole, TILE, num_stages=STAGES):
        acc, top, total = _attend_tile(
            q, acc, top, total, keys, values, mask, mask_stride, first, stop, scale,
            DIM, TILE, MASKED, False,
        )  # fmt: skip
    if whole < stop:
        acc, top, total = _attend_tile(
            q, acc, top, total, keys, values, mask, mask_stride, whole, stop, scale,
            DIM, TILE, MASKED, True,
        )  # fmt: skip
    out = split * tl.num_programs(1) * group + bh * group + row
    tl.store(part_top + out, top, mask=real)
    tl.store(part_sum + out, total, mask=real)
    tl.store(part_acc + out[:, None].to(tl.int64) * DIM + d[None, :], acc, mask=real[:, None])


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_acc, part_top, part_sum, out, splits,
    DIM: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merges the splits; grid `(B * Hq, DIM / PART)`."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    row, rows = tl.program_id(0), tl.num_programs(0)
    s = tl.arange(0, SPLITS)
    d = tl.program_id(1) * PART + tl.arange(0, PART)
    here = s < splits
    at = s * rows + row
    top = tl.load(part_top + at, mask=here, other=NOTHING)
    weight = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(part_sum + at, mask=here, other=0.0) * weight, 0)
    acc = tl.load(
        part_acc + at[:, None].to(tl.int64) * DIM + d[None, :], mask=here[:, None], other=0.0
    )
    result = tl.sum(acc * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty))


# -- host ----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Plan:
    """How one call is laid out on the GPU."""

    splits: int  # of the slots of each KV head
    tile: int  # slots that a program handles at once
    warps: int
    stages: int


def plans(pairs: int, length: int, dim: int, processors: int) -> list[Plan]:
    """What is worth timing for `pairs` = batch x KV heads: one to four programs a processor."""
    big, small = max(16, min(128, 16384 // dim)), max(16, 8192 // dim)
    shapes = ((big, 4, 3), (big, 8, 3), (small, 4, 3), (small, 4, 4))
    found = [
        Plan(_splits(pairs, length, tile, waves * processors), tile, warps, stages)
        for tile, warps, stages in shapes
        for waves in (1, 2, 3, 4)
    ]
    return list(dict.fromkeys(found))


def default_plan(pairs: int, length: int, dim: int, processors: int) -> Plan:
    """One program a processor for long caches, two of half the size for short ones."""
    if length > 8192:
        tile = max(16, min(128, 16384 // dim))
        return Plan(_splits(pairs, length, tile, processors), tile, 4, 3)
    tile = max(16, min(64, 8192 // dim))
    return Plan(_splits(pairs, length, tile, 2 * processors), tile, 4, 3)


def _splits(pairs: int, length: int, tile: int, programs: int) -> int:
    """Splits of at most `programs` programs in all, and none of them empty."""
    tiles = -(-length // tile)
    each = -(-tiles // max(1, min(programs // pairs, tiles)))
    return -(-tiles // each)


@functools.cache
def device_facts(device: torch.device) -> tuple[int, bool]:
    """Number of processors, and whether launches may overlap (Hopper and newer)."""
    if device.type != "cuda":
        return 4, False
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.major >= 9


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
    length: int | None = None,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Attention of one query token a sequence.

    Args:
        query: `[B, Hq, 1, D]`, D a power of two.
        keys, values: contiguous `[B, H, T, D]`, of the same dtype.
        scale: of the scores; default 1 / sqrt(D).
        mask: bool, broadcastable to `[B, 1, 1, length]`; True: attend.
        length: slots that count; default T.
        plan: default `default_plan`.

    Returns:
        `[B, Hq, 1, D]`.
    """
    batch, query_heads, n, dim = query.shape
    heads, capacity = keys.shape[1:3]
    if n != 1 or dim & (dim - 1) or not keys.is_contiguous() or not values.is_contiguous():
        raise ValueError(f"query {tuple(query.shape)}: one token, D a power of two, plain caches")
    length = capacity if length is None else length
    pairs, rows, group = batch * heads, batch * query_heads, query_heads // heads
    processors, pdl = device_facts(query.device)
    plan = plan or default_plan(pairs, length, dim, processors)
    span = -(-length // (plan.splits * plan.tile)) * plan.tile
    query = query.contiguous()
    part_acc = query.new_empty(plan.splits, rows, dim, dtype=torch.float32)
    part_top, part_sum = query.new_empty(2, plan.splits, rows, dtype=torch.float32)
    out = torch.empty_like(query)
    flags, strides = query, (0, 0)
    if mask is not None:
        if mask.dtype != torch.bool or (mask.dim() == 4 and mask.shape[1] != 1):
            raise ValueError("a mask must be bool, and the same for all heads")
        flags = mask.expand(batch, 1, 1, length).view(torch.uint8)
        strides = flags.stride(0), flags.stride(3)
    overlap = {"launch_pdl": True} if pdl else {}
    split_kernel[(plan.splits, pairs)](
        query, keys, values, flags, *strides, part_acc, part_top, part_sum, heads, group, capacity,
        length, span, (dim**-0.5 if scale is None else scale) * LOG2E,
        DIM=dim, ROWS=max(16, triton.next_power_of_2(group)), TILE=plan.tile, STAGES=plan.stages,
        MASKED=mask is not None, PDL=pdl, num_warps=plan.warps,
    )  # fmt: skip
    width = triton.next_power_of_2(plan.splits)
    part = min(dim, 32 if width <= 128 else 16)
    merge_kernel[(rows, dim // part)](
        part_acc, part_top, part_sum, out, plan.splits,
        DIM=dim, PART=part, SPLITS=width, PDL=pdl, num_warps=4, **overlap,
    )  # fmt: skip
    return out


# -- in whole models -----------------------------------------------------------------------------
NAME = "bf16_split_kv"


@torch.library.custom_op(f"hqmq_bench::{NAME}", mutates_args=())
def op(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    return attend(query, keys, values, scale=scale, mask=mask)


@op.register_fake
def _(query, keys, values, mask, scale):
    return query.new_empty(query.shape)


def register() -> str:
    """Make it an attention function of transformers; returns its name there."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import AttentionInterface

    def forward(module, query, key, value, attention_mask, scaling=None, **kwargs):
        if query.shape[2] != 1:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, scaling=scaling, **kwargs
            )
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return op(query, key, value, attention_mask, scale).transpose(1, 2), None

    AttentionInterface.register(NAME, forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME
