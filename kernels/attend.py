"""Decode attention on Hopper: the packed blocks by `gluon_attend.py`, all else in portable Triton.

Three launches: packed blocks, the remainder (window, sinks, odd ends), and a reduction over both.
How far the packed blocks reach is read on the device, so that CUDA graphs can replay the call.
`why_not` says what this path cannot serve; `attend_portable.py` serves that.
"""

from __future__ import annotations

import functools
import importlib

import torch
import triton
import triton.language as tl

from ..cache.buffers import Buffers
from ..codec.spec import CacheSpec
from . import attend_portable
from .attend_portable import _dot4
from .common import layout, load4, store4, tables
from .read import add_mean, load_mean, load_state, read_tile

LOG2E = tl.constexpr(1.4426950408889634)
NO_MASK, BOOL_MASK, ADDED_MASK = (tl.constexpr(i) for i in range(3))
BLOCK = tl.constexpr(64)
WARPS = 4
CTAS_PER_SM = 3
SHORT, LONG = 1024, 8192  # blocks of all KV heads: bounds of the three shapes of a call
MAX_REGISTERS = 160  # leaves room for one warp of the remainder beside three programs
KEY_COPIES, VALUE_COPIES = 4, 8


# -- what is served ----------------------------------------------------------------------------
@functools.cache
def _gluon():
    """The module of the Gluon kernel, or the reason why there is none."""
    try:
        return importlib.import_module(".gluon_attend", __package__)
    except Exception as error:  # an API of Triton that is still moving
        return f"Gluon of this Triton cannot build it ({type(error).__name__}: {error})"


def _why_not_spec(spec: CacheSpec, wanted: dict) -> str | None:
    for name, value in wanted.items():
        if getattr(spec, name) != value:
            return f"{spec.role}: {name}={getattr(spec, name)!r}, not {value!r}"
    return None


_BOTH = {"head_dim": 128, "scale": "log8", "block": 64, "rotate": False, "zero_level": False}
_KEY = _BOTH | {
    "radius_bits": 4, "index_bits": 12, "center": "block", "outlier_flag": "escape",
    "outliers": "int8x4", "pool_slots": 256,
}  # fmt: skip
_VALUE = _BOTH | {"radius_bits": 3, "index_bits": 10, "center": "none", "med3x": 0.0}


@functools.lru_cache(maxsize=4096)
def _why_not_specs(key_spec: CacheSpec, value_spec: CacheSpec) -> str | None:
    if key_spec.window == 0 or value_spec.window == 0:
        return "a cache without a window"
    return _why_not_spec(key_spec, _KEY) or _why_not_spec(value_spec, _VALUE)


@functools.cache
def _why_not_device(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.version.hip is not None:
        return "it is for NVIDIA GPUs"
    if torch.cuda.get_device_capability(device)[0] != 9:
        return "it is for Hopper (compute capability 9)"
    module = _gluon()
    return module if isinstance(module, str) else None


def why_not(
    key_spec: CacheSpec, value_spec: CacheSpec, query: torch.Tensor, n: int, group: int
) -> str | None:
    """None if this path can serve a call of `n` query tokens, else the reason why not."""
    if n != 1:
        return f"{n} query tokens, not 1"
    if group > 8:
        return f"{group} query heads a KV head, more than 8"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"{query.dtype} queries, not of 16 bits"
    return _why_not_specs(key_spec, value_spec) or _why_not_device(query.device)


# -- the remainder -----------------------------------------------------------------------------
@triton.jit(do_not_specialize=["first", "length", "mask_batch", "mask_column"])
def rest_kernel(
    query, query_strides, key, value, key_tab, value_tab, origin, mask, mask_batch, mask_column,
    part_acc, part_top, part_sum, heads, group, key_capacity, value_capacity, first, length,
    scale, K: tl.constexpr, V: tl.constexpr, T: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """What `packed_kernel` leaves out, of one KV head; grid `(splits, B * H)`.

    Tiles below and above the packed blocks, up to the newest slot, are shared out one by one. Slots
    above that were never written, or cut off; they come in spans, as a mask mostly hides them.
    """
    SPAN: tl.constexpr = 1024 // T  # tiles of which one program looks at the mask at once
    tl.extra.cuda.gdc_launch_dependents()
    bh = tl.program_id(1)
    b = bh // heads
    head = bh % heads
    row = tl.arange(0, 16)
    in_rows = row < group
    q_at = query + b.to(tl.int64) * query_strides[0]
    q_offset = (head * group + row).to(tl.int64) * query_strides[1]
    q0, q1, q2, q3 = load4(q_at, q_offset, 1, in_rows, K.chunks, K.pad)
    base = tl.load(origin) + first
    k_start, k_packed, k_length, k_extent = load_state(key.state)
    v_start, v_packed, v_length, v_extent = load_state(value.state)
    packed_begin = (
        tl.maximum(base, K.sinks if K.sinks > V.sinks else V.sinks) + BLOCK - 1
    ) // BLOCK
    packed_end = tl.minimum(tl.minimum(k_packed, v_packed), base + length) // BLOCK
    packed_end = tl.maximum(packed_end, packed_begin)
    tile0 = base // T
    end = (base + length - 1) // T + 1
    low = packed_begin * (BLOCK // T)
    high = tl.minimum(packed_end * (BLOCK // T), end)
    low = tl.minimum(low, high)
    written = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(k_length, v_length), T), high), end)
    singles_low = (low - tile0).to(tl.int32)
    singles = singles_low + (written - high).to(tl.int32)
    items = singles + tl.cdiv((end - written).to(tl.int32), SPAN)

    top = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    VPAD: tl.constexpr = V.pad
    acc0 = tl.zeros([16, VPAD], tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    r = tl.arange(0, T)
    mask += b.to(tl.int64) * mask_batch
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        begin = tl.where(item < singles_low, tile0 + item, high + (item - singles_low))
        count = 1
        if item >= singles:
            begin = written + (item - singles) * SPAN
            count = tl.minimum(SPAN, end - begin).to(tl.int32)
            if MASK != NO_MASK:
                index = begin * T + tl.arange(0, SPAN * T) - base
                inside = (index >= 0) & (index < length)
                if MASK == BOOL_MASK:
                    seen = tl.load(mask + index * mask_column, mask=inside, other=0) != 0
                else:
                    added = tl.load(mask + index * mask_column, mask=inside, other=float("-inf"))
                    seen = added.to(tl.float32) > -1e30
                if tl.max(seen.to(tl.int32)) == 0:
                    count = 0
        for i in range(0, count):
            tile = (begin + i) * T
            index = tile + r - base
            visible = (index >= 0) & (index < length)
            bias = tl.zeros([T], tl.float32)
            if MASK == BOOL_MASK:
                visible = visible & (
                    tl.load(mask + index * mask_column, mask=visible, other=0) != 0
                )
            elif MASK == ADDED_MASK:
                bias = tl.load(mask + index * mask_column, mask=visible, other=float("-inf"))
                bias = bias.to(tl.float32)
                visible = visible & (bias > float("-inf"))
            k0, k1, k2, k3, centered = read_tile(
                key, key_tab, bh, head, key_capacity, tile, k_packed, k_length, k_extent,
                K, T, False, False,
            )  # fmt: skip
            v0, v1, v2, v3, v_centered = read_tile(
                value, value_tab, bh, head, value_capacity, tile, v_packed, v_length, v_extent,
                V, T, False, False,
            )  # fmt: skip
            if K.center != "none":
                if (tile < k_packed) | (tile + T > k_length):
                    m0, m1, m2, m3 = load_mean(key, bh, key_capacity, tile, K)
                    k0, k1, k2, k3 = add_mean(k0, k1, k2, k3, m0, m1, m2, m3, centered)
            score = _dot4(q0, q1, q2, q3, k0, k1, k2, k3, "tf32") * scale
            score = tl.where(
                visible[None, :] & in_rows[:, None], score + bias[None, :], float("-inf")
            )
            higher = tl.maximum(top, tl.max(score, 1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2((score - safe[:, None]) * LOG2E)
            shrink = tl.exp2((top - safe) * LOG2E)
            top = higher
            total = total * shrink + tl.sum(weight, 1)
            acc0 = tl.dot(weight, v0, acc0 * shrink[:, None], input_precision="tf32")
            acc1 = tl.dot(weight, v1, acc1 * shrink[:, None], input_precision="tf32")
            acc2 = tl.dot(weight, v2, acc2 * shrink[:, None], input_precision="tf32")
            acc3 = tl.dot(weight, v3, acc3 * shrink[:, None], input_precision="tf32")

    rows = tl.num_programs(1) * group
    out = tl.program_id(0).to(tl.int64) * rows + bh * group + row
    tl.store(part_top + out, top, mask=in_rows)
    tl.store(part_sum + out, total, mask=in_rows)
    store4(part_acc, out, V.dim, in_rows, acc0, acc1, acc2, acc3, V.chunks, V.pad)


@triton.jit(do_not_specialize=["splits", "query_heads"])
def merge_kernel(
    part_acc, part_top, part_sum, sinks, out, splits, query_heads,
    DIM: tl.constexpr, PART: tl.constexpr, SPLITS: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the partial results; grid `(B * Hq, DIM / PART)`. Sinks add weight, but no value."""
    tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    rows = tl.num_programs(0)
    s = tl.arange(0, SPLITS)
    here = s < splits
    at = s * rows + row
    d = tl.program_id(1) * PART + tl.arange(0, PART)
    tops = tl.load(part_top + at, mask=here, other=float("-inf"))
    sums = tl.load(part_sum + at, mask=here, other=0.0)
    acc = tl.load(
        part_acc + at[:, None].to(tl.int64) * DIM + d[None, :], mask=here[:, None], other=0.0
    )
    top = tl.max(tops, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + row % query_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    safe = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2((tops - safe) * LOG2E)
    total = tl.sum(sums * weights, 0)
    if HAS_SINKS:
        total += tl.exp2((sink - safe) * LOG2E)
    result = tl.sum(acc * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + d, result.to(out.dtype.element_ty))


# -- host --------------------------------------------------------------------------------------
@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _shape(pairs: int, blocks: int, device: torch.device) -> tuple[int, tuple[int, int, int]]:
    """Splits of the packed blocks, and (splits, slots of a tile, warps) of the remainder.

    The packed blocks get one full wave of programs at most, and no more than the last step needs.
    The remainder runs beside them: it takes room from a wave, so beside a long run it is small, and
    beside a short one, whose time it decides, it is quick.
    """
    processors = _processors(device)
    wave = CTAS_PER_SM * processors // pairs
    if pairs * blocks <= SHORT:
        rest = 8, 32, 4
    elif pairs * blocks <= LONG and pairs <= 16:
        rest = 4, 64, 4
        wave -= rest[0]
    else:
        rest = max(2, min(12, processors // pairs)), 16, 1
    most = max(1, min(wave, -(-blocks // WARPS)))
    steps = -(-blocks // (most * WARPS))
    return max(1, -(-blocks // (steps * WARPS))), rest


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
    mask: torch.Tensor | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    origin: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token `[B, Hq, 1, D]`, as `launch.attend`; `why_not` must be None.

    Args:
        mask: as of `launch.attend`. Masks that differ between heads go to the portable kernel, as do
            `causal`, `softcap` and buffers that are not aligned to 16 bytes.
        origin: int64 tensor whose first element counts as START; default: the state of the keys.

    Returns:
        `[B, Hq, 1, Dv]` in the dtype of `query`.
    """
    batch, query_heads, n, dim = query.shape
    heads = key.codes.shape[1]
    group = query_heads // heads
    origin = key.state if origin is None else origin
    if mask is not None:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)
        mask = mask.float() if mask.dtype == torch.float64 else mask
        mask = mask.expand(batch, query_heads, n, length)
    aligned = all(t.data_ptr() % 16 == 0 for t in (*key, *value) if t.numel())
    if (
        not aligned
        or causal
        or softcap
        or (mask is not None and query_heads > 1 and mask.stride(1) != 0)
    ):
        return attend_portable.attend(
            query, key_spec, key, value_spec, value, first, length, scale=scale, mask=mask,
            causal=causal, softcap=softcap, sinks=sinks, origin=origin,
            processors=_processors(query.device),
        )  # fmt: skip
    if query.stride(-1) != 1:
        query = query.contiguous()
    pairs, rows = batch * heads, batch * query_heads
    blocks = max(1, length // 64)
    splits, (rest_splits, tile, rest_warps) = _shape(pairs, blocks, query.device)
    parts = splits * WARPS + rest_splits
    part_acc = query.new_empty(parts, rows, dim, dtype=torch.float32)
    part = query.new_empty(2, parts, rows, dtype=torch.float32)
    out = query.new_empty(batch, query_heads, n, dim)
    kind, stand_in, strides = 0, key.codes, (0, 0)
    if mask is not None:
        kind, strides = (1 if mask.dtype == torch.bool else 2), (mask.stride(0), mask.stride(3))
        stand_in = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    K, V = layout(key_spec), layout(value_spec)
    key_tab, value_tab = (tables(s, heads, query.device) for s in (key_spec, value_spec))
    last = splits * WARPS
    rest_kernel[(rest_splits, pairs)](
        query, query.stride()[:2], key, value, key_tab, value_tab, origin, stand_in, *strides,
        part_acc[last:], part[0, last:], part[1, last:], heads, group, key.capacity,
        value.capacity, first, length, scale, K=K, V=V, T=tile, MASK=kind, num_warps=rest_warps,
        maxnreg=128 if rest_warps == 1 else None,
    )  # fmt: skip
    int32 = torch.int32
    _gluon().packed_kernel[(splits, pairs)](
        query, query.stride(0), query.stride(1), key.codes.view(int32),
        key.scales.flatten(2).view(torch.int64), key.pool.view(int32), key.exponents,
        key.means.view(int32), key.state, key_tab.codewords, key.capacity // 64,
        value.codes.view(int32), value.codes.view(torch.int16),
        value.scales.flatten(2).view(torch.int64), value.state, value_tab.codewords,
        value.capacity // 64, origin, stand_in, *strides, part_acc, part[0], part[1],
        heads, rows, first, length, scale * 1.4426950408889634,
        G=group, NW=WARPS, KR=KEY_COPIES, VR=VALUE_COPIES, SINKS=max(K.sinks, V.sinks), MASK=kind,
        HAAR=K.per_head, HAAR_V=V.per_head, num_warps=WARPS, maxnreg=MAX_REGISTERS, launch_pdl=True,
    )  # fmt: skip
    width = triton.next_power_of_2(parts)
    piece = 32 if width <= 256 else 16
    merge_kernel[(rows, dim // piece)](
        part_acc, part[0], part[1], key.state if sinks is None else sinks, out, parts, query_heads,
        DIM=dim, PART=piece, SPLITS=width, HAS_SINKS=sinks is not None, num_warps=4, launch_pdl=True,
    )  # fmt: skip
    return out
