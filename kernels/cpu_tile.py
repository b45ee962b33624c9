"""A range of slots as attention on the CPU reads it straight from the codes, by the C++ kernel.

A packed token is `scale · u + mean` with u from the codebook, so for a query q

    q · token = scale · (q · u) + q · mean,

and likewise for a weighted sum of values: means are added to scores, of which there are head_dim
times fewer than elements. Tokens still in 16 bits (window, sinks) take no part in this.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..cache.attend import DenseTile
from ..cache.buffers import LENGTH, PACKED, Buffers
from ..cache.read import block_ids, read_slots
from ..codec import transform
from ..codec.spec import CacheSpec
from . import cpu


@dataclasses.dataclass(frozen=True)
class PackedTile:
    """Absolute slots first..last-1: the first sinks exact, then codes, from `packed` on the ring."""

    spec: CacheSpec
    buffers: Buffers
    first: int
    packed: int
    sinks: Tensor | None  # float32 [B, H, count, D]
    ring: Tensor | None  # float32 [B, H, last - packed, D]

    @property
    def count(self) -> int:
        return self.packed - self.first

    def scores(self, rows: Tensor) -> Tensor:
        """Products of `rows` `[B, H, R, D]` and every token, `[B, H, R, n]`."""
        spec = self.spec
        turned = transform.rotate(rows, spec.seed) if spec.rotate else rows
        out = cpu.scores(spec, self.buffers, self.first, self.count, turned)
        if spec.center != "none":
            means, filled = self._means()
            shift = self._spread(torch.matmul(rows, means.mT))
            out.addcmul_(shift, filled.unsqueeze(2))
        if self.sinks is not None:
            out[..., : self.sinks.shape[2]] = torch.matmul(rows, self.sinks.mT)
        if self.ring is None:
            return out
        return torch.cat((out, torch.matmul(rows, self.ring.mT)), -1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum of the tokens, weighted by `[B, H, R, n]`: `[B, H, R, D]`."""
        spec, coded = self.spec, weights[..., : self.count]
        if self.sinks is not None:
            exact = self.sinks.shape[2]
            coded = torch.nn.functional.pad(coded[..., exact:], (exact, 0))
        out = cpu.weighted_sum(spec, self.buffers, self.first, coded)
        if spec.rotate:
            out = transform.unrotate(out, spec.seed)
        if spec.center != "none":
            means, filled = self._means()
            out += torch.matmul(self._sums(coded * filled.unsqueeze(2)), means)
        if self.sinks is not None:
            out += torch.matmul(weights[..., :exact], self.sinks)
        if self.ring is not None:
            out += torch.matmul(weights[..., self.count :], self.ring)
        return out

    # -- means -------------------------------------------------------------------------------------
    def _means(self) -> tuple[Tensor, Tensor]:
        """Means `[B, H, blocks, D]`, and float32 `[B, H, count]`: 1 for a token that is not empty."""
        capacity, block = self.buffers.capacity, self.spec.block
        slots = block_ids(self.first, self.packed, capacity, self.buffers.scales.device)
        filled = (self.buffers.scales[:, :, slots, 0] != 0).float()
        means = self.buffers.means
        if self.spec.center == "block":
            begin, end = self._blocks
            means = means[:, :, block_ids(begin, end, capacity // block, means.device)]
        return means.float(), filled

    @property
    def _blocks(self) -> tuple[int, int]:
        if self.spec.center == "first":
            return 0, 1
        return self.first // self.spec.block, -(-self.packed // self.spec.block)

    @property
    def _edges(self) -> tuple[int, int]:
        """Slots of the first and last blocks that are not of this tile."""
        if self.spec.center == "first":
            return 0, 0
        begin, end = self._blocks
        return self.first - begin * self.spec.block, end * self.spec.block - self.packed

    def _spread(self, shift: Tensor) -> Tensor:
        """Numbers of blocks `[..., blocks]` to their slots `[..., count]`."""
        if shift.shape[-1] == 1:
            return shift
        before, _ = self._edges
        slots = shift.unsqueeze(-1).expand(*shift.shape, self.spec.block).flatten(-2)
        return slots[..., before : before + self.count]

    def _sums(self, weights: Tensor) -> Tensor:
        """Weights of slots `[..., count]`, summed over each block."""
        begin, end = self._blocks
        padded = torch.nn.functional.pad(weights, self._edges)
        return padded.unflatten(-1, (end - begin, -1)).sum(-1)


def read_tile(
    spec: CacheSpec, buffers: Buffers, first: int, last: int, state: list[int]
) -> DenseTile | PackedTile:
    """Absolute slots first..last-1. `state`: of `buffers`, on the host."""
    packed = min(last, state[PACKED])
    if first >= packed or (last > packed and last > state[LENGTH]):
        return DenseTile(read_slots(spec, buffers, first, last, state))
    ring = read_slots(spec, buffers, packed, last, state) if last > packed else None
    sinks = None
    if first < spec.sink_tokens:
        sinks = buffers.sinks[:, :, first : min(packed, spec.sink_tokens)].float()
    return PackedTile(spec, buffers, first, packed, sinks, ring)
