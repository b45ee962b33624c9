"""Writing tokens into a packed cache, in plain torch: the reference of the write kernels.

Two modes (`design.md`, "Slots, blocks, window"). Windowed: new tokens enter the ring in 16 bits, and
a block is packed whole once it lies behind the window. Immediate (`window == 0`): every token is
encoded as it is written.
"""

from __future__ import annotations

import torch

from ..codec.codec import encode_blocks, first_mean
from ..codec.spec import CacheSpec
from .buffers import CAPPED, EXTENT, LENGTH, PACKED, PER_BLOCK, START, Buffers, allocate
from .read import block_ids, read_slots
from .write_now import encode_now, slots_at_once


def write(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    start: int,
    keep: int = 0,
    median: torch.Tensor | None = None,
    limit: int = 0,
) -> None:
    """Write `tokens` `[B, H, n, D]` at logical slots start..start+n-1, in place.

    `keep` > 0 leaves only the newest `keep` slots of the sequence (a sliding window: logical index 0
    moves). `median` is the Med3x median of the chunk norms of `tokens` where the graph already holds
    it (immediate mode only); None computes it here. `limit` > 0 is the length of the user's tensor.
    Raises IndexError when the cache has no room for the slots.
    """
    state = buffers.state.tolist()
    slot = state[START] + start
    if limit and start + tokens.shape[2] > limit or start < 0:
        raise IndexError(
            f"hqmq: slots {start}..{start + tokens.shape[2] - 1} are outside a cache of {limit} slots;"
            " allocate a longer cache"
        )
    if spec.window:
        if slot > state[LENGTH]:  # a gap: what was there (zeros, or an older sequence) moves along
            gap = read_slots(spec, buffers, state[LENGTH], slot, state)
            tokens, slot = torch.cat([gap.to(tokens.dtype), tokens], dim=2), state[LENGTH]
        _write_windowed(spec, buffers, tokens, slot, keep, state)
    else:
        _write_now(spec, buffers, tokens, slot, keep, state, median)


def write_slots(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    keep: int = 0,
    median: torch.Tensor | None = None,
    limit: int = 0,
) -> None:
    """`write` at `positions` (int `[n]`, logical slots), split into runs of consecutive slots."""
    slots = positions.tolist()
    first = 0
    for i in range(1, len(slots) + 1):
        if i == len(slots) or slots[i] != slots[i - 1] + 1:
            part = median if median is None or median.dim() < 4 else median[:, :, first:i]
            write(spec, buffers, tokens[:, :, first:i], slots[first], keep, part, limit)
            first = i


def _commit(buffers: Buffers, state: list[int]) -> None:
    buffers.state.copy_(torch.tensor(state, dtype=torch.int64))


def _check_room(spec: CacheSpec, buffers: Buffers, oldest: int, stop: int) -> None:
    first = oldest // spec.block * spec.block
    if stop - first > buffers.capacity:
        raise IndexError(
            f"hqmq: slots {oldest}..{stop - 1} do not fit a packed cache of {buffers.capacity} slots;"
            " allocate a longer cache or grow it before writing"
        )


def _store_blocks(
    spec: CacheSpec, buffers: Buffers, first: int, values: torch.Tensor, state: list[int]
) -> None:
    """Encode whole blocks (`values` `[B, H, m * block, D]`, slots from `first`) into their places."""
    blocks = buffers.capacity // spec.block
    count = values.shape[2] // spec.block
    ids = block_ids(first // spec.block, first // spec.block + count, blocks, values.device)
    mean = buffers.means.float() if spec.center == "first" else None
    out = encode_blocks(spec, values.unflatten(2, (count, spec.block)), mean=mean)
    buffers.codes.unflatten(2, (blocks, spec.block))[:, :, ids] = out.codes
    buffers.scales.unflatten(2, (blocks, spec.block))[:, :, ids] = out.scales
    if spec.med3x:
        buffers.pool[:, :, ids] = out.pool
        buffers.exponents[:, :, ids] = out.exponents
        state[CAPPED] += int(out.capped)
    if spec.center == "block":
        buffers.means[:, :, ids] = out.means
    state[EXTENT] = max(state[EXTENT], first + count * spec.block)


def _content(
    spec: CacheSpec,
    buffers: Buffers,
    first: int,
    last: int,
    tokens: torch.Tensor,
    slot: int,
    state: list[int],
) -> torch.Tensor:
    """Slots first..last-1 as they will be once `tokens` are written from `slot` on."""
    a, b = max(first, slot), min(last, slot + tokens.shape[2])
    if a >= b:
        return read_slots(spec, buffers, first, last, state)
    parts = []
    if first < a:
        parts.append(read_slots(spec, buffers, first, a, state))
    parts.append(tokens[:, :, a - slot : b - slot].float())
    if b < last:
        parts.append(read_slots(spec, buffers, b, last, state))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _write_ring(spec: CacheSpec, buffers: Buffers, slot: int, values: torch.Tensor) -> None:
    if values.shape[2]:
        slots = torch.arange(slot, slot + values.shape[2], device=values.device) % spec.ring_slots
        buffers.ring.index_copy_(2, slots, values.to(buffers.ring.dtype))


def _write_sinks(spec: CacheSpec, buffers: Buffers, slot: int, tokens: torch.Tensor) -> None:
    count = min(spec.sink_tokens - slot, tokens.shape[2])
    if count > 0:
        buffers.sinks[:, :, slot : slot + count] = tokens[:, :, :count].to(buffers.sinks.dtype)


def flush(spec: CacheSpec, buffers: Buffers, state: list[int]) -> None:
    """Pack everything that lives in the ring, the last block from what it holds so far."""
    first, last = state[PACKED], state[LENGTH]
    if first < last:
        stop = -(-last // spec.block) * spec.block
        _store_blocks(spec, buffers, first, read_slots(spec, buffers, first, stop, state), state)


def rewind(spec: CacheSpec, buffers: Buffers, slot: int, state: list[int]) -> None:
    """Make `slot` the end of the sequence; later slots stay readable, packed.

    The block that holds `slot` returns to the ring (its kept tokens as dequantized).
    """
    flush(spec, buffers, state)
    first = slot // spec.block * spec.block
    kept = read_slots(spec, buffers, first, slot, [state[START], slot, slot, 0, state[EXTENT]])
    _write_ring(spec, buffers, first, kept)
    state[PACKED], state[LENGTH] = first, slot


def _write_windowed(spec, buffers, tokens, slot, keep, state) -> None:
    if spec.center == "first" and state[LENGTH] == 0:
        buffers.means.copy_(first_mean(tokens))
    if slot < state[PACKED]:
        rewind(spec, buffers, slot, state)
    length = max(state[LENGTH], slot + tokens.shape[2])
    start = max(state[START], length - keep) if keep else state[START]
    packed = max(state[PACKED], (length - spec.window) // spec.block * spec.block)
    _check_room(spec, buffers, start, packed)
    # What a sliding window left behind is not worth packing, unless attention still reads it: the
    # attention of a short call comes after its write, and sees the window of its oldest query.
    oldest = state[START] if tokens.shape[2] <= spec.window else start
    first = max(state[PACKED], oldest // spec.block * spec.block)
    step = slots_at_once(spec, buffers)
    for a in range(first, packed, step):
        b = min(a + step, packed)
        values = _content(spec, buffers, a, b, tokens, slot, state)
        _store_blocks(spec, buffers, a, values, state)
    newest = max(packed, slot)
    _write_ring(spec, buffers, newest, tokens[:, :, newest - slot :])
    _write_sinks(spec, buffers, slot, tokens)
    state[START], state[PACKED], state[LENGTH] = start, packed, length
    state[EXTENT] = max(state[EXTENT], length)
    _commit(buffers, state)


def _write_now(spec, buffers, tokens, slot, keep, state, median) -> None:
    stop = slot + tokens.shape[2]
    length = max(state[LENGTH], stop)
    start = max(state[START], length - keep) if keep else state[START]
    if spec.center == "first" and state[LENGTH] == 0:
        buffers.means.copy_(first_mean(tokens))
    _write_sinks(spec, buffers, slot, tokens)
    gone = max(start // spec.block * spec.block - slot, 0)  # left the window with this very call
    _check_room(spec, buffers, start, length)
    if median is not None and median.shape[2] != 1:
        median = median[:, :, gone:]
    encode_now(spec, buffers, tokens[:, :, gone:], slot + gone, state, median)
    state[START], state[PACKED], state[LENGTH] = start, length, length
    _commit(buffers, state)


def resized(spec: CacheSpec, buffers: Buffers, blocks: int, start: int) -> Buffers:
    """Copies with `blocks` blocks of capacity, for a cache whose oldest live slot is `start`."""
    batch, heads = buffers.codes.shape[:2]
    have = buffers.capacity // spec.block
    new = allocate(spec, batch, heads, blocks, buffers.codes.device)
    first = start // spec.block
    source = block_ids(first, first + have, have, buffers.codes.device)
    target = block_ids(first, first + have, blocks, buffers.codes.device)
    for name, a, b in zip(Buffers._fields, buffers, new, strict=True):
        if name in PER_BLOCK and a.shape != b.shape:
            rows = a.shape[2] // have
            b.unflatten(2, (blocks, rows))[:, :, target] = a.unflatten(2, (have, rows))[
                :, :, source
            ]
        else:
            b.copy_(a)
    return new


def extended(spec: CacheSpec, buffers: Buffers, tokens: torch.Tensor, start: int) -> Buffers:
    """Copies with `tokens` written at logical slot `start` and nothing evicted."""
    origin = int(buffers.state[START])
    span = origin % spec.block + start + tokens.shape[2]
    blocks = max(-(-span // spec.block) + 1, buffers.capacity // spec.block)
    copies = resized(spec, buffers, blocks, origin)
    write(spec, copies, tokens, start)
    return copies


def write_beyond(spec: CacheSpec, buffers: Buffers, dense: torch.Tensor, written: int) -> None:
    """Pack slots `written`.. of `dense` `[B, H, T, D]` as leftovers behind the end of the sequence."""
    state = buffers.state.tolist()
    length = dense.shape[2]
    if spec.window:
        step = slots_at_once(spec, buffers)
        for a in range(written // spec.block * spec.block, length, step):
            tail = dense[:, :, a : a + step]
            tail = torch.nn.functional.pad(tail, (0, 0, 0, -tail.shape[2] % spec.block))
            _store_blocks(spec, buffers, a, tail, state)
    else:
        encode_now(spec, buffers, dense[:, :, written:], written, state)
    state[EXTENT] = max(state[EXTENT], length)
    _commit(buffers, state)


def crop(spec: CacheSpec, buffers: Buffers, first: int, last: int) -> None:
    """Keep logical slots first..last-1 only, in place. Later slots are forgotten, not flushed."""
    start = int(buffers.state[START])
    crop_to(spec, buffers, start + first, start + last)


def crop_to(spec: CacheSpec, buffers: Buffers, start: int, stop: int) -> None:
    """Keep absolute slots start..stop-1 only, in place."""
    state = buffers.state.tolist()
    if spec.window == 0:
        state[PACKED] = min(state[PACKED], stop)
    elif stop < state[PACKED]:
        first = stop // spec.block * spec.block
        values = read_slots(spec, buffers, first, stop, state)
        _write_ring(spec, buffers, first, values)
        state[PACKED] = first
    state[START] = start
    state[LENGTH] = min(state[LENGTH], stop)
    state[EXTENT] = min(state[EXTENT], stop)
    _commit(buffers, state)
