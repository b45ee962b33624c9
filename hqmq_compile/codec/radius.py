"""Radii of chunks: a scale per group of 64 elements (or per token), and uniform levels below it.

Radius r is stored as level = round(r / scale · top_level); it reads as level · scale / top_level.
Scales cover the chunks that are not outliers. Scale code 0 (float16: 0.0) means "empty token".
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import CHUNK, CacheSpec
from .tables import cached_table

GROUP_CHUNKS = 64 // CHUNK  # chunks that share one 8-bit scale
HALF_MAX, HALF_TINY = 65504.0, 2.0**-24  # the largest and the smallest positive float16


@cached_table(64)
def scale_table(device: torch.device) -> Tensor:
    """`[256]` float32: the value of every 8-bit scale code; code 0 is 0, c is 2^((c - 128) / 8)."""
    values = [0.0] + [2.0 ** ((code - 128) / 8) for code in range(1, 256)]
    return torch.tensor(values, dtype=torch.float32, device=device)


def group_amax(spec: CacheSpec, radii: Tensor) -> Tensor:
    """Largest radius of every scale group, `[..., C] -> [..., scale_groups]`."""
    if spec.scale_groups == 1:
        return radii.amax(-1, keepdim=True)
    return torch.stack([part.amax(-1) for part in radii.split(GROUP_CHUNKS, -1)], -1)


def scale_encode(spec: CacheSpec, amax: Tensor) -> Tensor:
    """Scale codes of group maxima `[..., G]` (float32): uint8 or float16, never the empty code.

    log8: the smallest code whose scale reaches amax, clamped to 1..255 (so a maximum above 6.0e4
    saturates, and a non-finite one gets 255). Found by comparing with the table: log2 is rounded
    differently in different kernels. float16: the nearest, clamped to the finite range; NaN for a
    non-finite maximum, so the token reads as NaN.
    """
    if spec.scale == "float16":
        half = amax.clamp(HALF_TINY, HALF_MAX)
        return torch.where(amax.isfinite(), half, torch.nan).to(torch.float16)
    table = scale_table(amax.device)[1:]
    code = torch.bucketize(amax.nan_to_num(torch.inf), table) + 1
    return code.clamp_(max=255).to(torch.uint8)


def scale_decode(spec: CacheSpec, codes: Tensor) -> Tensor:
    """Scales `[..., G]` float32 of scale codes; 0 for an empty token."""
    if spec.scale == "float16":
        return codes.float()
    table = scale_table(codes.device)
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def per_chunk(spec: CacheSpec, groups: Tensor) -> Tensor:
    """`[..., G] -> [..., C]`, every group's value repeated over its chunks (or `[..., 1]`)."""
    if spec.scale_groups == 1:
        return groups
    return groups.repeat_interleave(GROUP_CHUNKS, -1)[..., : spec.chunks]


def radius_codes(spec: CacheSpec, radii: Tensor, scales: Tensor) -> Tensor:
    """Stored radius codes, `[..., C]` int32.

    Args:
        radii: `[..., C]` float32.
        scales: `[..., G]` float32 as decoded; not 0 where the code matters.
    """
    level = (radii / per_chunk(spec, scales) * spec.top_level).round_()
    lowest = 0 if spec.zero_level else 1
    level = level.nan_to_num_(lowest).clamp_(lowest, spec.top_level)
    return level.int() - spec.level_offset
