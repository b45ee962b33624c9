"""Attention over packed caches on the CPU, and the reference of the GPU kernels.

Reads the cache a tile at a time (never the whole of it in float32) and merges the tiles by their
running maximum and sum, as split-KV kernels do. Accumulates in float32. Products with the cache are
plain torch on decoded tokens, or those of `kernels/cpu_tile.py`, which reads the codes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch

from ..codec.spec import CacheSpec
from .buffers import LENGTH, PACKED, Buffers
from .read import read_slots

TILE = 1 << 19  # elements dequantized at once: 2 MB of float32, some of it still in cache when read


@dataclasses.dataclass(frozen=True)
class DenseTile:
    """Tokens as they are."""

    values: torch.Tensor  # float32 [B, H, n, D]

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Products of `rows` `[B, H, R, D]` and every token, `[B, H, R, n]`."""
        return torch.matmul(rows, self.values.mT)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """The sum of the tokens, weighted by `[B, H, R, n]`: `[B, H, R, D]`."""
        return torch.matmul(weights, self.values)


@dataclasses.dataclass(frozen=True)
class Fresh:
    """Tokens of this call that attention sees as they came (`prefill="exact"`)."""

    key: torch.Tensor  # [B, H, n, D]
    value: torch.Tensor  # [B, H, n, Dv]
    slot: int  # absolute slot of the first


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
    fresh: Fresh | None = None,
    fused: Callable | None = None,
) -> torch.Tensor:
    """Scaled-dot-product attention of `query` `[B, Hq, n, D]` over absolute slots first..first+length-1.

    `mask` is bool (True: visible) or additive, broadcastable to `[B, Hq, n, length]`. `causal` has the
    meaning of `scaled_dot_product_attention`: query i sees keys 0..i of the slots read. `softcap` c > 0
    maps logits to c tanh(logit / c). `sinks` `[Hq]` are extra logits that take probability and no value
    (gpt-oss). `fused` makes the tiles instead of `DenseTile`: `kernels.cpu_tile.read_tile`. Returns
    `[B, Hq, n, Dv]` in the dtype of `query`; a row that sees nothing is zero.
    """
    batch, query_heads, n, _ = query.shape
    heads = key.codes.shape[1]
    group = query_heads // heads
    if fresh is not None and _only_fresh(mask, causal, first, length, fresh):
        out = _attend_fresh(query, first, length, scale, mask, causal, softcap, sinks, fresh)
        if out is not None:
            return out
    rows = query.reshape(batch, heads, group * n, -1).float() * scale
    bias, visible = _canonical_mask(mask, n, length, causal, query.device)
    top = torch.full((batch, heads, group * n, 1), -math.inf, device=query.device)
    total = torch.zeros_like(top)
    acc = torch.zeros(batch, heads, group * n, value_spec.head_dim, device=query.device)
    if sinks is not None:
        top = sinks.float().view(1, heads, group, 1).expand(batch, heads, group, n)
        top = top.reshape(batch, heads, group * n, 1).clone()
        total = torch.ones_like(top)
    key_state, value_state = key.state.tolist(), value.state.tolist()
    widest = group * n if fused else max(key_spec.head_dim, value_spec.head_dim)
    step = max(TILE // (batch * heads * widest), 1)
    border = (key_state[LENGTH] if fused else key_state[PACKED]) - first
    for a, b in _tiles(length, step, border):
        if visible is not None:  # skip what no query of this call can see
            seen = visible[a:b].nonzero()
            if not len(seen):
                continue
            a, b = a + int(seen[0]), a + int(seen[-1]) + 1
        slots = (first + a, first + b)
        keys = _tile(key_spec, key, *slots, key_state, fresh and fresh.key, fresh, fused)
        scores = keys.scores(rows)
        if softcap:
            scores = torch.tanh(scores / softcap).mul_(softcap)
        scores = scores.view(batch, query_heads, n, b - a)
        if bias is not None:
            part = bias[..., a:b]
            if part.dtype == torch.bool:
                scores = scores.masked_fill_(~part, -math.inf)
            else:
                scores = scores.add_(part)
        if causal:
            q = torch.arange(n, device=query.device)
            hidden = torch.arange(a, b, device=query.device)[None, :] > q[:, None]
            scores = scores.masked_fill_(hidden, -math.inf)
        scores = scores.view(batch, heads, group * n, b - a)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        safe = torch.where(higher == -math.inf, 0.0, higher)
        scores = scores.sub_(safe).exp_()
        shrink = torch.exp(top - safe)
        total = total * shrink + scores.sum(-1, keepdim=True)
        values = _tile(value_spec, value, *slots, value_state, fresh and fresh.value, fresh, fused)
        acc = acc * shrink + values.weighted_sum(scores)
        top = higher
    out = acc / torch.where(total == 0, 1.0, total)
    return out.view(batch, query_heads, n, -1).to(query.dtype)


def _tiles(length: int, step: int, border: int) -> list[tuple[int, int]]:
    """Ranges of at most `step` slots that cover 0..length-1, none across `border`."""
    parts = ((0, min(max(border, 0), length)), (min(max(border, 0), length), length))
    return [(a, min(a + step, end)) for begin, end in parts for a in range(begin, end, step)]


def _tile(spec, buffers, first, last, state, exact, fresh, fused):
    """Slots first..last-1; tokens of this call as they came where `exact` is given."""
    if fresh is not None:
        a, b = max(first, fresh.slot), min(last, fresh.slot + exact.shape[2])
        if a < b:
            parts = [exact[:, :, a - fresh.slot : b - fresh.slot].float()]
            if first < a:
                parts.insert(0, read_slots(spec, buffers, first, a, state))
            if b < last:
                parts.append(read_slots(spec, buffers, b, last, state))
            return DenseTile(parts[0] if len(parts) == 1 else torch.cat(parts, dim=2))
    if fused is not None:
        return fused(spec, buffers, first, last, state)
    return DenseTile(read_slots(spec, buffers, first, last, state))


def _canonical_mask(mask, n, length, causal, device):
    """(mask of 4 dims or None, bool `[length]` of the keys that some query sees, or None for all).

    With a very negative additive mask a key counts as hidden only if every row sees another key:
    a row that sees nothing keeps the uniform weights that softmax gives it.
    """
    if causal:
        visible = torch.arange(length, device=device) < n
    if mask is None:
        return None, (visible if causal else None)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    mask = mask.expand(*mask.shape[:-1], length)
    if mask.dtype == torch.bool:
        open_ = mask
    else:
        mask = mask.float()
        open_ = mask > torch.finfo(torch.float32).min / 4
        if not open_.any(-1).all():
            open_ = mask != -math.inf
    seen = open_.flatten(0, -2).any(0)
    return mask, (seen & visible if causal else seen)


def _only_fresh(mask, causal, first, length, fresh) -> bool:
    """Whether every key that can be seen is a token of this call (a first prefill)."""
    a, b = fresh.slot - first, fresh.slot - first + fresh.key.shape[2]
    if a < 0 or b > length:
        return False
    if (a, b) == (0, length):
        return True
    if a == 0 and causal:
        return True
    if mask is None or mask.shape[-1] != length:
        return False
    hidden = torch.cat([mask[..., :a], mask[..., b:]], dim=-1)
    if mask.dtype == torch.bool:
        return not bool(hidden.any())
    if bool((hidden > torch.finfo(mask.dtype).min / 4).any()):
        return False
    return bool((mask > torch.finfo(mask.dtype).min / 4).any(-1).all())


def _attend_fresh(query, first, length, scale, mask, causal, softcap, sinks, fresh):
    """A first prefill is plain SDPA. None where SDPA cannot say it (softcap, sinks)."""
    if softcap or sinks is not None:
        return None
    a, b = fresh.slot - first, fresh.slot - first + fresh.key.shape[2]
    if mask is not None and mask.shape[-1] == length:
        mask = mask[..., a:b]
    key, value = fresh.key.to(query.dtype), fresh.value.to(query.dtype)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, 0.0, causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.contiguous()  # SDPA keeps the strides of the query; the op promises contiguous
