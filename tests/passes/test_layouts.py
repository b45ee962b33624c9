"""Caches in other layouts, and parts of slabs, become caches `[B, H, L, D]` of the graph.

`analyze` also runs the changed graph against eager: outputs, and every tensor written.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hqmq_compile import HQMQConfig
from hqmq_compile.passes import graph_types as kinds
from hqmq_compile.passes import pipeline
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


def eager_turned_at_once(q, k, v, pos, kc, vc):
    kc.index_copy_(1, pos, k)
    vc.index_copy_(1, pos, v)
    keys, values = (x.repeat_interleave(2, 2) for x in (kc, vc))
    return (q.transpose(1, 2) @ keys.permute(0, 2, 3, 1)).softmax(-1) @ values.transpose(1, 2)


def test_keys_turned_at_once(analyze):
    match = analyze(eager_turned_at_once)(*inputs(kc=by_slot(), vc=by_slot()).values()).match
    assert match.reason is None and match.attention.groups == 2


def test_keys_that_lie_transposed(analyze):
    """`[B, H, D, L]`, as a matrix product likes them."""

    def step(q, k, v, pos, kc, vc):
        kc[..., pos] = k.permute(0, 2, 3, 1)
        vc[:, :, pos] = v.transpose(1, 2)
        return (q.transpose(1, 2) @ kc.repeat_interleave(2, 1)).softmax(-1) @ vc.repeat_interleave(
            2, 1
        )

    def sdpa(q, k, v, pos, kc, vc):
        kc[..., pos] = k.permute(0, 2, 3, 1)
        vc[:, :, pos] = v.transpose(1, 2)
        return attend(q.transpose(1, 2), kc.mT, vc)

    caches = dict(kc=torch.randn(B, HKV, D, L), vc=new(L))

    def plain(q, k, v, pos, kc, vc):
        kc[..., pos] = k.permute(0, 2, 3, 1)
        vc[:, :, pos] = v.transpose(1, 2)
        return (q.transpose(1, 2)[:, :HKV] @ kc).softmax(-1) @ vc

    for function in (sdpa, step, plain):
        match = analyze(function)(*inputs(**caches).values()).match
        assert match.reason is None and part_of(match.key.past).order == (0, 1, 3, 2)


def shifted(q, k, v, pos, kc, vc):
    kc.copy_(torch.cat((kc[:, N:], k), 1))
    vc.copy_(torch.cat((vc[:, N:], v), 1))
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2))


def shifted_and_read_before(q, k, v, pos, kc, vc):
    k, v = torch.cat((kc[:, 1:], k), 1), torch.cat((vc[:, 1:], v), 1)
    kc.copy_(k[:, -L:])
    vc.copy_(v[:, -L:])
    return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


def rolled(q, k, v, pos, kc, vc):
    keys, values = kc.roll(-N, 1), vc.roll(-N, dims=-3)
    keys[:, -N:] = k
    values[:, -N:] = v
    kc.copy_(keys)
    vc.copy_(values)
    return attend(q.transpose(1, 2), kc.transpose(1, 2), vc.transpose(1, 2))


@pytest.mark.parametrize("function", [shifted, shifted_and_read_before, rolled])
def test_windows(analyze, function):
    match = analyze(function)(*inputs(kc=by_slot(), vc=by_slot()).values()).match
    assert match.reason is None and match.kind == kinds.WINDOW
    first, length = (1, L - 1 + N) if function is shifted_and_read_before else (N, L)
    assert (match.key.start, match.key.keep, match.first, match.length) == (L, L, first, length)


# -- what is left alone ----------------------------------------------------------------------------
def read_elsewhere(q, k, v, pos, kc, vc):
    return index_copied(q, k, v, pos, kc, vc), kc.sum()


def returned_transposed(q, k, v, pos, kc, vc):
    return index_copied(q, k, v, pos, kc, vc), kc.transpose(1, 2)


def rows_of_the_batch(q, k, v, pos, kc, vc):
    kc[:1, 4:7] = k[:1]
    vc[:1, 4:7] = v[:1]
    return attend(q[:1].transpose(1, 2), kc[:1].transpose(1, 2), vc[:1].transpose(1, 2))


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
        (rows_of_the_batch, "the cache is read through aten.slice at test_layouts.py:"),
        (two_layouts, "read by attention in two layouts"),
        (along_heads, "written along dim 1, not along dim 2"),
    ],
)
def test_left_alone(analyze, function, reason):
    for match in analyze(function)(*inputs(kc=by_slot(), vc=by_slot()).values()).matches:
        assert reason in match.reason


# -- slabs -----------------------------------------------------------------------------------------
def slab_of(*lead):
    return torch.randn(*lead, B, HKV, L, D)


def heads_first(q, k, v):
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def two_parts(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    slab[0].index_copy_(2, pos, k)
    slab[1, :, :, pos] = v
    return attend(q, slab[0], slab.select(0, -1))


def unbound(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    keys, values = slab
    keys[:, :, 4:7] = k
    values[:, :, 4:7] = v
    keys, values = slab[..., :7, :].unbind(0)
    return attend(q, keys, values)


def both_at_once(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    slab[:, :, :, pos] = torch.stack([k, v])
    return attend(q, *slab)


def both_copied(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    slab.narrow(3, 4, 3).copy_(torch.stack([k, v]))
    return attend(q, slab[0, :, :, :7], slab[1, :, :, :7])


@pytest.mark.parametrize("function", [two_parts, unbound, both_at_once, both_copied])
def test_parts_of_a_slab(analyze, function):
    match = analyze(function)(*inputs(slab=slab_of(2)).values()).match
    assert match.reason is None and match.kind == kinds.SLAB
    parts = [part_of(write.past) for write in (match.key, match.value)]
    assert [part.index for part in parts] == [(0,), (1,)]
    assert all(part.lead == (2,) and part.order == (0, 1, 2, 3, 4) for part in parts)
    assert match.source_name == "L['slab'][0]"


def test_stacked_layers(analyze):
    def step(q, k, v, pos, slab):
        q, k, v = heads_first(q, k, v)
        out = 0
        for layer in range(3):
            keys, values = slab[layer, 0], slab[layer, 1]
            keys.index_copy_(2, pos, k)
            values.index_copy_(2, pos, v)
            out = out + attend(q, keys, values)
        return out

    matches = analyze(step)(*inputs(slab=slab_of(3, 2)).values()).matches
    assert [m.reason for m in matches] == [None] * 3
    assert [part_of(m.value.past).index for m in matches] == [(0, 1), (1, 1), (2, 1)]


def test_parts_in_the_middle_of_other_dims(analyze):
    def step(q, k, v, pos, slab):
        slab[:B, 4:7] = torch.stack([k, v], 2)
        keys, values = slab[:, :7].unbind(2)
        return attend(q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2))

    match = analyze(step)(*inputs(slab=torch.randn(B, L, 2, HKV, D)).values()).match
    assert match.reason is None and part_of(match.key.past).order == (2, 0, 3, 1, 4)


def born_slab(q, k, v, pos):
    slab = torch.zeros(2, B, HKV, L, D)
    return two_parts(q, k, v, pos, slab), slab


def born_by_slot(q, k, v, pos):
    kc, vc = torch.zeros(B, L, HKV, D), torch.zeros(B, L, HKV, D)
    return index_copied(q, k, v, pos, kc, vc), kc, vc


@pytest.mark.parametrize("function", [born_slab, born_by_slot])
def test_born_in_the_graph(analyze, function):
    match = analyze(function)(*inputs().values()).match
    assert match.reason is None and match.key.born is not None
    slab = function is born_slab
    assert match.kind == (kinds.SLAB if slab else kinds.BORN)
    assert (match.key.outputs, match.value.outputs) == ([1], [1] if slab else [2])


# -- slabs that are left alone ---------------------------------------------------------------------
def read_whole(q, k, v, pos, slab):
    return two_parts(q, k, v, pos, slab), slab.sum()


def one_part_read(q, k, v, pos, slab):
    return two_parts(q, k, v, pos, slab), slab[1].exp()


def zeroed(q, k, v, pos, slab):
    slab.zero_()
    return two_parts(q, k, v, pos, slab)


def part_returned(q, k, v, pos, slab):
    return two_parts(q, k, v, pos, slab), slab[0]


def grown_slab(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    slab = torch.cat([slab, torch.stack([k, v])], 3)
    return attend(q, slab[0], slab[1]), slab


def grown_and_stacked(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    k, v = torch.cat([slab[0], k], 2), torch.cat([slab[1], v], 2)
    return attend(q, k, v), torch.stack([k, v])


def written_in_steps(q, k, v, pos, slab):
    slab[0].index_copy_(2, pos, k.transpose(1, 2))
    return two_parts(q, k, v, pos, slab)


def one_part_for_both(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    slab[0].index_copy_(2, pos, k)
    return attend(q, slab[0], slab[0])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (read_whole, "larger tensor, which is read by aten.sum at test_layouts.py:"),
        (one_part_read, "value cache is read by aten.exp at test_layouts.py:"),
        (zeroed, "larger tensor, which is also written by aten.zero_ at test_layouts.py:"),
        (part_returned, "key cache is returned in part"),
        (grown_slab, "grown by aten.cat at test_layouts.py:"),
        (grown_and_stacked, "returned as a part of a larger tensor, by aten.stack at test_layouts"),
        (written_in_steps, "key: written again by aten.index_copy_"),
        (one_part_for_both, "keys and values share one cache"),
    ],
)
def test_slabs_left_alone(analyze, function, reason):
    assert reason in analyze(function)(*inputs(slab=slab_of(2)).values()).match.reason


def run_pipeline(function, config, *args):
    results = []

    def backend(gm, example_inputs):
        results.append(pipeline.run(gm, config))
        return gm.forward

    with torch.no_grad():
        torch.compile(function, backend=backend)(*args)
    return results[0]


def layers_of(q, k, v, pos, slab):
    q, k, v = heads_first(q, k, v)
    out = []
    for layer in range(2):
        slab[layer, 0].index_copy_(2, pos, k)
        slab[layer, 1].index_copy_(2, pos, v)
        out.append(attend(q, slab[layer, 0], slab[layer, 1]))
    return out


def some_layers_of(q, k, v, pos, slab):
    return layers_of(q, k, v, pos, slab[1:3])


def layers_and_writer(q, k, v, pos, slab):
    out = layers_of(q, k, v, pos, slab)
    slab[1, 0].mul_(0.5)
    return out


@pytest.mark.parametrize(
    ("function", "lead", "config", "reason"),
    [
        (layers_and_writer, (2, 2), HQMQConfig(), "parts of L['slab']"),
        (some_layers_of, (4, 2), HQMQConfig(), "larger tensor, which is read by aten.slice"),
        (layers_of, (3, 2), HQMQConfig(), "only 4 of the 6 parts of L['slab']"),
        (layers_of, (2, 2), HQMQConfig(layers={1: None}), "layer 1 is excluded by config.layers"),
    ],
)
def test_a_slab_is_packed_in_all_its_parts_or_not_at_all(function, lead, config, reason):
    result = run_pipeline(function, config, *inputs(slab=slab_of(*lead)).values())
    assert result.rewritten is None
    assert any(reason in match.reason for match in result.matches)
    assert all(match.reason is not None for match in result.matches)


def test_a_slab_becomes_buffers_of_each_part():
    rewritten = run_pipeline(
        layers_of, HQMQConfig(), *inputs(slab=slab_of(2, 2)).values()
    ).rewritten
    assert len(rewritten.bindings) == 4 and len({b.arg for b in rewritten.bindings}) == 1
    assert [b.part for b in rewritten.bindings] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    names = [n.name for n in rewritten.module.graph.find_nodes(op="placeholder")]
    assert len([n for n in names if n.endswith("_codes")]) == 4
    assert not any(n == "l_slab_" for n in names)
