"""The packed buffers of one cache tensor, and the layout of its state vector.

A cache is addressed by absolute slot: slot `s` is logical index `s - start` of the user's tensor.
Where a slot lives (`design.md`, "Slots, blocks, window"):

    s < sink_tokens             `sinks`, exact
    packed <= s < length        `ring[s % ring_slots]`, exact
    s < extent, otherwise       `codes` and friends, physical row `s % capacity`
    s >= extent                 never written: reads as zero
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..codec.spec import CacheSpec

# Indices into `state`. The last one is scratch of the kernels: 0 between launches.
START, PACKED, LENGTH, CAPPED, EXTENT = range(5)
STATE_SIZE = 8


class Buffers(NamedTuple):
    """Plain tensors, in the order in which every op takes them. Unused ones have a zero-size dim."""

    codes: torch.Tensor  # uint8 [B, H, capacity, row_bytes]
    scales: torch.Tensor  # uint8 or float16 [B, H, capacity, scale_groups]
    pool: torch.Tensor  # int8 or 16-bit float [B, H, blocks, pool_slots, 4]
    exponents: torch.Tensor  # int8 [B, H, blocks, tiles]
    means: torch.Tensor  # float16 [B, H, blocks | 1 | 0, D]
    ring: torch.Tensor  # cache dtype [B, H, ring_slots, D]
    sinks: torch.Tensor  # cache dtype [B, H, sink_tokens, D]
    state: torch.Tensor  # int64 [STATE_SIZE], on the device of the cache

    @property
    def capacity(self) -> int:
        """Slots that `codes` can hold at once."""
        return self.codes.shape[2]

    @property
    def stored_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self)


FIELDS = len(Buffers._fields)
PER_BLOCK = ("codes", "scales", "pool", "exponents", "means")  # grow with the capacity


def shapes(spec: CacheSpec, batch, heads, blocks) -> list[tuple[tuple, torch.dtype]]:
    """Shape and dtype of every buffer; `blocks` may be symbolic."""
    rows = blocks * spec.block
    mean_rows = {"block": blocks, "first": 1, "none": 0}[spec.center]
    dtype = spec.torch_dtype
    return [
        ((batch, heads, rows, spec.row_bytes), torch.uint8),
        ((batch, heads, rows, spec.scale_groups), spec.scale_dtype),
        ((batch, heads, blocks, spec.pool_slots, 4), spec.pool_dtype),
        ((batch, heads, blocks, spec.tiles), torch.int8),
        ((batch, heads, mean_rows, spec.head_dim), torch.float16),
        ((batch, heads, spec.ring_slots, spec.head_dim), dtype),
        ((batch, heads, spec.sink_tokens, spec.head_dim), dtype),
        ((STATE_SIZE,), torch.int64),
    ]


def allocate(spec: CacheSpec, batch, heads, blocks, device) -> Buffers:
    """An empty store. Zeros everywhere is the empty state: scale code 0 marks an unwritten slot.

    Never inference tensors: a cache made in inference mode may be written outside it.
    """
    with torch.inference_mode(False):
        return Buffers(
            *(
                torch.zeros(shape, dtype=dtype, device=device)
                for shape, dtype in shapes(spec, batch, heads, blocks)
            )
        )


def static_blocks(spec: CacheSpec, slots):
    """Blocks for a cache of fixed length. One spare, so that a rolling window never meets its tail."""
    return (slots + spec.block - 1) // spec.block + 1


def growing_blocks(spec: CacheSpec, slots):
    """Blocks for a growing cache that now holds `slots`: the window lives in the ring, not in codes."""
    packed = slots if spec.window == 0 else slots - spec.window
    packed = max(packed, 0) if isinstance(packed, int) else torch.sym_max(packed, 0)
    return (packed + spec.block - 1) // spec.block + 1
