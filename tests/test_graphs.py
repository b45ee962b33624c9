"""Graph breaks, recompilations, and caches that pass from one compiled thing to another."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from hqmq_compile.backend import hqmq
from tests.compare import TYPICAL, Pair, cheap, error
from tests.configs import CONFIGS
from tests.hand_written import HEADS, QUERY_HEADS, Loop, fused, index_copied, split

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

CONFIG = CONFIGS["16"]


def loop_of(function, style="index_copy", **options) -> Loop:
    loop = Loop(style, CONFIG)
    loop.compiled = torch.compile(function, backend=hqmq, options={"config": CONFIG}, **options)
    return loop


def check(loop: Loop, counts=(37, 1, 1, 11, 1)) -> None:
    errors = [loop(count) for count in counts]
    assert max(errors) <= TYPICAL, errors
    loop.check_stored()


@pytest.mark.parametrize("dynamic", [True, False, None])
@pytest.mark.parametrize("style", ["index_copy", "cat"])
def test_dynamic_shapes_and_one_graph(style, dynamic):
    loop = Loop(style, CONFIG)
    options = {"config": CONFIG}
    loop.compiled = torch.compile(
        loop.target, backend=hqmq, options=options, dynamic=dynamic, fullgraph=True
    )
    check(loop)


def test_more_lengths_than_dynamo_compiles():
    """Beyond the limit Dynamo runs the function eagerly: on the packed caches, and right."""
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        loop = loop_of(index_copied, dynamic=False)
        errors = [loop(count) for count in (5, 4, 3, 2, 1, 6)]
        # Eager writes leave whole tensors in their slots: what is read is never coarser.
        assert max(errors) <= TYPICAL, errors


def test_update_and_attention_in_two_graphs():
    """`is_causal=(n > 1)` on a tensor breaks the graph between the update and attention."""

    def step(x, keys, values, place):
        query, key, value = split(x)
        slots = torch.arange(key.shape[2]) + place
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        torch._dynamo.graph_break()
        mask = torch.arange(keys.shape[2])[None] <= slots[:, None]
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    loop = loop_of(step)
    for count in (12, 1, 1, 9, 1, 16, 1):  # no longer than the window, whose tokens are exact
        assert loop(count) <= TYPICAL
    loop.check_stored()


def test_stance_eager_in_between():
    loop = loop_of(index_copied)
    assert loop(37) <= TYPICAL and loop(1) <= TYPICAL
    with torch.compiler.set_stance("force_eager"):
        assert loop(1) <= TYPICAL
    assert isinstance(loop.keys, HQMQTensor)
    assert loop(1) <= 0.1  # written by eager code, then packed again


def test_nested_compile():
    inner = torch.compile(index_copied, backend=hqmq, options={"config": CONFIG})

    def outer(x, keys, values, place):
        return inner(2 * x - x, keys, values, place)

    check(loop_of(outer))


def test_two_models_share_one_cache():
    """The second takes the packed cache of the first as it is."""
    first, second = loop_of(index_copied), loop_of(lambda *args: index_copied(*args) * 1.0)
    assert first(37) <= TYPICAL
    second.keys, second.values, second.past = first.keys, first.values, first.past
    for one, other in ((second, first), (first, second)) * 3:
        one.length = 0 if one.length is None else max(first.length, second.length)
        assert one(1) <= TYPICAL
        other.length = one.length
    first.check_stored()


def test_inductor_and_hqmq_in_turn_on_one_cache():
    """Another backend gets the cache unpacked and says what it would need; ours packs it again."""
    loop = loop_of(index_copied)
    assert loop(37) <= TYPICAL and loop.keys.is_packed
    other = torch.compile(index_copied, backend="aot_eager")
    x = fused(*(loop.tokens(heads, 1) for heads in (QUERY_HEADS, HEADS, HEADS)))
    with torch.no_grad():
        dense = [t.dequantize() for t in (loop.keys, loop.values)]
        expected = index_copied(x, *dense, torch.tensor(37))
        loop.keys, loop.values = (t.dequantize() for t in (loop.keys, loop.values))
        actual = other(x, loop.keys, loop.values, torch.tensor(37))
        assert error(actual, expected) <= TYPICAL
        torch.testing.assert_close(loop.keys, dense[0])
        again = loop.compiled(x, loop.keys, loop.values, torch.tensor(38))
    assert loop.keys.is_packed and again.isfinite().all()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_layer_left_out_in_the_middle(kind):
    """The others are packed, all are right, and the report names the one."""
    pair = Pair("llama", kind, HQMQConfig(window=16, block=16, layers={0: None}))
    assert max(pair.calls_of(37, 1, 1, 11, 1)) <= 1e-5
    report = hqmq_compile.explain(pair.model)
    packed = [isinstance(layer.keys, HQMQTensor) for layer in pair.cache.layers]
    assert packed == [False, True] and not report.complete
    assert any("excluded by config.layers" in a.reason for a in report.attentions)
