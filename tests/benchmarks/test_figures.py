"""The figures of the documentation show what they say."""

from __future__ import annotations

import torch

from benchmarks.figures import coxeter_plane
from hqmq_compile.codec.quaternion import HURWITZ_UNITS


def test_the_24_cell_falls_on_two_rings_of_twelve():
    radius = coxeter_plane(HURWITZ_UNITS).norm(dim=-1).sort().values
    torch.testing.assert_close(radius[:12], radius[:1].expand(12), rtol=1e-4, atol=0)
    torch.testing.assert_close(radius[12:], radius[-1:].expand(12), rtol=1e-4, atol=0)
    assert radius[-1] > 1.5 * radius[0]


def test_the_24_cell_has_96_edges():
    assert int((HURWITZ_UNITS @ HURWITZ_UNITS.t() > 0.49).triu(1).sum()) == 96
