"""What users do to caches between two steps, and what a compiled graph must then do."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from hqmq_compile.backend import hqmq
from tests.compare import TYPICAL, Pair, cheap, error
from tests.configs import CONFIGS
from tests.hand_written import BATCH, DIM, HEADS, ROOM, Loop, attend, split
from tests.models.tiny import cache_keyword, prompt, tiny

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap", "warnings")
__all__ = ["cheap"]
CONFIG = CONFIGS["16"]


@pytest.fixture
def warnings(caplog, monkeypatch):
    """Warnings of the backend, which says most of them once in a process."""
    monkeypatch.setattr(hqmq_compile.backend, "_warn_once", hqmq_compile.backend.log.warning)
    caplog.set_level(logging.WARNING, "hqmq")
    return caplog


# -- views, readers and writers that the backend does not own ---------------------------------------
def test_view_of_the_cache_is_alive(warnings):
    """Then the graph runs as it is, a warning names the cache, and the view sees what is written."""
    loop, plain = Loop("index_copy", CONFIG), Loop("index_copy", HQMQConfig(window=ROOM))
    view = loop.keys[:, :, :4]
    errors = []
    for count in (37, 1, 1):
        x, place = torch.randn(BATCH, count, 8 * DIM), torch.tensor(loop.length)
        with torch.no_grad():
            actual = loop.compiled(x, loop.keys, loop.values, place)
            expected = loop.target(x, plain.keys, plain.values, place)
        loop.length += count
        errors.append(error(actual, expected))
    assert max(errors) <= TYPICAL
    assert type(loop.keys) is torch.Tensor
    assert torch.equal(view, loop.keys[:, :, :4]) and view.any()
    said = [r.getMessage() for r in warnings.records if "without compression" in r.getMessage()]
    # Once for the graph of the prefill and once for that of the steps.
    assert len(said) <= 2 and "keys" in said[0] and "view" in said[0], warnings.text


def test_view_gone_the_cache_is_packed():
    loop = Loop("index_copy", CONFIG)
    view = loop.keys[:, :, :4]
    assert max(loop(3), loop(1)) <= TYPICAL  # shorter than the window: exact all the same
    assert type(loop.keys) is torch.Tensor
    del view
    assert max(loop(37), loop(1)) <= TYPICAL
    loop.check_stored()


def test_view_of_a_packed_cache(warnings):
    """An ordinary view makes the cache dense; it is packed again when the view is gone."""
    loop = Loop("index_copy", CONFIG)
    assert max(loop(37), loop(1)) <= TYPICAL
    view = loop.keys.transpose(1, 2)
    with torch.no_grad():
        x, place = torch.randn(BATCH, 1, 8 * DIM), torch.tensor(loop.length)
        before = [t.dequantize() for t in loop.caches]
        expected = loop.target(x, *before, place)
        actual = loop.compiled(x, loop.keys, loop.values, place)
    assert error(actual, expected) <= TYPICAL
    assert not loop.keys.is_packed
    assert torch.equal(view, before[0].transpose(1, 2)), "the view missed the write"
    assert "view" in warnings.text
    del view
    place += 1
    with torch.no_grad():
        loop.compiled(x, loop.keys, loop.values, place)
    assert loop.keys.is_packed and loop.keys.packed.packed_slots > 0


def compiled(function, config=CONFIG):
    return torch.compile(function, backend=hqmq, options={"config": config})


def caches(*shape):
    shape = shape or (BATCH, HEADS, ROOM, DIM)
    return torch.zeros(shape), torch.zeros(shape)


def reads_more(x, keys, values, place):
    query, key, value = split(x)
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    return attend(query, keys, values, place), keys.norm()


def writes_more(x, keys, values, place):
    query, key, value = split(x)
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    keys.mul_(0.5)
    return attend(query, keys, values, place)


def scales_read(x, keys, values, place):
    query, key, value = split(x)
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    return attend(query, keys * 2.0, values, place)


def reads_before(x, keys, values, place):
    query, key, value = split(x)
    old = keys.sum()
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    return attend(query, keys, values, place) + old


def values_first(x, keys, values, place):
    """Attention between the two writes: it reads values without the new ones."""
    query, key, value = split(x)
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    out = attend(query, keys, values, place)
    values.index_copy_(2, slots, value)
    return out


def same_cache_twice(x, keys, values, place):
    query, key, _ = split(x)
    slots = torch.arange(key.shape[2]) + place
    keys.index_copy_(2, slots, key)
    return attend(query, keys, keys, place)


@pytest.mark.parametrize(
    "function, word, packed",
    [
        (reads_more, "norm", True),
        (writes_more, "mul", False),
        (scales_read, "mul", True),
        (reads_before, "sum", False),
        (values_first, "", True),
        (same_cache_twice, "", True),
    ],
)
def test_unknown_use_of_a_cache(function, word, packed):
    """Attention does not read packed bits, the report says why and where, and the numbers are right."""
    keys, values = caches()
    mine, theirs = (keys, values), (keys.clone(), values.clone())
    run = compiled(function, HQMQConfig(window=ROOM))  # loses nothing
    with torch.no_grad():
        for place, count in ((0, 37), (37, 1), (38, 1)):
            x = torch.randn(BATCH, count, 8 * DIM)
            actual = run(x, *mine, torch.tensor(place))
            expected = function(x, *theirs, torch.tensor(place))
            torch.testing.assert_close(actual, expected)
        report = hqmq_compile.explain(function, x, *mine, torch.tensor(39))
    assert isinstance(keys, HQMQTensor) == packed
    reasons = [a.reason + a.dense for a in report.attentions]
    assert reasons and all(reasons) and any(word in reason for reason in reasons), reasons
    assert any("test_traps.py:" in reason for reason in reasons) or not word
    assert ".py:" in report.attentions[0].source
    assert all(a.dense for a in report.attentions if a.rewritten)


def test_unmatched_graph_gets_the_plain_cache_back(warnings):
    """A packed cache reaches a graph that only looks at it: it is unpacked, and right."""
    loop = Loop("index_copy", CONFIG)
    assert max(loop(37), loop(1)) <= TYPICAL
    stored = loop.keys.dequantize()
    total = compiled(lambda keys: keys.double().sum())
    with torch.no_grad():
        assert torch.equal(total(loop.keys), stored.double().sum())
    assert type(loop.keys) is torch.Tensor and torch.equal(loop.keys, stored)
    assert "unpacking" in warnings.text


# -- edits between steps ------------------------------------------------------------------------------
@pytest.mark.parametrize("style", ["index_copy", "cat"])
def test_edit_in_place(style):
    """Tokens that the user overwrites, packed or in the window, are what attention sees next."""
    loop = Loop(style, CONFIG)
    assert max(loop(60), loop(1)) <= TYPICAL  # slots below 32 are packed
    before = loop.keys.dequantize()
    loop.keys[:, :, 20] = 0
    loop.keys[:, :, 50:52] = 3.0
    loop.values[:, :, 55].neg_()
    x = torch.randn(BATCH, 1, 8 * DIM)
    with torch.no_grad():
        actual = loop.run(x, loop.length)
    assert loop.keys.is_packed and loop.keys.packed.packed_slots == 32
    keys, values = (t.dequantize() for t in loop.caches)
    assert not keys[:, :, 20].any() and (keys[:, :, 50:52] == 3).all()
    assert torch.equal(keys[:, :, 32:50], before[:, :, 32:50])
    # Blocks that were packed are packed a second time: near, not equal.
    kept = [slot for slot in range(32) if slot != 20]
    assert error(keys[:, :, kept], before[:, :, kept]) < 0.1
    expected = attend(split(x)[0], keys[:, :, :62], values[:, :, :62], 61)
    assert error(actual, expected) <= TYPICAL


def test_look_between_steps():
    """Reading, slicing and printing a cache changes nothing."""
    loop = Loop("index_copy", CONFIG)
    errors = [loop(60)]
    for _ in range(3):
        loop.keys.sum(), str(loop.keys), loop.keys[0, 0, :5].tolist(), loop.values[:, :, 3:9].mean()
        loop.keys.transpose(1, 2).contiguous()
        errors.append(loop(1))
    assert max(errors) <= TYPICAL
    loop.check_stored()


def test_branches_of_a_conversation():
    """Two continuations of one growing cache do not see each other, in any order of steps."""
    trunk = Loop("cat", CONFIG)
    assert max(trunk(60), trunk(1)) <= TYPICAL
    branches = []
    for seed in (1, 2):
        branch = copy.copy(trunk)
        branch.past = copy.deepcopy(trunk.past)
        branch.generator = torch.Generator().manual_seed(seed)
        branches.append(branch)
    # Nothing of the trunk's window is packed before everyone has gone a way of their own.
    steps = ((0, 1), (1, 1), (0, 1))
    errors = [branches[i](count) for i, count in steps]
    errors.append(trunk(1))
    errors += [
        branches[0](40),
        branches[1](25),
        trunk(20),
        branches[0](1),
        branches[1](1),
        trunk(1),
    ]
    assert max(errors) <= TYPICAL
    for loop in (*branches, trunk):
        loop.check_stored()


@pytest.mark.parametrize("style", ["cat", "index_copy"])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save", "clone"])
def test_copies_continue(way, style, tmp_path):
    """A copied or saved cache goes on as the original does, and apart from it."""
    loop = Loop(style, CONFIG)
    assert max(loop(60), loop(1)) <= TYPICAL
    twin = copy.copy(loop)
    twin.past, twin.generator = copy.deepcopy(loop.past), torch.Generator().manual_seed(5)
    pair = [loop.keys, loop.values]
    if way == "deepcopy":
        pair = copy.deepcopy(pair)
    elif way == "pickle":
        pair = pickle.loads(pickle.dumps(pair))
    elif way == "save":
        torch.save(pair, tmp_path / "cache.pt")
        pair = torch.load(tmp_path / "cache.pt", weights_only=True)
    else:
        pair = [t.clone() for t in pair]
    assert all(isinstance(t, HQMQTensor) and t.is_packed for t in pair)
    twin.keys, twin.values = pair
    assert max(loop(1), twin(11), loop(20), twin(1)) <= TYPICAL
    loop.check_stored()
    twin.check_stored()


def test_two_configs_in_one_process():
    """The same function compiled twice: neither uses the graph or the tables of the other."""
    loops = [Loop("index_copy", CONFIGS[name]) for name in ("8", "3bit")]
    errors = [loop(count) for count in (37, 1, 11) for loop in loops]
    assert max(errors) <= TYPICAL
    for loop in loops:
        loop.check_stored()


def test_cache_moves_to_a_function_with_another_config():
    """It is packed anew under the settings of the function that writes it."""
    first, second = Loop("index_copy", CONFIGS["16"]), Loop("index_copy", CONFIGS["8"])
    assert max(first(60), first(1)) <= TYPICAL
    before = first.keys.dequantize()
    second.keys, second.values, second.length = first.keys, first.values, first.length
    with torch.no_grad():
        x = torch.randn(BATCH, 1, 8 * DIM)
        actual = second.run(x, 61)
    assert second.keys.packed.spec.block == 8
    keys, values = (t.dequantize() for t in second.caches)
    assert error(keys[:, :, :61], before[:, :, :61]) < 0.1
    assert error(actual, attend(split(x)[0], keys[:, :, :62], values[:, :, :62], 61)) <= TYPICAL


# -- models and their caches -----------------------------------------------------------------------
def test_cache_filled_by_an_eager_prefill():
    """As in generate(): the static cache is adopted half full, the dynamic one as it is."""
    for kind in ("static", "dynamic"):
        pair = Pair("llama", kind, CONFIG, num_hidden_layers=1)
        ids = prompt(37)
        with torch.no_grad():
            pair.twin(ids, **{pair.keyword: pair.cache})
            pair.twin(ids, **{pair.keyword: pair.oracle})
        assert type(pair.cache.layers[0].keys) is torch.Tensor
        pair.length = 37
        assert max(pair.calls_of(1, 1, 1)) <= TYPICAL
        pair.check_packed()


def test_one_model_several_caches():
    """Steps on two caches of one model in turns; a longer and a wider one later."""
    one = Pair("llama", "static", CONFIG, room=96, num_hidden_layers=1)
    two = copy.copy(one)
    two.cache = two.new_cache()
    two.start()
    errors = one.calls_of(37) + two.calls_of(50) + one.calls_of(1, 1) + two.calls_of(1)
    three = copy.copy(one)
    three.batch, three.room = 2, 160
    three.cache = three.new_cache()
    three.start()
    errors += three.calls_of(120, 1) + one.calls_of(1)
    assert max(errors) <= TYPICAL
    for pair in (one, two, three):
        pair.check_packed()


def test_too_many_tokens_is_an_error():
    """As with an ordinary cache, and the cache is usable afterwards."""
    loop = Loop("index_copy", CONFIG)
    assert loop(120) <= TYPICAL
    with pytest.raises(IndexError, match="128"):
        loop(20)
    loop.past.stored.clear()
    loop.length = 0
    assert max(loop(60, 0), loop(1)) <= TYPICAL


def test_training_declines_once_and_works(warnings):
    model = tiny("llama", num_hidden_layers=1)
    model.compile(backend=hqmq)
    ids = prompt(9)
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        loss.backward()
    assert model.model.layers[0].self_attn.k_proj.weight.grad.norm() > 0
    assert warnings.text.count("grad is enabled") == 1
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{cache_keyword(model): cache})
    assert isinstance(cache.layers[0].keys, HQMQTensor)


def test_grad_enabled_with_a_cache_is_exact():
    """Evaluation without no_grad(): right numbers, and the cache stays as it is."""
    model, twin = tiny("llama", num_hidden_layers=1), tiny("llama", num_hidden_layers=1)
    model.compile(backend=hqmq)
    mine, theirs = (StaticCache(config=model.config, max_cache_len=64) for _ in range(2))
    key = cache_keyword(model)
    for seed, count in enumerate((37, 1, 1)):
        ids = prompt(count, seed=seed)
        actual, expected = model(ids, **{key: mine}).logits, twin(ids, **{key: theirs}).logits
        assert error(actual.detach(), expected.detach()) <= TYPICAL
    assert not isinstance(mine.layers[0].keys, HQMQTensor)


# -- graphs that only ask how long a cache is --------------------------------------------------------
def test_a_graph_that_asks_for_a_size_unpacks_nothing(warnings):
    """`get_seq_length` between two graph breaks (hooks of accelerate, `device_map`) is such a graph."""
    loop = Loop("index_copy", CONFIG)
    loop(37)
    assert loop.keys.is_packed
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return hqmq(gm, inputs)

    @torch.compile(backend=backend, dynamic=True)
    def length(keys):
        return 0 if keys.numel() == 0 else ROOM

    with torch.no_grad():
        assert length(loop.keys) == ROOM
    assert graphs and loop.keys.is_packed, warnings.text


def test_a_graph_that_reads_a_cache_unpacks_it(warnings):
    loop = Loop("index_copy", CONFIG)
    loop(37)
    expected = loop.keys.dequantize().sum()
    with torch.no_grad():
        actual = torch.compile(lambda x, keys: x + keys.sum(), backend=hqmq)(
            torch.ones(()), loop.keys
        )
    torch.testing.assert_close(actual, expected + 1)
    assert "unpacking a cache" in warnings.text
