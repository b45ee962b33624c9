"""Quaternions as real 4-vectors (w, x, y, z), and the 24 unit Hurwitz quaternions.

The group 2T = {±1, ±i, ±j, ±k, (±1 ±i ±j ±k)/2} is the primary codebook of HQMQ
(arXiv 2605.27646, section 3): the vertices of the 24-cell.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Hamilton product of `[..., 4]` and `[..., 4]` (broadcast), in the order a·b."""
    a0, a1, a2, a3 = a.unbind(-1)
    b0, b1, b2, b3 = b.unbind(-1)
    return torch.stack(
        (
            a0 * b0 - a1 * b1 - a2 * b2 - a3 * b3,
            a0 * b1 + a1 * b0 + a2 * b3 - a3 * b2,
            a0 * b2 - a1 * b3 + a2 * b0 + a3 * b1,
            a0 * b3 + a1 * b2 - a2 * b1 + a3 * b0,
        ),
        -1,
    )


def conjugate(q: Tensor) -> Tensor:
    """`[..., 4]` with the vector part negated; the inverse of a unit quaternion."""
    return torch.cat((q[..., :1], -q[..., 1:]), -1)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Inner product over the last dimension (4), `[..., 4] -> [...]`.

    Written as three additions in a fixed order: a library reduction may sum in an order that
    depends on the shape, and then the code of a key would depend on its neighbours.
    """
    p0, p1, p2, p3 = (a * b).unbind(-1)
    return (p0 + p1) + (p2 + p3)


def norm(q: Tensor) -> Tensor:
    """Euclidean norm over the last dimension (4), `[..., 4] -> [...]`."""
    return dot(q, q).sqrt()


def _half_units() -> Tensor:
    rows = [tuple(float(i == k) for i in range(4)) for k in range(4)]
    rows += [(0.5, *signs) for signs in itertools.product((0.5, -0.5), repeat=3)]
    return torch.tensor(rows, dtype=torch.float32, device="cpu")


HALF_UNITS: Tensor = _half_units()
"""`[12, 4]` float32: one of each ± pair: 1, i, j, k, then (1 ±i ±j ±k)/2 (bit 2 of the position
less 4 is the sign of i, bit 1 of j, bit 0 of k)."""

HURWITZ_UNITS: Tensor = torch.cat((HALF_UNITS, -HALF_UNITS))
"""`[24, 4]` float32: the group 2T."""
