"""Quantize on write (`window == 0`): every token is encoded as it arrives, against a frozen mean."""

from __future__ import annotations

import torch

from ..codec import codec, med3x
from ..codec.codec import encode_blocks
from ..codec.packing import pack_words, unpack_words
from ..codec.spec import CHUNK, CacheSpec
from .buffers import CAPPED, EXTENT, Buffers
from .read import block_ids

SCRATCH = 1 << 18  # elements encoded together: encoding needs some 50 bytes for each


def encode_now(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    slot: int,
    state: list[int],
    median: torch.Tensor | None = None,
) -> None:
    """Encode `tokens` `[B, H, n, D]` into absolute slots slot..slot+n-1; `state` is updated, not stored.

    Whole blocks go at once; a part of a block leaves the outliers of its other tokens where they are.
    """
    stop = slot + tokens.shape[2]
    at_once = slots_at_once(spec, buffers)
    if spec.med3x and spec.med3x_scope == "batch" and median is None:
        median = _batch_median(spec, buffers, tokens)
    while slot < stop:
        offset = slot % spec.block
        if offset == 0 and stop - slot >= spec.block:
            count = min((stop - slot) // spec.block * spec.block, at_once)
            put = _put_blocks
        else:
            count = min(spec.block - offset, stop - slot)
            put = _put_part
        part = tokens[:, :, :count]
        put(spec, buffers, part, slot, state, _rows(median, count))
        tokens, slot = tokens[:, :, count:], slot + count
        median = median if _rows(median, 1) is median else median[:, :, count:]
    state[EXTENT] = max(state[EXTENT], stop)


def slots_at_once(spec: CacheSpec, buffers: Buffers) -> int:
    """Slots to encode together, in whole blocks, so that scratch does not grow with the prefill."""
    batch, heads = buffers.codes.shape[:2]
    return max(SCRATCH // (batch * heads * spec.block * spec.head_dim), 1) * spec.block


def _rows(median: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """The medians of the next `count` tokens; one that holds for all of them as it is."""
    return median if median is None or median.shape[2] == 1 else median[:, :, :count]


def _mean(spec: CacheSpec, buffers: Buffers) -> torch.Tensor | None:
    return buffers.means.float() if spec.center == "first" else None


def _batch_median(spec: CacheSpec, buffers: Buffers, tokens: torch.Tensor) -> torch.Tensor:
    """The paper's scope: one median per head over everything that this call writes."""
    x = tokens.float()
    prepared = codec.prepare(
        spec.replace(med3x=0.0), x, filled=(x != 0).any(-1), mean=_mean(spec, buffers)
    )
    return med3x.median(prepared.norms, "batch", prepared.filled)


def _put_blocks(spec, buffers, values, slot, state, median) -> None:
    count = values.shape[2] // spec.block
    blocks = buffers.capacity // spec.block
    ids = block_ids(slot // spec.block, slot // spec.block + count, blocks, values.device)
    if median is not None:
        split = median.shape[2] != 1 or values.shape[2] == 1
        median = median.unflatten(2, (count, spec.block)) if split else median.unsqueeze(3)
    out = encode_blocks(
        spec, values.unflatten(2, (count, spec.block)), mean=_mean(spec, buffers), median=median
    )
    buffers.codes.unflatten(2, (blocks, spec.block))[:, :, ids] = out.codes
    buffers.scales.unflatten(2, (blocks, spec.block))[:, :, ids] = out.scales
    if spec.med3x:
        buffers.pool[:, :, ids] = out.pool
        state[CAPPED] += int(out.capped)


def _put_part(spec, buffers, values, slot, state, median) -> None:
    count, offset = values.shape[2], slot % spec.block
    block = slot // spec.block % (buffers.capacity // spec.block)
    rows = slice(block * spec.block, (block + 1) * spec.block)
    here = slice(rows.start + offset, rows.start + offset + count)
    x = values.float()
    prepared = codec.prepare(
        spec, x, filled=(x != 0).any(-1), mean=_mean(spec, buffers), median=median
    )
    kept, slots = prepared.outliers, None
    if spec.med3x:
        taken = _taken(spec, buffers, block, rows, offset, count, slot, state)
        flat, slots, left = med3x.fit_pool(
            prepared.outliers.flatten(-2), prepared.norms.flatten(-2), spec.pool_slots, taken
        )
        kept = flat.view(prepared.outliers.shape)
        state[CAPPED] += int(left.sum())
    words, scales = codec.quantize(spec, prepared, kept)
    if spec.med3x:
        words = words | (codec.outlier_words(spec, slots).view(words.shape) * kept)
        stored = codec.pool_values(spec, prepared.values).flatten(-3, -2)
        target = torch.where(flat, slots, spec.pool_slots).long()
        pool = buffers.pool[:, :, block]
        padded = torch.cat((pool, pool[:, :, :1]), -2)
        padded.scatter_(-2, target.unsqueeze(-1).expand(*target.shape, CHUNK), stored)
        pool.copy_(padded[:, :, : spec.pool_slots])
    buffers.codes[:, :, here] = pack_words(words, spec)
    buffers.scales[:, :, here] = scales


def _taken(spec, buffers, block, rows, offset, count, slot, state) -> torch.Tensor:
    """Pool slots `[B, H, pool_slots]` that the other tokens of the block use."""
    words = unpack_words(buffers.codes[:, :, rows], spec)
    filled = buffers.scales[:, :, rows, 0] != 0
    index = torch.arange(spec.block, device=words.device)
    others = (index < offset) | (index >= offset + count)
    others &= slot - offset + index < state[EXTENT]  # rows beyond were never written, or cropped
    mask = codec.is_outlier(spec, words, filled & others)
    mask &= others[:, None]
    target = torch.where(mask, codec.outlier_slots(spec, words), spec.pool_slots)
    taken = torch.zeros(
        *words.shape[:2], spec.pool_slots + 1, dtype=torch.bool, device=words.device
    )
    return taken.scatter_(-1, target.flatten(-2).long(), True)[..., : spec.pool_slots]
