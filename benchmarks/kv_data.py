"""Random keys and values that make the codec work as real ones do, and packed caches of them.

Keys have a mean per channel and 4 % of their chunks are eight times as long as the others: Med3x takes
those for outliers. Values are plain normal numbers.
"""

from __future__ import annotations

import torch

import hqmq_compile.ops  # noqa: F401  registers the ops
from hqmq_compile.cache.buffers import Buffers
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.codec.spec import CHUNK, CacheSpec
from hqmq_compile.config import HQMQConfig

OUTLIERS, LOUD = 0.04, 8.0
# What the kernels cost without outliers, means and sinks: the codes, and the window.
STRIPPED = HQMQConfig(med3x=None, center="none", sink_tokens=0)


def specs(config: HQMQConfig, dim: int, dtype: torch.dtype) -> tuple[CacheSpec, CacheSpec]:
    """Of keys and values."""
    return config.spec("key", dim, dtype), config.spec("value", dim, dtype)


def fill_keys_(keys: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random keys in place of `keys` `[B, H, T, D]`, whatever its strides."""
    batch, heads, _, dim = keys.shape
    options = {"device": keys.device, "generator": generator}
    mean = torch.randn(batch, heads, 1, dim, **options).to(keys.dtype)
    for row, shift in zip(keys, mean, strict=True):  # row by row: little scratch is needed
        fresh = torch.randn(row.shape, dtype=row.dtype, **options)
        loud = torch.rand(*row.shape[:2], dim // CHUNK, 1, **options) < OUTLIERS
        fresh.unflatten(-1, (-1, CHUNK)).mul_(torch.where(loud, LOUD, 1.0).to(row.dtype))
        row.copy_(fresh.add_(shift))
    return keys


def fill_values_(values: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Random values in place of `values` `[B, H, T, D]`, whatever its strides."""
    options = {"device": values.device, "generator": generator}
    for row in values:
        row.copy_(torch.randn(row.shape, dtype=row.dtype, **options))
    return values


def store_of(spec: CacheSpec, tokens: torch.Tensor) -> PackedKV:
    """A packed static cache whose slots all hold `tokens` `[B, H, T, D]`."""
    batch, heads, length, _ = tokens.shape
    store = PackedKV.empty(spec, batch, heads, length, device=tokens.device)
    write(spec, store.buffers, tokens)
    return store


def write(
    spec: CacheSpec,
    buffers: Buffers,
    tokens: torch.Tensor,
    start: int = 0,
    positions: torch.Tensor | None = None,
) -> None:
    """Write by the op that a compiled model calls."""
    torch.ops.hqmq.write(tokens, positions, start, 0, 0, *buffers, None, str(spec), "auto")


def clone(buffers: Buffers) -> Buffers:
    """The same content in other memory."""
    return Buffers(*(t.clone() for t in buffers))


def outlier_share(keys: torch.Tensor, block: int = 64) -> float:
    """Share of chunks of `keys` `[B, H, T, D]` longer than three medians of their token."""
    part = keys[:1, :, : 16 * block].float()
    blocks = part[:, :, : part.shape[2] // block * block].unflatten(2, (-1, block))
    norms = (blocks - blocks.mean(3, keepdim=True)).unflatten(-1, (-1, CHUNK)).norm(dim=-1)
    return float((norms > 3 * norms.median(-1, keepdim=True).values).float().mean())
