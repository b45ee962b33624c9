"""Caches in other layouts, and parts of slabs, become caches `[B, H, L, D]` of the graph.

`analyze` also runs the changed graph against eager: outputs, and every tensor written.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hqmq_compile.passes import graph_types as kinds
from hqmq_compile.passes.graph_types import part_of

aten = torch.ops.aten
B, H, HKV, L, D, N = 2, 4, 2, 16, 8, 3


def new(n, heads=HKV):
    return torch.randn(B, heads, n, D)


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def inputs(**caches):
    """Tokens `[B, N, heads, D]`, three positions, and caches."""
    tokens = [new(N, heads).transpose(1, 2).contiguous() for heads in (H, HKV, HKV)]
    return dict(zip("qkv", tokens, strict=True), pos=torch.arange(N) + 5, **caches)


def by_slot():
    return torch.randn(B, L, HKV, D)


# -- one cache, transposed -------------------------------------------------------------------------
def index_copied(q, k, v, pos, kc, vc):
    kc.index_copy_(1, pos, k)
    vc.index_copy_(1, pos, v)
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2))


def assigned(q, k, v, pos, kc, vc):
    kc[:, pos] = k
    vc[:, pos] = v
    keys, values = kc[:, :12].permute(0, 2, 1, 3), vc[:, :12].movedim(1, 2)
    return attend(q.transpose(1, 2), keys, values)


def sliced(q, k, v, pos, kc, vc):
    kc[:, 4:7] = k
    vc.narrow(1, 4, 3).copy_(v)
    keys, values = (x[:, :7].contiguous().transpose(1, 2) for x in (kc, vc))
    return attend(q.transpose(1, 2), keys, values)


def one_slot(q, k, v, pos, kc, vc):
    kc[:, 5] = k[:, 0]
    vc[:, 5] = v[:, 0]
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2))


def eager_repeated(q, k, v, pos, kc, vc):
    kc[:B, 4:7] = k
    vc[:B, 4:7] = v
    keys, values = (
        x[:B, :7][:, :, :, None].expand(B, 7, HKV, 2, D).reshape(B, 7, H, D).transpose(1, 2)
        for x in (kc, vc)
    )
    weights = q.transpose(1, 2) @ keys.transpose(2, 3) * 0.3
    return weights.softmax(-1) @ values


def interleaved(q, k, v, pos, kc, vc):
    kc.index_copy_(1, pos, k)
    vc.index_copy_(1, pos, v)
    keys, values = (x.repeat_interleave(2, 2).transpose(1, 2) for x in (kc, vc))
    return attend(q.transpose(1, 2), keys, values)


def returned(q, k, v, pos, kc, vc):
    return index_copied(q, k, v, pos, kc, vc), kc, vc


def results_read(q, k, v, pos, kc, vc):
    kc = kc.index_copy_(1, pos, k)
    vc = vc.index_copy_(1, pos, v)
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2)), vc


TRANSPOSED = [
    (index_copied, kinds.IN_PLACE),
    (assigned, kinds.IN_PLACE),
    (sliced, kinds.SLICE),
    (one_slot, kinds.SLICE),
    (eager_repeated, kinds.SLICE),
    (interleaved, kinds.IN_PLACE),
    (returned, kinds.IN_PLACE),
    (results_read, kinds.IN_PLACE),
]


@pytest.mark.parametrize(("function", "kind"), TRANSPOSED)
def test_slots_before_heads(analyze, function, kind):
    match = analyze(function)(*inputs(kc=by_slot(), vc=by_slot()).values()).match
    assert match.reason is None and match.kind == kind and match.source_name == "L['kc']"
    assert part_of(match.key.past).order == (0, 2, 1, 3)
    assert match.key.tokens.meta["val"].shape == (B, HKV, 1 if function is one_slot else N, D)
    # Dynamo returns inputs by itself, but not the results of writes.
    assert match.value.outputs == ([1] if function is results_read else [])


def test_slots_first(analyze):
    def step(q, k, v, pos, kc, vc):
        kc[pos] = k.transpose(0, 1)
        vc[pos] = v.transpose(0, 1)
        return attend(q.transpose(1, 2), kc.permute(1, 2, 0, 3), vc.permute(1, 2, 0, 3))

    caches = torch.randn(L, B, HKV, D), torch.randn(L, B, HKV, D)
    match = analyze(step)(*inputs(kc=caches[0], vc=caches[1]).values()).match
    assert match.reason is None and part_of(match.key.past).order == (1, 2, 0, 3)


def grown(q, k, v, pos, pk, pv):
    k, v = torch.cat([pk, k], 1), torch.cat([pv, v], 1)
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), k, v


def grown_window(q, k, v, pos, pk, pv):
    k, v = torch.cat([pk, k], 1), torch.cat([pv, v], 1)
    out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out, k[:, -6:], v[:, -6:]


def first_call(q, k, v, pos, pk, pv):
    k, v = k * 2, v * 2
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), k, v


@pytest.mark.parametrize("function", [grown, grown_window, first_call])
def test_growing(analyze, function):
    match = analyze(function)(*inputs(pk=by_slot(), pv=by_slot()).values()).match
    assert match.reason is None and match.kind == kinds.GROWING
    assert match.key.returned == (0, 2, 1, 3)
    assert (match.key.outputs, match.value.outputs) == ([1], [2])
    assert (match.key.keep == 6) == (function is grown_window)


def test_a_growing_cache_keeps_its_strides(analyze):
    """Also where it is left alone in the end."""
    graph = analyze(grown)(*inputs(pk=by_slot(), pv=by_slot()).values()).graph
    (output,) = graph.graph.find_nodes(op="output")
    assert all(node.meta["val"].is_contiguous() for node in output.args[0][1:])


# -- what is left alone ----------------------------------------------------------------------------
def read_elsewhere(q, k, v, pos, kc, vc):
    return index_copied(q, k, v, pos, kc, vc), kc.sum()


def returned_transposed(q, k, v, pos, kc, vc):
    return index_copied(q, k, v, pos, kc, vc), kc.transpose(1, 2)


def two_layouts(q, k, v, pos, kc, vc):
    again = attend(q.new_ones(B, H, 1, L), kc.permute(0, 2, 3, 1), vc.permute(0, 2, 3, 1))
    return index_copied(q, k, v, pos, kc, vc), again


def along_heads(q, k, v, pos, kc, vc):
    kc.index_copy_(2, pos[:2] - 5, k[:, :1].expand(B, L, HKV, D).contiguous())
    vc.index_copy_(2, pos[:2] - 5, v[:, :1].expand(B, L, HKV, D).contiguous())
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_elsewhere, "read by aten.sum at test_layouts.py:"),
        (returned_transposed, "returned in part or in another form"),
        (two_layouts, "read by attention in two layouts"),
        (along_heads, "written along dim 1, not along dim 2"),
    ],
)
def test_left_alone(analyze, function, reason):
    for match in analyze(function)(*inputs(kc=by_slot(), vc=by_slot()).values()).matches:
        assert reason in match.reason
