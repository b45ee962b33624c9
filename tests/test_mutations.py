"""The comparison with the oracle must fail for every wrong cache and every wrong graph.

Each test runs a right step, then the same step with one thing spoiled on copies of the caches: the
error must be at least ten times the tolerance of the project.
"""

from __future__ import annotations

import copy

import pytest
import torch

import hqmq_compile.backend
from hqmq_compile import HQMQConfig
from tests.compare import TOLERANCE, TYPICAL, Pair
from tests.configs import ROOMY

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
WRONG = 10 * TOLERANCE


class Variants:
    """In place of inductor: runs the rewritten graph, or a variant of it while `spoil` is set."""

    spoil = None  # changes a dict of the arguments of `write_attend`, by name

    def __call__(self, gm, inputs, config_patches=None):
        def run(*args):
            if self.spoil is None:
                return gm.forward(*args)
            module = copy.deepcopy(gm)
            nodes = module.graph.find_nodes(
                op="call_function", target=torch.ops.hqmq.write_attend.default
            )
            assert nodes, "nothing was rewritten"
            names = [a.name for a in nodes[0].target._schema.arguments]
            for node in nodes:
                named = dict(zip(names, node.args, strict=True))
                self.spoil(named)
                assert list(named.values()) != list(node.args), "nothing was spoiled"
                node.args = tuple(named.values())
            module.recompile()
            return module.forward(*args)

        return run


@pytest.fixture
def variants(monkeypatch):
    variants = Variants()
    monkeypatch.setattr(hqmq_compile.backend, "compile_fx", variants)
    return variants


def prepared(name: str, kind: str, config: HQMQConfig, **settings) -> Pair:
    """A pair after a prefill and a step, with packed tokens."""
    pair = Pair(name, kind, config, **settings)
    for model in (pair.model, pair.twin):
        for parameter, weight in model.named_parameters():
            if parameter.endswith("sinks"):
                weight.data += 2  # else a text of 60 tokens outweighs them
    errors = pair.calls_of(60, 1, 1)
    assert max(errors) <= TYPICAL
    pair.check_packed()
    return pair


def step_with(pair: Pair, spoil, count: int = 1) -> float:
    """The error of a step on copies of the caches, one of which `spoil` has changed."""
    twin = copy.copy(pair)
    twin.cache, twin.oracle = copy.deepcopy(pair.cache), copy.deepcopy(pair.oracle)
    twin.oracle.watch(twin.cache)
    with torch.no_grad():
        spoil(twin.cache)
    return twin.call(count)


def buffers(change, *roles):
    """Changes the packed buffers of keys, values or both, in every layer."""

    def spoil(cache):
        for layer in cache.layers:
            for role in roles:
                change(getattr(layer, role).packed.buffers)

    return spoil


def zeroed(b):
    for buffer in (b.scales, b.ring, b.sinks):
        buffer.zero_()


def rolled(b):
    b.codes.copy_(b.codes.roll(1, 2))
    b.scales.copy_(b.scales.roll(1, 2))


def heads_flipped(b):
    for buffer in (b.codes, b.scales, b.pool, b.exponents, b.means):
        buffer.copy_(buffer.flip(1))


def swapped(cache):
    for layer in cache.layers:
        layer.keys, layer.values = layer.values, layer.keys


def late(cache):
    """Keys one slot late, in codes and window alike."""
    for layer in cache.layers:
        dense = layer.keys.dequantize()
        layer.keys.copy_(dense.roll(1, 2))


WRONG_CACHES = {
    "keys zeroed": buffers(zeroed, "keys"),
    "values zeroed": buffers(zeroed, "values"),
    "packed keys lost": buffers(lambda b: b.scales.zero_(), "keys"),
    "packed values lost": buffers(lambda b: b.scales.zero_(), "values"),
    "packed keys one slot late": buffers(rolled, "keys"),
    "packed values one slot late": buffers(rolled, "values"),
    "all keys one slot late": late,
    "keys and values swapped": swapped,
    "heads swapped": buffers(heads_flipped, "keys"),
    "window of keys lost": buffers(lambda b: b.ring.zero_(), "keys"),
    "window of values lost": buffers(lambda b: b.ring.zero_(), "values"),
    "sinks lost": buffers(lambda b: b.sinks.zero_(), "keys", "values"),
    "outliers lost": buffers(lambda b: b.pool.zero_(), "keys"),
    "outliers 4 times too long": buffers(lambda b: b.exponents.add_(2), "keys"),
    "means lost": buffers(lambda b: b.means.zero_(), "keys"),
    "scales one code too high": buffers(lambda b: b.scales.add_(b.scales > 0), "values"),
}


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_wrong_caches(variants, kind):
    # Multiplier 2: tiny models have few chunks of three medians.
    config = HQMQConfig(window=16, block=16, sink_tokens=4, med3x={"multiplier": 2.0})
    pair = prepared("llama", kind, config)
    assert all(p.buffers.pool.any() for p in pair.packed[::2]), "no outliers in this test"
    assert step_with(pair, lambda cache: None) <= TYPICAL
    errors = {name: step_with(pair, spoil) for name, spoil in WRONG_CACHES.items()}
    assert min(errors.values()) > WRONG, {k: f"{v:.4f}" for k, v in errors.items()}


def test_wrong_caches_packed_on_write(variants):
    config = HQMQConfig(window=0, block=16, sink_tokens=0, prefill="stored", med3x=ROOMY)
    pair = prepared(
        "qwen2", "static", config, num_hidden_layers=1
    )  # its keys are far from zero mean
    assert step_with(pair, lambda cache: None) <= TYPICAL
    names = ["keys zeroed", "packed values lost", "packed keys one slot late", "heads swapped"]
    errors = {name: step_with(pair, WRONG_CACHES[name]) for name in names}
    assert min(errors.values()) > WRONG, {k: f"{v:.4f}" for k, v in errors.items()}


def change(**values):
    return lambda arguments: arguments.update(values)


def exchange(a: str, b: str):
    return lambda arguments: arguments.update({a: arguments[b], b: arguments[a]})


def late_positions(arguments):
    if arguments["positions"] is None:
        arguments["start"] = arguments["start"] + 1 if "start" in arguments else 1
        return
    positions = arguments["positions"]
    with positions.graph.inserting_after(positions):
        moved = positions.graph.call_function(torch.ops.aten.add.Tensor, (positions, 1))
    arguments["positions"] = moved


WRONG_GRAPHS = {
    "llama": {
        "mask dropped": change(mask=None),
        "keys and values swapped": exchange("key", "value"),
        "value written as key": lambda a: a.update(key=a["value"]),
        "scale forgotten": change(scale=1.0),
        "written one slot late": late_positions,
        "causal mask of a prefill": change(causal=True),
    },
    "gemma2": {"softcap dropped": change(softcap=0.0), "mask dropped": change(mask=None)},
    "gpt-oss": {"sinks dropped": change(sinks=None), "mask dropped": change(mask=None)},
}


ONE = {"llama": {"num_hidden_layers": 1}}


@pytest.mark.parametrize("name", WRONG_GRAPHS)
def test_wrong_graphs(variants, name):
    config = HQMQConfig(window=16, block=16)
    pair = prepared(
        name, "static", config, room=1024, **ONE.get(name, {})
    )  # many empty slots behind the mask
    errors = {}
    for what, spoil in WRONG_GRAPHS[name].items():
        variants.spoil = spoil
        errors[what] = step_with(pair, lambda cache: None)
    variants.spoil = None
    assert step_with(pair, lambda cache: None) <= TYPICAL
    assert min(errors.values()) > WRONG, {k: f"{v:.4f}" for k, v in errors.items()}


def test_padding_forgotten(variants):
    pair = Pair(
        "llama", "dynamic", HQMQConfig(window=16, block=16), padding=(0, 9), num_hidden_layers=1
    )
    assert max(pair.calls_of(37, 1)) <= TYPICAL
    whole = pair.model.forward
    pair.model.forward = lambda *args, attention_mask, **options: whole(*args, **options)
    assert pair.call(1) > WRONG


def test_wrong_order_of_a_batch(variants):
    pair = Pair("llama", "dynamic", HQMQConfig(window=16, block=16), batch=3, num_hidden_layers=1)
    assert max(pair.calls_of(37, 1, 1)) <= TYPICAL
    pair.oracle.reorder_cache(torch.tensor([1, 2, 0]))
    assert step_with(pair, lambda cache: None) > WRONG
    pair.cache.reorder_cache(torch.tensor([1, 2, 0]))
    assert pair.call(1) <= TYPICAL
