"""Caches that are packed although their readers cannot read packed bits, and those that are not."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from hqmq_compile.passes.read_dense import read_dense

L, D = 16, 8


def new(slots: int, heads: int = 2) -> torch.Tensor:
    return torch.randn(1, heads, slots, D)


def eager(q, k, v):
    """Attention that is found but not rewritten: `relu` is in the way."""
    return torch.relu(q @ k.mT).softmax(-1) @ v


def in_place(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return eager(q, kc, vc)


def growing(q, k, v, kc, vc, pos):
    kc, vc = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
    return eager(q, kc, vc), kc, vc


def first_call(q, k, v, kc, vc, pos):
    return eager(q, kc, vc), kc.clone(), vc.clone()


def sliding(q, k, v, kc, vc, pos):
    kc, vc = torch.cat([kc, k], 2), torch.cat([vc, v], 2)
    return eager(q, kc, vc), kc[:, :, -L:], vc[:, :, -L:]


def rolled(q, k, v, kc, vc, pos):
    for cache, token in ((kc, k), (vc, v)):
        full = cache.roll(-1, dims=2)
        full[:, :, -1:] = token
        cache.copy_(full)
    return eager(q, kc, vc)


def rotated_on_read(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    half = torch.cat([-kc[..., D // 2 :], kc[..., : D // 2]], -1)
    return scaled_dot_product_attention(q, kc * 0.5 + half * 0.5, vc)


def state(q, k, v, kc, vc, pos):
    """A recurrent state is replaced as a whole in each call."""
    kc.copy_(kc.tanh())
    vc.copy_(vc.tanh())
    return eager(q, kc, vc)


def read_before(q, k, v, kc, vc, pos):
    old = kc.sum() + vc.sum()
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return eager(q, kc, vc) + old


def written_twice(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    kc.mul_(2)
    vc.mul_(2)
    return eager(q, kc, vc)


def both(analyze, function):
    """The matches before and after the pass."""
    args = (new(1), new(1), new(1), new(L), new(L), torch.tensor([3]))
    analysis = analyze(function)(*args)
    reasons = [match.reason for match in analysis.matches]
    return reasons, read_dense(analysis.graph.graph, analysis.matches), analysis.graph.graph


@pytest.mark.parametrize("function", [in_place, growing, sliding, rolled, rotated_on_read])
def test_packed_and_read_dense(analyze, function):
    reasons, (match,), graph = both(analyze, function)
    assert match.reason is None and match.dense.startswith(reasons[0])
    order = list(graph.nodes)
    for write in (match.key, match.value):
        assert write.past.meta["hqmq_source"] == ("L['kc']" if write is match.key else "L['vc']")
        assert write.dense.nodes and write.dense.length
        last = max(order.index(node) for node in write.dense.nodes)
        assert order.index(write.dense.anchor) > last
        assert all(node in order for node in write.dense.inside)
    graph.lint()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (state, None),
        (read_before, "read by aten.sum at test_read_dense.py"),
        (written_twice, "written again by aten.mul_ at test_read_dense.py"),
    ],
)
def test_left_alone(analyze, function, why):
    reasons, (match, *_), _ = both(analyze, function)
    assert match.reason is not None and not match.dense
    assert match.reason.startswith(reasons[0])
    assert why is None or why in match.reason


def test_fused_matches_stay_as_they_are(analyze):
    def fused(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        return scaled_dot_product_attention(q, kc, vc)

    reasons, (match,), _ = both(analyze, fused)
    assert reasons == [None] and match.dense == "" and match.key.dense is None
