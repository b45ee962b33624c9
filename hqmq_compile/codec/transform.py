"""What happens to keys before they are quantised: centering and the signed Hadamard rotation.

Both use additions in a fixed order only, so the result for a token is the same on every device and
for every shape of the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .radius import HALF_MAX
from .tables import cached_table


def block_mean(x: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid tokens of a block, `[..., block, D] -> [..., D]` float16.

    Args:
        x: float32.
        valid: `[..., block]` bool; a block without valid tokens has mean 0.

    The sum is a pairwise tree (first half plus second half, and so on).
    """
    total = torch.where(valid.unsqueeze(-1), x, 0.0)
    while total.shape[-2] > 1:
        half = (total.shape[-2] + 1) // 2
        tail = total[..., half:, :]
        head = total[..., : tail.shape[-2], :] + tail
        total = torch.cat((head, total[..., tail.shape[-2] : half, :]), -2)
    count = valid.sum(-1, keepdim=True).clamp(min=1)
    return (total.squeeze(-2) / count).clamp(-HALF_MAX, HALF_MAX).to(torch.float16)


@cached_table(64)
def _signs(dim: int, seed: int, device: torch.device) -> Tensor:
    if dim & (dim - 1):
        raise ValueError(f"rotate=True needs a head_dim that is a power of two, got {dim}")
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = 2 * torch.randint(0, 2, (dim,), generator=generator, device="cpu") - 1
    return signs.to(device, torch.float32)


def _walsh(x: Tensor) -> Tensor:
    dim, width = x.shape[-1], 1
    while width < dim:
        a, b = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        width *= 2
    return x * (1 / math.sqrt(dim))


def rotate(x: Tensor, seed: int) -> Tensor:
    """x·R for R = `hadamard(D, seed)`, over the last dimension; float32."""
    return _walsh(x * _signs(x.shape[-1], seed, x.device))


def unrotate(x: Tensor, seed: int) -> Tensor:
    """x·R^T, the inverse of `rotate`."""
    return _walsh(x) * _signs(x.shape[-1], seed, x.device)


def hadamard(dim: int, seed: int) -> Tensor:
    """The orthogonal matrix R = diag(signs)·H / sqrt(D), `[D, D]` float32 on the CPU.

    A query that meets rotated keys is rotated alike: q·k = (q·R)·(k·R).
    """
    return rotate(torch.eye(dim, dtype=torch.float32, device="cpu"), seed)
