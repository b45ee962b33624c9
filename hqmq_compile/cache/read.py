"""Reading a packed cache in plain torch: absolute slots to float32, or to the user's dense tensor."""

from __future__ import annotations

import torch

from ..codec.codec import decode_blocks
from ..codec.spec import CacheSpec
from .buffers import EXTENT, LENGTH, PACKED, START, Buffers


def block_ids(first: int, last: int, blocks: int, device) -> slice | torch.Tensor:
    """Physical blocks of the logical blocks first..last-1: a slice where they do not wrap around."""
    if first % blocks + (last - first) <= blocks:
        return slice(first % blocks, first % blocks + last - first)
    return torch.arange(first, last, device=device) % blocks


def _read_codes(spec: CacheSpec, buffers: Buffers, first: int, last: int) -> torch.Tensor:
    """Decode the blocks that cover slots first..last-1; float32 [B, H, slots of those blocks, D]."""
    batch, heads, capacity, _ = buffers.codes.shape
    blocks = capacity // spec.block
    ids = block_ids(first // spec.block, -(-last // spec.block), blocks, buffers.codes.device)
    codes = buffers.codes.unflatten(2, (blocks, spec.block))[:, :, ids]
    scales = buffers.scales.unflatten(2, (blocks, spec.block))[:, :, ids]
    means = None
    if spec.center == "block":
        means = buffers.means[:, :, ids]
    elif spec.center == "first":
        means = buffers.means
    out = decode_blocks(
        spec, codes, scales, buffers.pool[:, :, ids], buffers.exponents[:, :, ids], means
    )
    return out.flatten(2, 3)


def read_slots(
    spec: CacheSpec, buffers: Buffers, first: int, last: int, state: list[int] | None = None
) -> torch.Tensor:
    """Values of absolute slots first..last-1 as stored.

    Returns float32 `[B, H, last - first, D]`. `state` saves reading the state vector again.
    """
    state = buffers.state.tolist() if state is None else state
    packed, length, extent = state[PACKED], state[LENGTH], state[EXTENT]
    batch, heads = buffers.codes.shape[:2]
    pieces = []

    def codes(a: int, b: int) -> None:
        if a < b:
            aligned = a // spec.block * spec.block
            pieces.append(_read_codes(spec, buffers, a, b)[:, :, a - aligned : b - aligned])

    codes(first, min(last, packed))
    a, b = max(first, packed), min(last, length)
    if a < b:
        slots = torch.arange(a, b, device=buffers.ring.device) % spec.ring_slots
        pieces.append(buffers.ring.index_select(2, slots).float())
    codes(max(first, length, packed), min(last, extent))
    unwritten = last - max(first, length, extent, packed)
    if unwritten > 0 or not pieces:
        unwritten = max(unwritten, 0)
        pieces.append(
            torch.zeros(batch, heads, unwritten, spec.head_dim, device=buffers.codes.device)
        )
    out = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    if first < spec.sink_tokens and first < length:
        stop = min(last, spec.sink_tokens, length)
        out[:, :, : stop - first] = buffers.sinks[:, :, first:stop].float()
    return out


def dequantize(
    spec: CacheSpec,
    buffers: Buffers,
    length: int,
    *,
    tile: int = 4096,
    state: list[int] | None = None,
    start: int | None = None,
) -> torch.Tensor:
    """The user's dense tensor `[B, H, length, D]`, in the dtype of the cache.

    Decoded `tile` slots at a time, so that the float32 copy stays small. `start`: another absolute
    slot to begin with than logical index 0.
    """
    state = buffers.state.tolist() if state is None else state
    batch, heads = buffers.codes.shape[:2]
    out = torch.empty(
        batch, heads, length, spec.head_dim, dtype=spec.torch_dtype, device=buffers.codes.device
    )
    start = state[START] if start is None else start
    for a in range(0, length, tile):
        b = min(a + tile, length)
        out[:, :, a:b] = read_slots(spec, buffers, start + a, start + b, state)
    return out
