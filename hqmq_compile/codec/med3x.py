"""Med3x: chunks whose norm exceeds a multiple of the median chunk norm are stored on their own.

Source: arXiv 2605.27646, section 4, with one median per layer, head and role over the batch. The
default here is one median per token and head, which makes a token's code independent of its batch
and of how the writes were chunked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import tables
from .quaternion import norm
from .spec import CHUNK, CacheSpec
from .tables import cached_table

TILE = 32  # slots that share the power of two of their int8 outliers


def chunk_norms(x: Tensor) -> Tensor:
    """Norms of the chunks, `[..., D] -> [..., D/4]` float32."""
    return norm(x.float().unflatten(-1, (-1, CHUNK)))


def median(norms: Tensor, scope: str, valid: Tensor | None = None) -> Tensor:
    """The lower median of chunk norms, as `torch.median`; the one definition everyone uses.

    Args:
        norms: `[B, H, ..., C]` float32.
        scope: "token": over the chunks of a token and head, `[B, H, ..., 1]`; or "batch": over
            everything of a head (all of B, all tokens), `[1, H, 1, ..., 1]`.
        valid: `[B, H, ...]` bool: the tokens that count, for "batch".
    """
    if scope == "token":
        return norms.median(-1, keepdim=True).values
    if scope != "batch":
        raise ValueError(f'unknown Med3x scope {scope!r}; known are "token" and "batch"')
    if valid is not None:
        norms = torch.where(valid.unsqueeze(-1), norms, torch.nan)
    pooled = norms.transpose(0, 1).flatten(1).nanmedian(-1).values
    return pooled.view(1, -1, *[1] * (norms.dim() - 2))


def outlier_mask(spec: CacheSpec, norms: Tensor, median: Tensor) -> Tensor:
    """`[..., C]` bool: finite norms above spec.med3x medians. A NaN median has no outliers."""
    return (norms > spec.med3x * median) & norms.isfinite()


def fit_pool(
    mask: Tensor, norms: Tensor, slots: int, taken: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses which outliers of a block get a slot of its pool, and which slot.

    The largest norms win, and of equal norms the first. Slot numbers ascend in (token, chunk)
    order over the free slots.

    Args:
        mask: `[..., N]` bool, the outliers of a block in (token, chunk) order.
        norms: `[..., N]` float32.
        slots: capacity of the pool.
        taken: `[..., slots]` bool, slots in use by other tokens of the block; None for none.

    Returns:
        kept `[..., N]` bool, slot numbers `[..., N]` int32 (0 where not kept), and the number of
        outliers left out, `[...]` int64.
    """
    count = mask.sum(-1)
    room = torch.full_like(count, slots) if taken is None else slots - taken.sum(-1)
    over = count > room
    if not tables.may_branch(mask):
        kept = _largest(mask, norms, room)
    elif bool(over.any()):
        kept = mask.clone()
        kept[over] = _largest(mask[over], norms[over], room[over])
    else:
        kept = mask
    slot = (kept.cumsum(-1, dtype=torch.int32) - 1).clamp_(min=0)
    if taken is not None:
        free = taken.to(torch.uint8).argsort(dim=-1, stable=True)  # free slots first, ascending
        slot = free.gather(-1, slot.long().clamp_(max=slots - 1)).int()
    return kept, slot * kept, (count - room).clamp_(min=0)


def _largest(mask: Tensor, norms: Tensor, room: Tensor) -> Tensor:
    key = torch.where(mask, norms, -1.0)
    order = key.argsort(dim=-1, descending=True, stable=True)
    wins = torch.arange(mask.shape[-1], device=mask.device) < room.unsqueeze(-1)
    return torch.zeros_like(mask).scatter_(-1, order, wins.expand_as(mask)) & mask


# -- int8 outliers with a power of two per tile ------------------------------------------------
@cached_table(64)
def power_table(device: torch.device) -> Tensor:
    """`[256]` float32: 2^(i - 128), with i < 2 left at the smallest normal number."""
    powers = [2.0 ** max(i - 128, -126) for i in range(256)]
    return torch.tensor(powers, dtype=torch.float32, device=device)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponent, exactly, as float32, for int8 exponents."""
    return power_table(exponents.device)[exponents.int() + 128]


def shared_exponent(amax: Tensor) -> Tensor:
    """The smallest e (int8, at least -126) with amax <= 127 · 2^e; 0 for amax = 0."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa · 2^exponent, mantissa in [1/2, 1)
    e = exponent - 7 + (mantissa > 127 / 128).int()
    return torch.where(amax > 0, e.clamp(-126, 127), 0).to(torch.int8)


def tile_exponents(spec: CacheSpec, values: Tensor, kept: Tensor) -> Tensor:
    """Exponents of the tiles of blocks.

    Args:
        values: `[..., block, C, 4]` float32.
        kept: `[..., block, C]` bool, its outliers.

    Returns:
        `[..., tiles]` int8.
    """
    amax = torch.where(kept, values.abs().amax(-1), 0.0).amax(-1)  # [..., block]
    tiles = [part.amax(-1) for part in amax.split(TILE, -1)]
    return shared_exponent(torch.stack(tiles, -1))
