"""Attention of many query tokens: the cache as a dense scratch tensor, then torch's own attention."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

SCORES_AT_ONCE = 2**26  # float32 scores that exist at a time where SDPA cannot help


def attend_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None,
    causal: bool,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of `[B, Hq, n, D]` over `[B, H, T, D]` and `[B, H, T, Dv]`, all of one dtype.

    The options mean what they mean in `launch.attend`; mask: 4 dimensions, broadcastable to
    `[B, Hq, n, T]`. A row that sees nothing is zero. The result is contiguous.
    """
    if mask is not None and causal:
        mask, causal = _with_causal(mask, query.shape[2], key.shape[2]), False
    if softcap or sinks is not None:
        return _plain(query, key, value, scale, mask, causal, softcap, sinks)
    group = query.shape[1] // key.shape[1]
    if mask is None:
        out = scaled_dot_product_attention(
            query, key, value, None, 0.0, causal, scale=scale, enable_gqa=group > 1
        )
        return out.contiguous()  # SDPA keeps the strides of the query
    if group > 1:  # with a mask, only the backend that keeps all scores in memory takes groups
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    out = scaled_dot_product_attention(query, key, value, _mask_like(mask, query), 0.0, scale=scale)
    open_rows = (mask if mask.dtype == torch.bool else mask > -math.inf).any(-1, keepdim=True)
    return torch.where(open_rows, out, 0.0).contiguous()


def _with_causal(mask: torch.Tensor, n: int, length: int) -> torch.Tensor:
    seen = torch.ones(n, length, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return mask & seen
    return torch.where(seen, mask, -math.inf)


def _mask_like(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """The mask in a dtype that SDPA takes: very negative numbers stay finite, -inf stays -inf."""
    if mask.dtype == torch.bool or mask.dtype == query.dtype:
        return mask
    lowest = torch.finfo(query.dtype).min
    return torch.where(mask == -math.inf, mask, mask.clamp(min=lowest)).to(query.dtype)


def _plain(query, key, value, scale, mask, causal, softcap, sinks) -> torch.Tensor:
    # Softcap and sinks, a few query tokens at a time.
    batch, query_heads, n, _ = query.shape
    heads, length = key.shape[1], key.shape[2]
    group = query_heads // heads
    out = query.new_empty(batch, query_heads, n, value.shape[-1])
    key, value = key.float().transpose(-1, -2), value.float()
    step = max(1, SCORES_AT_ONCE // (batch * query_heads * length))
    for a in range(0, n, step):
        b = min(a + step, n)
        rows = query[:, :, a:b].float().reshape(batch, heads, group * (b - a), -1)
        scores = torch.matmul(rows, key).mul_(scale)
        if softcap:
            scores = torch.tanh(scores.div_(softcap)).mul_(softcap)
        scores = scores.view(batch, query_heads, b - a, length)
        if mask is not None:
            part = mask if mask.shape[2] == 1 else mask[:, :, a:b]
            if part.dtype == torch.bool:
                scores.masked_fill_(~part, -math.inf)
            else:
                scores.add_(part)
        if causal:
            token = torch.arange(a, b, device=query.device)[:, None]
            hidden = torch.arange(length, device=query.device)[None, :] > token
            scores.masked_fill_(hidden, -math.inf)
        top = scores.amax(-1, keepdim=True)
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1)
            top = torch.maximum(top, sink)
        top = torch.where(top == -math.inf, 0.0, top)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + torch.exp(sink - top)
        weights = weights / torch.where(total == 0, 1.0, total)
        weights = weights.view(batch, heads, group * (b - a), length)
        out[:, :, a:b] = torch.matmul(weights, value).view(batch, query_heads, b - a, -1)
    return out
