"""Caches in other layouts, written by hand: the oracle, going back, and what the user does with them."""

from __future__ import annotations

import copy

import pytest
import torch

from hqmq_compile.backend import hqmq
from tests.compare import TYPICAL, cheap, error
from tests.configs import CONFIGS
from tests.hand_layouts import LAYOUTS, LayoutLoop, by_slot
from tests.hand_written import BATCH, DIM, HEADS, QUERY_HEADS, ROOM, attend, fused, split

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]
STATIC = [style for style in LAYOUTS if style != "grown"]


def check(errors: list[float]) -> None:
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)


@pytest.mark.parametrize("style", LAYOUTS)
@pytest.mark.parametrize("which", ["16", "immediate"])
def test_every_layout(which, style):
    loop = LayoutLoop(style, CONFIGS[which])
    check([loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)])
    loop.check_stored()


@pytest.mark.parametrize("style", ["llama", "grown", "slab", "flash-attn"])
def test_dynamic_shapes(style):
    loop = LayoutLoop(style, CONFIGS["16"], dynamic=True, fullgraph=True)
    check([loop(count) for count in (37, 1, 2, 11, 40, 1)])
    loop.check_stored()


@pytest.mark.parametrize("style", ["llama", "grown", "stacked"])
def test_bfloat16(style):
    loop = LayoutLoop(style, CONFIGS["16"], dtype=torch.bfloat16)
    assert max(loop(count) for count in (37, 1, 1, 11, 1)) < 1e-2
    loop.check_stored()


@pytest.mark.parametrize("style", STATIC)
def test_new_prompt_at_slot_0(style):
    loop = LayoutLoop(style, CONFIGS["8"])
    before = loop.target.tensors()
    check([loop(60), loop(1), loop(29, 0), loop(1), loop(1), loop(45, 0), loop(1)])
    loop.check_stored()
    after = loop.target.tensors()
    assert all(a is b for a, b in zip(before, after, strict=True))  # the user's own tensors


@pytest.mark.parametrize("style", STATIC)
def test_user_edits_and_copies(style):
    """The user's tensor is an ordinary one of its own layout: read, edited, copied."""
    loop = LayoutLoop(style, CONFIGS["16"])
    check([loop(60), loop(1)])
    (*_, tensor) = loop.target.tensors()
    kept, dense = copy.deepcopy(tensor), tensor.dequantize()
    assert tensor.is_packed and kept.is_packed and torch.equal(kept, dense)
    assert torch.equal(tensor.clone(), dense) and torch.equal(tensor[..., :1], dense[..., :1])
    with torch.no_grad():
        view = tensor[:1]
        view.mul_(2)
    assert not tensor.is_packed and torch.equal(tensor[:1], 2 * dense[:1])
    assert torch.equal(kept, dense)
    tensor.copy_(dense)
    del view
    check([loop(1), loop(20), loop(1)])  # packed again, exactly: only the edits are undone
    loop.check_stored()


@pytest.mark.parametrize("style", STATIC)
def test_half_filled_cache_is_adopted(style):
    """An eager prefill, then compiled steps: what is there already is packed along with it."""
    loop = LayoutLoop(style, CONFIGS["16"])
    compiled, loop.compiled = loop.compiled, loop.target
    loop(37)  # exact, so not what the oracle sees
    assert not any(hasattr(t, "packed") for t in loop.target.tensors())
    loop.compiled = compiled
    check([loop(1), loop(1), loop(40), loop(1)])
    loop.check_stored()


# -- tensors that come and go ----------------------------------------------------------------------
def compiled_step(function, config=CONFIGS["8"]):
    return torch.compile(function, backend=hqmq, options={"config": config})


def slab_step(x, slab, start: int):
    query, key, value = split(x)
    stop = start + key.shape[2]
    keys, values = slab
    keys[:, :, start:stop], values[:, :, start:stop] = key, value
    return attend(query, keys[:, :, :stop], values[:, :, :stop], start)


def prefilled(x):
    """The cache is made by the graph."""
    slab = torch.zeros(2, BATCH, HEADS, ROOM, DIM)
    return slab_step(x, slab, 0), slab


def prefilled_by_slot(x):
    keys, values = (torch.zeros(BATCH, ROOM, HEADS, DIM) for _ in range(2))
    return by_slot_step(x, keys, values, 0), keys, values


def by_slot_step(x, keys, values, start: int):
    query, key, value = by_slot(x)
    stop = start + key.shape[1]
    keys[:, start:stop], values[:, start:stop] = key, value
    keys, values = (c[:, :stop].transpose(1, 2) for c in (keys, values))
    return attend(query.transpose(1, 2), keys, values, start)


@pytest.mark.parametrize(
    ("first", "step"), [(prefilled, slab_step), (prefilled_by_slot, by_slot_step)]
)
def test_born_in_a_prefill(first, step):
    """No dense cache is ever made; the tensors go on to other graphs."""
    loop = LayoutLoop("slab", CONFIGS["8"])
    prefill, following = compiled_step(first), compiled_step(step)
    caches = []

    def run(x, position):
        if position:
            return following(x, *caches, position)
        out, *caches[:] = prefill(x)
        assert all(t.is_packed for t in caches)
        return out

    loop.run = run
    check([loop(40), loop(1), loop(1), loop(20), loop(1)])
    assert all(t.is_packed and t.packed.parts[0].packed_slots > 0 for t in caches)
    views = caches[0] if len(caches) == 1 else [t.transpose(1, 2) for t in caches]
    for actual, stored in zip(views, loop.past.stored, strict=True):
        assert torch.equal(actual, stored.values)


def test_slab_as_an_argument_of_two_graphs():
    """Both pack it alike, and take it from each other; a copy goes its own way."""
    one, two = compiled_step(slab_step), compiled_step(lambda x, slab, at: slab_step(x, slab, at))
    loop = LayoutLoop("slab", CONFIGS["8"])
    slab = torch.zeros(2, BATCH, HEADS, ROOM, DIM)
    identity = id(slab)
    calls = [one, two, one, two]
    loop.run = lambda x, position: calls.pop(0)(x, slab, position)
    check([loop(30), loop(1)])
    fork = copy.deepcopy(slab)
    check([loop(20), loop(1)])
    assert id(slab) == identity and slab.is_packed and fork.is_packed
    assert torch.equal(slab[0], loop.past.stored[0].values)
    assert torch.equal(fork[:, :, :, :16], slab[:, :, :, :16]) and not fork[:, :, :, 31:].any()


def test_another_config_packs_it_again():
    loop = LayoutLoop("slab", CONFIGS["8"])
    with torch.no_grad():
        slab = torch.zeros(2, BATCH, HEADS, ROOM, DIM)
        for number, which in enumerate(("8", "16", "immediate")):
            step = compiled_step(slab_step, CONFIGS[which])
            x = fused(loop.tokens(QUERY_HEADS, 20), loop.tokens(HEADS, 20), loop.tokens(HEADS, 20))
            dense = slab.dequantize() if number else slab.clone()
            error_ = error(step(x, slab, 20 * number), slab_step(x, dense, 20 * number))
            assert error_ < 0.2 and slab.is_packed  # of one quantization more
            assert {part.spec.window for part in slab.packed.parts} == {CONFIGS[which].window}


def test_views_alive_mean_dense_with_a_reason(caplog):
    step = compiled_step(slab_step)
    slab = torch.zeros(2, BATCH, HEADS, ROOM, DIM)
    mine, other = slab[0], torch.zeros_like(slab)
    loop = LayoutLoop("slab", CONFIGS["8"])
    with torch.no_grad():
        for position in (0, 20):
            tokens = loop.tokens(HEADS, 20), loop.tokens(HEADS, 20)
            x = fused(loop.tokens(QUERY_HEADS, 20), *tokens)
            torch.testing.assert_close(step(x, slab, position), slab_step(x, other, position))
            assert torch.equal(mine[:, :, position : position + 20], tokens[0])
    assert type(slab) is torch.Tensor and torch.equal(slab, other)
    assert "L['slab'][0]: a view of it is alive" in caplog.text


def test_packed_slab_in_a_graph_without_a_match():
    """It becomes a plain tensor again, and is packed by the next matching call."""
    step, total = compiled_step(slab_step), compiled_step(lambda slab: slab.sum() + slab[0].sum())
    loop = LayoutLoop("slab", CONFIGS["8"])
    slab = torch.zeros(2, BATCH, HEADS, ROOM, DIM)
    loop.run = lambda x, position: step(x, slab, position)
    check([loop(30), loop(1)])
    with torch.no_grad():
        content = slab.dequantize()
        torch.testing.assert_close(total(slab), content.sum() + content[0].sum())
    assert type(slab) is torch.Tensor and torch.equal(slab, content)
    loop(1)
    assert slab.is_packed


def test_growing_copies_and_crops():
    """Branches of a conversation, and a crop, of a cache whose slots are dim 1."""
    loop = LayoutLoop("grown", CONFIGS["8"])
    check([loop(37), loop(1)])
    branch, values = loop.target.past, [t.dequantize() for t in loop.target.past]
    check([loop(5), loop(1)])
    for old, before in zip(branch, values, strict=True):  # more of it is packed by now
        assert old.shape == before.shape and error(old, before) < 0.2
    loop.target.past = tuple(t[:, :40] for t in loop.target.past)
    loop.length = 40
    for stored in loop.past.stored:
        stored.crop(40)
    with torch.no_grad():
        x = fused(loop.tokens(QUERY_HEADS, 1), loop.tokens(HEADS, 1), loop.tokens(HEADS, 1))
        past = tuple(t.clone() for t in loop.target.past)
        out, past = loop.target(x, past)
        assert error(loop.run(x, 40), out) < 0.2  # the crop was packed anew
    assert loop.target.past[0].is_packed and loop.target.past[0].shape[1] == 41
