"""Other ways to keep a KV cache, as codecs of the same evaluation, with every stored bit counted.

What each needs at read is in its bits: 16-bit scales, zero points, norms, flags and outliers with a
16-bit pointer, block means, window and sinks. Learned codebooks are not counted, which favours them.
All codecs take `[B, H, n, D]` float32 and treat every token (or block) on its own.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hqmq_compile.codec.codebook import random_units
from hqmq_compile.codec.spec import CHUNK
from hqmq_compile.codec.transform import rotate, unrotate

from .faithful import Calls, Codec

SLICE = 2**14  # chunks that are compared with a codebook at once


def half(x: Tensor) -> Tensor:
    """Rounded to float16, as stored, and never 0."""
    return x.clamp(2.0**-24, 65504.0).to(torch.float16).float()


@dataclasses.dataclass
class Baseline(Codec):
    """A codec with the helpers that any method could borrow.

    Args:
        center: subtract the float16 mean of each block of tokens first (`block` > 1), and add it back.
    """

    center: bool = False

    def code(self, x: Tensor, layer: int) -> Tensor:
        """What `[B, H, n, D]` reads as."""
        raise NotImplementedError

    def code_bits(self, dim: int) -> float:
        """Stored bits an element, without means, window and sinks."""
        raise NotImplementedError

    def read_back(self, x: Tensor, layer: int, calls: Calls) -> Tensor:
        if not self.center:
            return self.code(x, layer)
        blocks = x.unflatten(-2, (-1, self.block))
        mean = blocks.mean(-2, keepdim=True).to(torch.float16).float()
        return (self.code((blocks - mean).flatten(2, 3), layer).view_as(blocks) + mean).flatten(
            2, 3
        )

    def packed_bits(self, dim: int) -> float:
        return self.code_bits(dim) + (16 / self.block if self.center else 0.0)


@dataclasses.dataclass
class ByLayer(Codec):
    """One codec for the first layer, another for the rest; both with the same window and block."""

    first: Codec = dataclasses.field(default_factory=Codec)
    rest: Codec = dataclasses.field(default_factory=Codec)

    def __post_init__(self) -> None:
        self.window, self.block, self.sinks = self.rest.window, self.rest.block, self.rest.sinks
        if (self.first.window, self.first.block) != (self.window, self.block):
            raise ValueError("the codecs pack at different times")

    def read_back(self, x: Tensor, layer: int, calls: Calls) -> Tensor:
        return (self.rest if layer else self.first).read_back(x, layer, calls)

    def bits(self, dim: int, length: int, layer: int = 0) -> float:
        return (self.rest if layer else self.first).bits(dim, length, layer)


# -- integers ------------------------------------------------------------------------------------
@dataclasses.dataclass
class Int(Baseline):
    """Symmetric integers with one 16-bit scale per token and head, the maximum over its elements."""

    width: int = 4

    def code(self, x: Tensor, layer: int) -> Tensor:
        top = 2 ** (self.width - 1) - 1
        scale = half(x.abs().amax(-1, keepdim=True) / top)
        return (x / scale).round().clamp(-top - 1, top) * scale

    def code_bits(self, dim: int) -> float:
        return self.width + 16 / dim


def asymmetric(x: Tensor, width: int, dim: int) -> Tensor:
    """Integers from the minimum to the maximum along `dim`, both as float16 step and zero point."""
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = half((high - low) / (2**width - 1))
    low = low.to(torch.float16).float()
    return ((x - low) / step).round().clamp(0, 2**width - 1) * step + low


@dataclasses.dataclass
class IntGroups(Baseline):
    """Asymmetric integers in groups of elements of a token (KIVI's values), 32 bits a group.

    `along="tokens"`: in groups of tokens of a channel, as KIVI's keys; `block` is a multiple then.
    """

    width: int = 4
    group: int = 32
    along: str = "channels"

    def code(self, x: Tensor, layer: int) -> Tensor:
        dim = -1 if self.along == "channels" else -2
        grouped = x.unflatten(dim, (-1, min(self.group, x.shape[dim])))
        if dim == -2:
            return asymmetric(grouped, self.width, -2).flatten(-3, -2)
        return asymmetric(grouped, self.width, -1).flatten(-2)

    def code_bits(self, dim: int) -> float:
        return self.width + 32 / (min(self.group, dim) if self.along == "channels" else self.group)


@dataclasses.dataclass
class IntOutliers(Baseline):
    """Integers with Med3x: chunks of four above 3 medians of their token stay in 16 bits.

    The scale is that of the bulk. Stored for an outlier: 64 bits and a 16-bit pointer; a flag a chunk.
    """

    width: int = 4
    multiplier: float = 3.0

    def __post_init__(self) -> None:
        self.chunks = self.outliers = 0

    def code(self, x: Tensor, layer: int) -> Tensor:
        chunks = x.unflatten(-1, (-1, CHUNK))
        norms = chunks.norm(dim=-1)
        outlier = norms > self.multiplier * norms.median(-1, keepdim=True).values
        self.chunks += outlier.numel()
        self.outliers += int(outlier.sum())
        bulk = torch.where(outlier.unsqueeze(-1), 0.0, chunks).flatten(-2)
        top = 2 ** (self.width - 1) - 1
        scale = half(bulk.abs().amax(-1, keepdim=True) / top)
        bulk = (bulk / scale).round().clamp(-top - 1, top) * scale
        kept = x.to(torch.bfloat16).float()
        return torch.where(outlier.repeat_interleave(CHUNK, -1), kept, bulk)

    def code_bits(self, dim: int) -> float:
        share = self.outliers / max(self.chunks, 1)  # of what was coded so far
        return self.width + 16 / dim + (1 + share * (64 + 16)) / CHUNK


@dataclasses.dataclass
class Float8(Baseline):
    """e4m3 without a scale, as serving engines do without calibration."""

    def code(self, x: Tensor, layer: int) -> Tensor:
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()

    def code_bits(self, dim: int) -> float:
        return 8.0


@dataclasses.dataclass
class Stored(Codec):
    """A cache that is run as it is, call by call (`quality.stepped`); only its bits are known here."""

    width: float = 16.0

    def packed_bits(self, dim: int) -> float:
        return self.width


# -- rotation and Lloyd-Max ------------------------------------------------------------------------
def lloyd_max(width: int, rounds: int = 400) -> Tensor:
    """The 2^width levels that minimise the squared error for a standard normal variable."""
    count = 2**width
    normal = torch.distributions.Normal(0.0, 1.0)
    levels = normal.icdf((torch.arange(count, dtype=torch.float64) + 0.5) / count)

    def density(t: Tensor) -> Tensor:
        return torch.exp(-t * t / 2) / math.sqrt(2 * math.pi)

    infinite = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(rounds):
        edges = torch.cat((-infinite, (levels[1:] + levels[:-1]) / 2, infinite))
        mass = normal.cdf(edges).diff()
        levels = -density(edges).diff() / mass
    return levels.float()


@dataclasses.dataclass
class Rotated(Baseline):
    """TurboQuant's structure: a random rotation, the norm in 16 bits, Lloyd-Max for each coordinate.

    The rotation is a signed Hadamard, exact in distribution for D a power of two only.
    """

    width: int = 4

    def code(self, x: Tensor, layer: int) -> Tensor:
        levels = lloyd_max(self.width)
        turned = rotate(x, seed=0)
        scale = half(turned.norm(dim=-1, keepdim=True) / math.sqrt(x.shape[-1]))
        edges = (levels[1:] + levels[:-1]) / 2
        return unrotate(levels[torch.bucketize(turned / scale, edges)] * scale, seed=0)

    def code_bits(self, dim: int) -> float:
        return self.width + 16 / dim


# -- vectors of four ---------------------------------------------------------------------------------
def nearest_row(x: Tensor, table: Tensor) -> Tensor:
    """Index of the row of `table` `[K, 4]` that is nearest to each of `[N, 4]`, norms of rows included."""
    shift = -0.5 * table.square().sum(-1)
    parts = [torch.addmm(shift, part, table.t()).argmax(-1) for part in x.split(SLICE)]
    return torch.cat(parts)


@dataclasses.dataclass
class Directions(Baseline):
    """Chunks of four as a direction and a uniform radius below a 16-bit scale per token."""

    radius_bits: int = 4

    def direction(self, unit: Tensor) -> Tensor:
        """What unit vectors `[N, 4]` read as."""
        raise NotImplementedError

    def direction_bits(self) -> int:
        raise NotImplementedError

    def code(self, x: Tensor, layer: int) -> Tensor:
        chunks = x.unflatten(-1, (-1, CHUNK))
        radius = chunks.norm(dim=-1)
        unit = chunks / radius.clamp(min=1e-30).unsqueeze(-1)
        top = 2**self.radius_bits - 1
        scale = half(radius.amax(-1, keepdim=True) / top)
        read = (radius / scale).round().clamp(0, top) * scale
        return (self.direction(unit.reshape(-1, 4)).view_as(chunks) * read.unsqueeze(-1)).flatten(
            -2
        )

    def code_bits(self, dim: int) -> float:
        return (self.direction_bits() + self.radius_bits) / CHUNK + 16 / dim


@dataclasses.dataclass
class RandomVQ(Directions):
    """A flat codebook of 2^index_bits random directions, no structure: searched exhaustively."""

    index_bits: int = 10

    def direction(self, unit: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        table = random_units(2**self.index_bits, generator).float()
        return table[nearest_row(unit, table)]

    def direction_bits(self) -> int:
        return self.index_bits


@dataclasses.dataclass
class Spherical(Directions):
    """Hyperspherical coordinates: two polar angles and an azimuth, each uniform."""

    angle_bits: tuple[int, int, int] = (4, 4, 4)

    def direction(self, unit: Tensor) -> Tensor:
        a, b, c, d = unit.unbind(-1)
        angles = (
            torch.atan2((b * b + c * c + d * d).sqrt(), a),
            torch.atan2((c * c + d * d).sqrt(), b),
            torch.atan2(d, c) + math.pi,
        )
        read = []
        for angle, width, span in zip(angles, self.angle_bits, (1, 1, 2), strict=True):
            step = span * math.pi / 2**width
            read.append(((angle / step).floor().clamp(0, 2**width - 1) + 0.5) * step)
        p, q, azimuth = read
        azimuth = azimuth - math.pi
        rest = p.sin() * q.sin()
        parts = (p.cos(), p.sin() * q.cos(), rest * azimuth.cos(), rest * azimuth.sin())
        return torch.stack(parts, -1)

    def direction_bits(self) -> int:
        return sum(self.angle_bits)


def k_means(x: Tensor, count: int, rounds: int = 6) -> Tensor:
    """`[count, 4]` centres of `[N, 4]`; empty ones go to random samples."""
    generator = torch.Generator().manual_seed(0)
    table = x[torch.randperm(len(x), generator=generator)[:count]].clone()
    for _ in range(rounds):
        owner = nearest_row(x, table)
        size = torch.bincount(owner, minlength=count)
        total = torch.zeros_like(table).index_add_(0, owner, x)
        table = total / size.clamp(min=1).unsqueeze(-1)
        empty = (size == 0).nonzero().squeeze(-1)
        table[empty] = x[torch.randint(len(x), (len(empty),), generator=generator)]
    return table


@dataclasses.dataclass
class LearnedVQ(Baseline):
    """VPTQ's structure: a codebook for each layer, by k-means on chunks of four of another text.

    Tokens are scaled by their root mean square, kept in 16 bits.
    """

    index_bits: int = 10
    samples: int = 2**14

    def __post_init__(self) -> None:
        self.tables: dict[int, Tensor] = {}

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = half(x.square().mean(-1, keepdim=True).sqrt())
        return (x / scale).unflatten(-1, (-1, CHUNK)), scale

    def fit(self, x: Tensor, layer: int) -> None:
        """Learn from `[B, H, n, D]` of a calibration text."""
        if self.center:
            n = x.shape[2] // self.block * self.block
            blocks = x[:, :, :n].unflatten(-2, (-1, self.block))
            x = (blocks - blocks.mean(-2, keepdim=True)).flatten(2, 3)
        chunks = self._scaled(x)[0].reshape(-1, CHUNK)
        order = torch.randperm(len(chunks), generator=torch.Generator().manual_seed(layer))
        self.tables[layer] = self.learn(chunks[order[: self.samples]])

    def learn(self, chunks: Tensor) -> Tensor:
        """The table of all codewords, `[2^index_bits, 4]`."""
        return k_means(chunks, 2**self.index_bits)

    def code(self, x: Tensor, layer: int) -> Tensor:
        if layer not in self.tables:
            raise RuntimeError(f"no codebook for layer {layer}: calibrate first")
        chunks, scale = self._scaled(x)
        table = self.tables[layer]
        return table[nearest_row(chunks.reshape(-1, CHUNK), table)].view_as(x) * scale

    def code_bits(self, dim: int) -> float:
        return self.index_bits / CHUNK + 16 / dim


@dataclasses.dataclass
class AdditiveVQ(LearnedVQ):
    """CommVQ's structure: the sum of one codeword of each of two learned codebooks.

    The search is over all sums, and includes the norm of the sum.
    """

    def learn(self, chunks: Tensor) -> Tensor:
        count = 2 ** (self.index_bits // 2)
        first = k_means(chunks, count)
        second = k_means(chunks - first[nearest_row(chunks, first)], count)
        for _ in range(6):  # assign to sums, then each codebook against the other's part
            owner = nearest_row(chunks, (first[:, None] + second).flatten(0, 1))
            i, j = owner // count, owner % count
            first = _centres(chunks - second[j], i, first)
            second = _centres(chunks - first[i], j, second)
        return (first[:, None] + second).flatten(0, 1)


def _centres(x: Tensor, owner: Tensor, before: Tensor) -> Tensor:
    size = torch.bincount(owner, minlength=len(before)).unsqueeze(-1)
    total = torch.zeros_like(before).index_add_(0, owner, x)
    return torch.where(size > 0, total / size.clamp(min=1), before)
