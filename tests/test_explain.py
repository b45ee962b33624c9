"""`explain`: what was rewritten, what was not and why, and what it costs."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch
from transformers import DynamicCache, StaticCache

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from hqmq_compile.kernels import cpu
from tests.compare import Pair, cheap
from tests.configs import CONFIGS
from tests.hand_written import BATCH, DIM, HEADS, ROOM, index_copied
from tests.models.tiny import cache_keyword, prompt, tiny

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]


def test_live_model():
    pair = Pair("gemma3", "static", CONFIGS["16"])
    before = hqmq_compile.explain(pair.model)
    assert not before.attentions and "no graph" in str(before)
    pair.calls_of(37, 1)
    report = hqmq_compile.explain(pair.model)
    assert report.complete
    assert len(report.graphs) == 2 and len(report.attentions) == 4  # two layers
    for attention in report.attentions:
        assert attention.rewritten and attention.reason == ""
        assert attention.source.startswith("modeling_gemma3.py:") and attention.form == "sdpa"
    kinds = [attention.cache for attention in report.attentions]
    assert kinds[:2] == ["born in the graph"] * 2
    assert kinds[2:] == ["sliding window", "in place, by position"]
    text = str(report)
    assert "2 of 2 attentions rewritten" in text and "modeling_gemma3.py" in text
    assert "bits an element" in text

    tensors = [t for layer in pair.cache.layers for t in (layer.keys, layer.values)]
    assert {id(t) for t in report.caches} == {id(t) for t in tensors}
    assert report.stored_bytes == sum(t.stored_bytes for t in tensors)
    assert report.logical_bytes == sum(t.numel() * 4 for t in tensors)
    assert report.bits_per_element == pytest.approx(
        8 * report.stored_bytes * 4 / report.logical_bytes
    )
    pair.cache = pair.oracle = tensors = None
    gc.collect()  # Dynamo leaves cycles
    assert hqmq_compile.explain(pair.model).caches == [], "the report keeps caches alive"


def test_memory_of_a_long_growing_cache():
    """Live numbers, each cache once, and below a third of 16 bits."""
    pair = Pair("llama", "dynamic", HQMQConfig(window=16, block=16, sink_tokens=4))
    pair.oracle = DynamicCache(config=pair.twin.config)
    pair.calls_of(1024, 1, 1)
    report = hqmq_compile.explain(pair.model)
    assert len(report.caches) == 4
    assert report.logical_bytes == 4 * 2 * 1026 * 16 * 4
    # Heads of 16 elements: scales and means weigh more than in real models.
    assert 4 < report.bits_per_element < 9
    assert report.stored_bytes < report.logical_bytes / 4  # of float32


@pytest.mark.parametrize("kernel", ["auto", "torch"])
def test_says_what_computes(kernel, monkeypatch):
    config = dataclasses.replace(CONFIGS["16"], kernel=kernel)
    pair = Pair("llama", "static", config)
    pair.calls_of(37, 1)
    report = hqmq_compile.explain(pair.model)
    if kernel == "torch":
        assert report.kernels == ["plain torch: kernel='torch'"]
        return
    if cpu.why_not(config.spec("key", 32, torch.float32)) is None:
        assert report.kernels == ["C++"] and "query tokens by C++" in str(report)
    monkeypatch.setattr(cpu, "why_not", lambda spec: "no compiler")
    assert report.kernels == ["plain torch: no compiler"]


def test_call_leaves_the_caches_alone():
    """With arguments: a dry run on copies. A dynamic cache does not grow, a static one stays plain."""
    model = tiny("llama")
    key = cache_keyword(model)
    for cache in (
        DynamicCache(config=model.config),
        StaticCache(config=model.config, max_cache_len=64),
    ):
        with torch.no_grad():
            model(prompt(9), **{key: cache})
        before = [layer.keys.clone() for layer in cache.layers]
        length = int(cache.get_seq_length())
        report = hqmq_compile.explain(model, prompt(1), **{key: cache})
        assert [a.rewritten for a in report.attentions] == [True, True], str(report)
        assert int(cache.get_seq_length()) == length
        for layer, keys in zip(cache.layers, before, strict=True):
            assert type(layer.keys) is torch.Tensor and torch.equal(layer.keys, keys)
    assert hqmq_compile.explain(model).graphs == [], "a dry run is not a compiled graph"


def test_call_leaves_packed_caches_packed():
    pair = Pair("llama", "static", CONFIGS["16"])
    pair.calls_of(37, 1)
    states = [p.buffers.state.clone() for p in pair.packed]
    report = hqmq_compile.explain(pair.model, prompt(1), **{pair.keyword: pair.cache})
    assert report.complete and len(report.attentions) == 2
    assert all(torch.equal(p.buffers.state, s) for p, s in zip(pair.packed, states, strict=True))
    assert pair.call(1) < 1e-5


def test_attention_weights_are_asked_for_once():
    """No packed attention gives weights: that call reads dense, is reported, and stays packed."""
    pair = Pair("llama", "dynamic", CONFIGS["16"], attn="eager")
    pair.calls_of(37, 1)
    ids, more = prompt(1), {"output_attentions": True}
    with torch.no_grad():
        actual = pair.model(ids, **{pair.keyword: pair.cache}, **more)
        expected = pair.twin(ids, **{pair.keyword: pair.oracle}, **more)
    for mine, theirs in zip(actual.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    pair.length += 1
    assert pair.call(1) < 1e-5
    report = hqmq_compile.explain(pair.model)
    reasons = {a.dense for a in report.attentions}
    assert report.complete and len(reasons) == 2 and "" in reasons
    assert any("attention weights are read" in reason for reason in reasons)
    assert "packed, read dense: attention weights" in str(report)
    gc.collect()  # Dynamo keeps what it traced, the packed tensors of a step before, in cycles
    assert len(hqmq_compile.explain(pair.model).caches) == 4


def test_function_and_its_arguments():
    keys, values = torch.zeros(BATCH, HEADS, ROOM, DIM), torch.zeros(BATCH, HEADS, ROOM, DIM)
    x = torch.randn(BATCH, 1, 8 * DIM)
    report = hqmq_compile.explain(index_copied, x, keys, values, torch.tensor(0))
    (attention,) = report.attentions
    assert attention.rewritten and attention.cache == "in place, by position"
    assert not keys.any() and not isinstance(keys, HQMQTensor)
    with pytest.raises(ValueError, match="arguments"):
        hqmq_compile.explain(index_copied)


def test_layer_left_out_by_the_config():
    pair = Pair("llama", "dynamic", HQMQConfig(window=8, block=8, layers={1: None}))
    pair.calls_of(20, 1)
    report = hqmq_compile.explain(pair.model)
    assert [a.rewritten for a in report.graphs[1].attentions] == [True, False]
    assert "layer 1 is excluded" in report.graphs[1].attentions[1].reason
    assert not report.complete


def test_head_dim_that_cannot_be_coded():
    """One clear reason, right numbers, no crash."""
    pair = Pair("llama", "static", CONFIGS["16"], head_dim=18)
    pair.oracle = pair.new_cache()
    assert max(pair.calls_of(20, 1)) < 1e-5
    report = hqmq_compile.explain(pair.model)
    assert not report.complete
    assert all("18 is not a multiple of 4" in a.reason for a in report.attentions)


def test_models_without_caches():
    """Nothing to rewrite is no problem, and is said."""

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.project(x).chunk(3, -1)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    model = Encoder()
    model.compile(backend="hqmq")
    x = torch.randn(2, 4, 9, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(x), Encoder.forward(model, x))
    report = hqmq_compile.explain(model)
    (attention,) = report.attentions
    assert not attention.rewritten and not attention.is_cache and attention.reason
    assert report.complete and report.caches == [] and report.bits_per_element == 0
