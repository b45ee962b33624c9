"""Cache writes are told in one language; a cache with a reader not understood is left alone.

`check_slots` replays each match from its fields alone (start, positions, keep, first, length) and
compares with what the graph itself computed, so the tests below only state the kinds.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from hqmq_compile.passes import graph_types as kinds
from hqmq_compile.passes.views import number

B, H, HKV, L, D, W = 2, 4, 2, 16, 8, 6


def new(n, heads=HKV):
    return torch.randn(B, heads, n, D)


def scalar(value):
    """An int, or the expression of a scalar node as a string."""
    value = number(value)
    return value if value is None or isinstance(value, int) else str(value)


def attend(q, k, v, mask=None):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def check_slots(analysis, values):
    """Replay every match; `values` maps argument names to tensors as they were before the call."""
    values = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
    interpreter = torch.fx.Interpreter(analysis.graph, garbage_collect_values=False)
    before, args = {}, []
    placeholders = analysis.graph.graph.find_nodes(op="placeholder")
    for info, node in zip(analysis.infos, placeholders, strict=True):
        value = eval(info.source, {"L": values})
        args.append(value)
        before[node] = value.clone() if isinstance(value, torch.Tensor) else value
    with torch.no_grad():
        outputs = interpreter.run(*args)
    env = interpreter.env

    def number(x):
        return env[x] if isinstance(x, torch.fx.Node) else x

    replayed = 0
    for match in analysis.matches:
        if match.reason is not None:
            continue
        first, length = number(match.first), number(match.length)
        for role, write in (("key", match.key), ("value", match.value)):
            tokens = env[write.tokens]
            if write.past is not None:
                slots = before[write.past]
            elif write.born is not None:
                slots = torch.zeros(write.born.meta["val"].shape)
            else:
                slots = tokens[:, :, :0]
            if write.positions is not None:
                places = env[write.positions]
            else:
                places = number(write.start) + torch.arange(tokens.shape[2])
            end = max(slots.shape[2], int(places.max()) + 1)
            full = torch.zeros(*slots.shape[:2], end, slots.shape[3])
            full[:, :, : slots.shape[2]] = slots
            full[:, :, places] = tokens
            torch.testing.assert_close(
                full[:, :, first : first + length], env[getattr(match.attention, role)]
            )
            kept = full if write.keep is None else full[:, :, -number(write.keep) :]
            for place in write.outputs:
                torch.testing.assert_close(kept, outputs[place])
            if write.kind in (kinds.IN_PLACE, kinds.SLICE, kinds.WINDOW):
                torch.testing.assert_close(kept, env[write.past])
            for node in write.results:
                torch.testing.assert_close(kept, env[node])
        replayed += 1
    return replayed


def at_positions(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc)


def setitem_positions(q, k, v, kc, vc, pos):
    kc[:, :, pos] = k
    vc[:, :, pos] = v
    return attend(q, kc[:, :, :12], vc[:, :, :12])


def positions_twice(q, k, v, kc, vc, pos):
    """Keys and values each with their own, equal, position arithmetic (as torchtune does)."""
    kc.index_copy_(2, pos[:3] + 1, k)
    vc.index_copy_(2, pos[:3] + 1, v)
    return attend(q, kc, vc)


def repeated(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    wide_k, wide_v = (x[:, :, None].expand(B, HKV, 2, L, D).reshape(B, H, L, D) for x in (kc, vc))
    return attend(q, wide_k.contiguous(), wide_v.to(q.dtype)), kc.shape[2]


def eager(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    weights = q @ kc.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    return weights.softmax(-1) @ vc.repeat_interleave(2, 1)


def setitem_slice(q, k, v, kc, vc, pos):
    kc[:, :, 4:7] = k
    vc[:, :, 4:7] = v
    return attend(q, kc[:, :, :7], vc[:, :, :7])


def narrow(q, k, v, kc, vc, pos):
    kc.narrow(2, 2, 3).copy_(k)
    vc.narrow(2, 2, 3).copy_(v)
    return attend(q, kc, vc)


def select(q, k, v, kc, vc, pos):
    kc[:, :, 5] = k[:, :, 0]
    vc[:, :, 5] = v[:, :, 0]
    return attend(q, kc, vc)


def whole(q, k, v, kc, vc, pos):
    k, v = (torch.cat([x, x, x, x, x, x[:, :, :1]], 2) for x in (k, v))
    kc.copy_(k)
    vc.copy_(v)
    return attend(q, kc, vc)


def returned(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc), kc, vc


@pytest.mark.parametrize(
    ("function", "kind", "n"),
    [
        (at_positions, kinds.IN_PLACE, 3),
        (setitem_positions, kinds.IN_PLACE, 3),
        (positions_twice, kinds.IN_PLACE, 3),
        (repeated, kinds.IN_PLACE, 3),
        (eager, kinds.IN_PLACE, 3),
        (returned, kinds.IN_PLACE, 3),
        (setitem_slice, kinds.SLICE, 3),
        (narrow, kinds.SLICE, 3),
        (select, kinds.SLICE, 1),
        (whole, kinds.SLICE, 3),
    ],
)
def test_in_place(analyze, function, kind, n):
    values = dict(q=new(n, H), k=new(n), v=new(n), kc=new(L), vc=new(L), pos=torch.arange(3) + 5)
    analysis = analyze(function)(*(x.clone() for x in values.values()))
    assert analysis.match.reason is None
    assert analysis.match.kind == kind
    assert analysis.match.source_name == "L['kc']"
    assert check_slots(analysis, values) == 1


def test_slice_with_symbolic_bounds(analyze):
    def step(q, k, v, kc, vc, at):
        kc[:, :, at : at + k.shape[2]] = k
        vc[:, :, at : at + k.shape[2]] = v
        return attend(q, kc[:, :, : at + k.shape[2]], vc[:, :, : at + k.shape[2]])

    call = analyze(step)
    values = dict(q=new(3, H), k=new(3), v=new(3), kc=new(L), vc=new(L))
    for at in (4, 7, 9):
        analysis = call(*(x.clone() for x in values.values()), at)
    assert analysis.match.reason is None and analysis.match.kind == kinds.SLICE
    assert isinstance(analysis.match.key.start, torch.fx.Node)
    for at in (2, 8):
        assert check_slots(analysis, dict(values, at=at)) == 1


def test_caches_that_are_buffers_of_the_model(analyze):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("k_cache", torch.zeros(B, HKV, L, D))
            self.register_buffer("v_cache", torch.zeros(B, HKV, L, D))

        def forward(self, q, k, v, pos):
            self.k_cache[:, :, pos] = k
            self.v_cache[:, :, pos] = v
            return attend(q, self.k_cache, self.v_cache)

    layer = Layer()
    analysis = analyze(layer, check=False)(new(1, H), new(1), new(1), torch.tensor([3]))
    assert analysis.match.reason is None
    assert analysis.match.source_name.endswith("_buffers['k_cache']")


def grow(q, k, v, pk, pv):
    k, v = torch.cat([pk, k], -2), torch.cat([pv, v], dim=2)
    return attend(q, k, v), k, v


def grow_window(q, k, v, pk, pv):
    k, v = torch.cat([pk, k], -2), torch.cat([pv, v], -2)
    return attend(q, k, v), k[:, :, -W + 1 :], v[:, :, -W + 1 :]


def grow_read_newest(q, k, v, pk, pv):
    k, v = torch.cat([pk, k], -2), torch.cat([pv, v], -2)
    return attend(q, k[:, :, -4:], v[:, :, -4:]), k, v


def grow_drop_oldest(q, k, v, pk, pv):
    k, v = torch.cat([pk[:, :, 1:], k], -2), torch.cat([pv[:, :, 1:], v], -2)
    return attend(q, k, v), k, v


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [grow, grow_window, grow_read_newest, grow_drop_oldest])
def test_growing(analyze, function, dynamic):
    values = dict(q=new(2, H), k=new(2), v=new(2), pk=new(9), pv=new(9))
    args = [x.clone() for x in values.values()]
    if dynamic:
        for past in args[3:]:
            torch._dynamo.mark_dynamic(past, 2)
    analysis = analyze(function)(*args)
    assert analysis.match.reason is None and analysis.match.kind == kinds.GROWING
    assert analysis.match.source_name == "L['pk']"
    assert analysis.match.key.outputs == [1] and analysis.match.value.outputs == [2]
    assert scalar(analysis.match.key.keep) == (
        W - 1 if function is grow_window else scalar(analysis.match.key.keep)
    )
    assert check_slots(analysis, values) == 1
    if dynamic:
        for length in (9, 12, 30):
            assert check_slots(analysis, dict(values, pk=new(length), pv=new(length))) == 1


def test_window_keeps_all_while_there_are_fewer(analyze):
    values = dict(q=new(1, H), k=new(1), v=new(1), pk=new(3), pv=new(3))
    analysis = analyze(grow_window)(*(x.clone() for x in values.values()))
    assert analysis.match.reason is None and scalar(analysis.match.key.keep) == W - 1
    assert check_slots(analysis, values) == 1


def empty_constant(q, k, v):
    empty = torch.tensor([], dtype=q.dtype)
    k, v = torch.cat([empty, k], -2), torch.cat([empty, v], -2)
    return attend(q, k, v), k, v


def empty_zeros(q, k, v):
    empty = torch.zeros(B, HKV, 0, D)
    k, v = torch.cat([empty, k], -2), torch.cat([empty, v], -2)
    return attend(q, k, v), k, v


def no_cat(q, k, v):
    k = k * 2
    return attend(q, k, v + 1), k, v + 1


def no_cat_window(q, k, v):
    k, v = k * 2, v * 3
    return attend(q, k, v), k[:, :, -W + 1 :], v[:, :, -W + 1 :]


@pytest.mark.parametrize("function", [empty_constant, empty_zeros, no_cat_window])
def test_first_call_of_a_growing_cache(analyze, function):
    values = dict(q=new(9, H), k=new(9), v=new(9))
    analysis = analyze(function)(*values.values())
    match = analysis.match
    assert match.reason is None and match.kind == kinds.GROWING
    assert match.key.past is None and match.key.start == 0 and match.first == 0
    assert match.length == 9
    assert check_slots(analysis, values) == 1


def test_an_empty_placeholder_is_no_past(analyze):
    values = dict(q=new(4, H), k=new(4), v=new(4), pk=new(0), pv=new(0))
    analysis = analyze(grow)(*values.values())
    assert analysis.match.reason is None and analysis.match.key.past is None
    assert check_slots(analysis, values) == 1


def roll(q, k, v, kc, vc):
    index = torch.tensor([-1])
    nk, nv = kc.roll(-1, dims=-2), vc.roll(-1, dims=-2)
    nk[:, :, index] = k
    nv[:, :, index] = v
    kc.copy_(nk)
    vc.copy_(nv)
    return attend(q, kc, vc)


def roll_slice(q, k, v, kc, vc):
    nk, nv = kc.roll(-1, dims=2), vc.roll(-1, dims=2)
    nk[:, :, -1:] = k
    nv[:, :, -1:] = v
    kc.copy_(nk)
    vc.copy_(nv)
    return attend(q, nk, nv)


def shift(q, k, v, kc, vc):
    kc.copy_(torch.cat((kc[:, :, 1:], k), 2))
    vc.copy_(torch.cat((vc[:, :, 1:], v), 2))
    return attend(q, kc, vc)


def full_then_several(q, k, v, kc, vc):
    k, v = torch.cat((kc[:, :, 1:], k), 2), torch.cat((vc[:, :, 1:], v), 2)
    kc.copy_(k[:, :, -L:])
    vc.copy_(v[:, :, -L:])
    return attend(q, k, v)


def becomes_full(q, k, v, kc, vc):
    k, v = torch.cat((kc[:, :, :14], k), 2), torch.cat((vc[:, :, :14], v), 2)
    kc.copy_(k[:, :, -L:])
    vc.copy_(v[:, :, -L:])
    return attend(q, k, v)


def long_prefill(q, k, v, kc, vc):
    k, v = k * 2, v * 2
    kc.copy_(k[:, :, -L:])
    vc.copy_(v[:, :, -L:])
    return attend(q, k, v)


@pytest.mark.parametrize(
    ("function", "n", "start", "first", "length"),
    [
        (roll, 1, L, 1, L),
        (roll_slice, 1, L, 1, L),
        (shift, 1, L, 1, L),
        (full_then_several, 5, L, 1, L + 4),
        (becomes_full, 5, 14, 0, 19),
        (long_prefill, 20, 0, 0, 20),
    ],
)
def test_window(analyze, function, n, start, first, length):
    values = dict(q=new(n, H), k=new(n), v=new(n), kc=new(L), vc=new(L))
    analysis = analyze(function)(*(x.clone() for x in values.values()))
    match = analysis.match
    assert match.reason is None and match.kind == kinds.WINDOW
    assert (match.key.start, match.key.keep, match.first, match.length) == (start, L, first, length)
    assert check_slots(analysis, values) == 1


def born_and_written(q, k, v, pos):
    kc, vc = torch.zeros(B, HKV, L, D), k.new_zeros(B, HKV, L, D)
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc), kc, vc


def born_and_sliced(q, k, v, pos):
    kc, vc = (torch.full((B, HKV, L, D), 0.0) for _ in range(2))
    kc[:, :, :3] = k
    vc[:, :, :3] = v
    return attend(q, kc[:, :, :3], vc[:, :, :3]), kc, vc


@pytest.mark.parametrize("function", [born_and_written, born_and_sliced])
def test_born_in_the_graph(analyze, function):
    values = dict(q=new(3, H), k=new(3), v=new(3), pos=torch.arange(3))
    analysis = analyze(function)(*values.values())
    match = analysis.match
    assert match.reason is None and match.kind == kinds.BORN
    assert match.key.born is not None and match.key.past is None
    assert match.key.write_kind == (kinds.IN_PLACE if function is born_and_written else kinds.SLICE)
    assert match.key.outputs == [1] and match.value.outputs == [2]
    assert check_slots(analysis, values) == 1


def test_two_attentions_share_one_cache(analyze):
    def step(q, k, v, kc, vc, pos):
        kc.index_copy_(2, pos, k)
        vc.index_copy_(2, pos, v)
        return attend(q, kc, vc) + attend(q * 2, kc, vc)

    values = dict(q=new(1, H), k=new(1), v=new(1), kc=new(L), vc=new(L), pos=torch.tensor([3]))
    analysis = analyze(step)(*(x.clone() for x in values.values()))
    one, two = analysis.matches
    assert one.reason is None and two.reason is None
    assert one.shared and two.shared and one.key is two.key and one.key.readers == 2
    assert check_slots(analysis, values) == 2


def test_attentions_that_share_keys_only_are_left_alone(analyze):
    def step(q, k, v, kc, vc, wc, pos):
        for cache, x in ((kc, k), (vc, v), (wc, v * 2)):
            cache.index_copy_(2, pos, x)
        return attend(q, kc, vc) + attend(q, kc, wc)

    matches = analyze(step)(
        new(1, H), new(1), new(1), new(L), new(L), new(L), torch.tensor([3])
    ).matches
    assert all("shared with another attention" in m.reason for m in matches)


def test_slices_not_known_to_be_the_same_are_left_alone(analyze):
    def step(q, k, v, kc, vc, i, j):
        kc[:, :, i : i + 1] = k
        vc[:, :, j : j + 1] = v
        return attend(q, kc, vc)

    call = analyze(step)
    for i, j in ((4, 5), (6, 8), (7, 9)):
        analysis = call(new(1, H), new(1), new(1), new(L), new(L), i, j)
    assert "different slots" in analysis.match.reason


# What must be left alone, with the reason.


def extra_reader(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc), kc.sum()


def reader_of_a_view(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc), vc.transpose(1, 2)[:, :3].exp()


def reader_before(q, k, v, kc, vc, pos):
    old = attend(q, kc, vc)
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return old + attend(q, kc, vc)


def second_writer(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    out = attend(q, kc, vc)
    kc.mul_(0.5)
    return out


def scaled_by_a_view(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    kc[:, :, 0].zero_()
    return attend(q, kc, vc)


def part_returned(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc), kc[:, :, :4]


def one_tensor(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    return attend(q, kc, kc)


def also_a_mask(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc, kc[:1, :1, :1, :1].expand(1, 1, 1, L))


def cast_between(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    return attend(q.half(), kc.half(), vc.half())


def different_positions(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos + 1, v)
    return attend(q, kc, vc)


def positions_change(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    pos.add_(1)
    return attend(q, kc, vc)


def test_positions_are_those_of_the_write(analyze):
    """torchtune advances its positions before it attends: the fused op must see the old ones."""
    match = analyze(positions_change)(
        new(1, H), new(1), new(1), new(L), new(L), torch.tensor([3])
    ).match
    assert match.reason is None
    for write in (match.key, match.value):
        assert write.positions.target is torch.ops.aten.clone.default
        nodes = list(write.positions.graph.nodes)
        assert nodes.index(write.positions) < nodes.index(write.erase[0])


def refused_attention(q, k, v, kc, vc, pos):
    kc.index_copy_(2, pos, k)
    vc.index_copy_(2, pos, v)
    odd = torch.relu(q @ kc.repeat_interleave(2, 1).mT).softmax(-1) @ vc.repeat_interleave(2, 1)
    return attend(q, kc, vc) + odd


def in_place_add(q, k, v, kc, vc, pos):
    kc.index_put_((torch.tensor([0, 1])[:, None], torch.tensor([0, 1])[None], pos), k[:, :, 0])
    vc.index_copy_(2, pos, v)
    return attend(q, kc, vc)


def never_written(q, k, v, kc, vc, pos):
    return attend(q, kc, vc)


def out_of_place_where(q, k, v, kc, vc, pos):
    here = (torch.arange(L) == pos)[None, None, :, None]
    kc, vc = torch.where(here, k, kc), torch.where(here, v, vc)
    return attend(q, kc, vc), kc, vc


def out_of_place_index_copy(q, k, v, kc, vc, pos):
    kc, vc = kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)
    return attend(q, kc, vc), kc, vc


def out_of_place_scatter(q, k, v, kc, vc, pos):
    index = pos[None, None, :, None].expand_as(k)
    kc, vc = kc.scatter(2, index, k), vc.scatter(2, index, v)
    return attend(q, kc, vc), kc, vc


def out_of_place_slice(q, k, v, kc, vc, pos):
    kc, vc = torch.slice_scatter(kc, k, 2, 3, 4), torch.slice_scatter(vc, v, 2, 3, 4)
    return attend(q, kc, vc), kc, vc


@pytest.mark.parametrize(
    "function",
    [out_of_place_where, out_of_place_index_copy, out_of_place_scatter, out_of_place_slice],
)
def test_out_of_place(analyze, function):
    match = analyze(function)(new(1, H), new(1), new(1), new(L), new(L), torch.tensor([3])).match
    assert match.reason is None and match.kind == kinds.OUT_OF_PLACE
    for write, output in ((match.key, 1), (match.value, 2)):
        assert write.past is not None and write.outputs == [output] and write.keep is None
        if write.positions is None:
            assert write.start == 3
        else:
            assert write.positions.meta["val"].shape == (1,)


def out_of_place_many(q, k, v, kc, vc, pos):
    here = (torch.arange(L) >= pos)[None, None, :, None]
    kc, vc = torch.where(here, k, kc), torch.where(here, v, vc)
    return attend(q, kc, vc), kc, vc


def out_of_place_lost(q, k, v, kc, vc, pos):
    return attend(q, kc.index_copy(2, pos, k), vc.index_copy(2, pos, v))


def old_one_read(q, k, v, kc, vc, pos):
    old = kc.sum()
    kc, vc = kc.index_copy(2, pos, k), vc.index_copy(2, pos, v)
    return attend(q, kc, vc) + old, kc, vc


def seq_major(q, k, v, kc, vc, pos):
    kc, vc = kc.transpose(1, 2), vc.transpose(1, 2)
    kc.index_copy_(1, pos, k.transpose(1, 2))
    vc.index_copy_(1, pos, v.transpose(1, 2))
    return attend(q, kc.transpose(1, 2), vc.transpose(1, 2))


def prefix_grown(q, k, v, kc, vc, pos):
    k, v = torch.cat([kc[:, :, :3], k], -2), torch.cat([vc[:, :, :3], v], -2)
    return attend(q, k, v), k, v


def not_kept(q, k, v, kc, vc, pos):
    return attend(q, torch.cat([k, k], 2), torch.cat([v, v], 2))


@pytest.mark.parametrize(
    ("function", "kind", "reason"),
    [
        (extra_reader, kinds.IN_PLACE, "read by aten.sum at test_find_caches.py:"),
        (reader_of_a_view, kinds.IN_PLACE, "read by aten.exp at test_find_caches.py:"),
        (second_writer, None, "written again by aten.mul_ at test_find_caches.py:"),
        (scaled_by_a_view, None, "written again by aten.zero_ at test_find_caches.py:"),
        (part_returned, kinds.IN_PLACE, "returned in part"),
        (one_tensor, kinds.IN_PLACE, "share one cache"),
        (also_a_mask, kinds.IN_PLACE, "read by aten.scaled_dot_product_attention"),
        (cast_between, kinds.IN_PLACE, "cast from float32 to float16"),
        (different_positions, kinds.IN_PLACE, "different positions"),
        (in_place_add, kinds.IN_PLACE, "index_put_"),
        (never_written, kinds.READ_ONLY, "not written in this graph"),
        (out_of_place_many, kinds.OUT_OF_PLACE, "does not choose one slot"),
        (out_of_place_lost, kinds.OUT_OF_PLACE, "written out of place, but not returned"),
        (old_one_read, kinds.OUT_OF_PLACE, "old cache is also read by aten.sum"),
        (prefix_grown, kinds.GROWING, "grown from a part of the past"),
        (not_kept, None, "no cache"),
    ],
)
def test_left_alone(analyze, function, kind, reason):
    values = dict(q=new(1, H), k=new(1), v=new(1), kc=new(L), vc=new(L), pos=torch.tensor([3]))
    if function is cast_between:
        values = {k: v if k == "pos" else v.float() for k, v in values.items()}
    analysis = analyze(function, check=False)(*values.values())
    match = analysis.match
    assert reason in match.reason
    assert kind is None or match.kind == kind
    for write in (match.key, match.value):
        if write is not None and "positions" not in reason and "share" not in reason:
            assert write.reason is not None


@pytest.mark.parametrize("function", [reader_before, refused_attention])
def test_a_cache_left_alone_for_one_attention_is_left_alone_for_all(analyze, function):
    values = dict(q=new(1, H), k=new(1), v=new(1), kc=new(L), vc=new(L), pos=torch.tensor([3]))
    one, two = analyze(function)(*(x.clone() for x in values.values())).matches
    assert one.reason is not None and two.reason is not None
    expected = "before it is written" if function is reader_before else "aten.relu"
    assert any(expected in m.reason for m in (one, two))


def test_transposes_before_the_write_cancel_those_after_it(analyze):
    values = dict(q=new(1, H), k=new(1), v=new(1), kc=new(L), vc=new(L), pos=torch.tensor([3]))
    analysis = analyze(seq_major)(*(x.clone() for x in values.values()))
    assert analysis.match.reason is None and analysis.match.kind == kinds.IN_PLACE


def test_paged_caches_are_reported(analyze):
    def step(q, k, v, kp, vp, slot, table):
        kp.index_put_((slot,), k[:, :, 0])
        vp.index_put_((slot,), v[:, :, 0])
        return attend(q, kp[table].transpose(1, 2), vp[table].transpose(1, 2))

    pages = torch.randn(32, HKV, D)
    table = torch.arange(2 * 16).view(2, 16)
    match = analyze(step)(
        new(1, H), new(1), new(1), pages, pages.clone(), torch.tensor([3, 20]), table
    ).match
    assert match.kind == kinds.PAGED and "gathered" in match.reason


def test_a_written_cache_without_attention_is_reported(analyze):
    def step(x, kc, past, pos):
        kc.index_copy_(2, pos, x)
        return torch.cat([past, x], -2)

    matches = analyze(step)(new(1), new(L), new(4), torch.tensor([3])).matches
    assert sorted(m.source_name for m in matches) == ["L['kc']", "L['past']"]
    assert {m.kind for m in matches} == {kinds.IN_PLACE, kinds.GROWING}
    assert all(m.attention is None and "no attention" in m.reason for m in matches)


# Real models: two layers each.

ONE, GROW, WIN, BORN = kinds.IN_PLACE, kinds.GROWING, kinds.WINDOW, kinds.BORN


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_full_attention_models(steps, name, cache, attention):
    results = steps(name, cache, attention, (7, 1, 1))
    expected = [BORN, ONE, ONE] if cache == "static" else [GROW, GROW, GROW]
    for analysis, kind in zip(results, expected, strict=True):
        assert [(m.kind, m.reason) for m in analysis.matches] == [(kind, None)] * 2
    last = results[-1].matches[1]
    assert last.source_name.endswith(".layers[1].keys")
    if cache == "dynamic":
        assert isinstance(last.key.start, torch.fx.Node) and last.first == 0
        assert isinstance(last.length, torch.fx.Node)
    else:
        assert last.key.positions is not None and last.length == 32


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gemma3", "sdpa"), ("gemma2", "eager"), ("gptoss", "eager"), ("mistral", "sdpa")],
)
def test_sliding_static_models(steps, name, attention):
    """Window 8: born, written, just full (roll), and five tokens on a full window."""
    sliding = [0, 1] if name == "mistral" else [0]
    results = steps(name, "static", attention, (7, 1, 1, 5))
    for step, (analysis, kind) in enumerate(zip(results, [BORN, ONE, WIN, WIN], strict=True)):
        assert all(m.reason is None for m in analysis.matches)
        for layer, match in enumerate(analysis.matches):
            if layer not in sliding:
                assert match.kind == (BORN if step == 0 else ONE)
                continue
            assert match.kind == kind
            if kind == WIN:
                assert (match.key.start, match.key.keep, match.first) == (8, 8, 1)
                assert (
                    scalar(match.length) in (8 if step == 2 else 12, "s31 + 7", "7 + s31") or step
                )


@pytest.mark.parametrize(
    ("name", "attention"),
    [("gemma3", "sdpa"), ("gemma2", "eager"), ("gptoss", "eager"), ("mistral", "sdpa")],
)
def test_sliding_dynamic_models(steps, name, attention):
    """Window 8: only the newest seven tokens are returned."""
    for analysis in steps(name, "dynamic", attention, (7, 1, 1, 5)):
        assert [m.reason for m in analysis.matches] == [None, None]
        assert all(m.kind == GROW for m in analysis.matches)
        assert scalar(analysis.matches[0].key.keep) == 7
        assert (analysis.matches[1].key.keep is None) == (name != "mistral")


def test_prefill_longer_than_the_window(steps):
    (analysis,) = steps("gemma3", "static", "sdpa", (12,))
    match = analysis.matches[0]
    assert match.reason is None and (match.kind, match.key.write_kind) == (BORN, WIN)
    assert (match.key.start, match.key.keep, match.first, match.length) == (0, 8, 0, 12)


def test_latent_attention_is_reported(steps):
    for analysis in steps("deepseek", "static", "sdpa", (5, 1)):
        assert all(m.reason is not None for m in analysis.matches)
        assert all(m.kind == kinds.LATENT for m in analysis.matches)


def test_alibi_is_reported_with_its_cache_left_alone(steps):
    for analysis in steps("bloom", "dynamic", "eager", (5, 1)):
        assert len(analysis.matches) == 2
        assert all("baddbmm" in m.reason for m in analysis.matches)
