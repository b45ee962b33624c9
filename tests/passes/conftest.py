"""Captures real Dynamo graphs and runs the finders on them."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
from torch.fx import GraphModule

from hqmq_compile.passes.find_attention import find_attention
from hqmq_compile.passes.find_caches import find_caches
from hqmq_compile.passes.graph_types import Attention, Match
from hqmq_compile.passes.layouts import one_layout
from hqmq_compile.passes.normalize import PlaceholderInfo, normalize

VOCAB = 64


@dataclasses.dataclass
class Analysis:
    """One captured graph with what the finders say about it."""

    dynamo: GraphModule
    graph: GraphModule
    infos: list[PlaceholderInfo]
    attentions: list[Attention]
    matches: list[Match]

    @property
    def match(self) -> Match:
        (match,) = self.matches
        return match


class Recorder:
    """A torch.compile backend that analyses each graph and runs the normalised one."""

    def __init__(self) -> None:
        self.graphs: list[Analysis] = []

    def __call__(self, gm: GraphModule, example_inputs: list) -> object:
        traced, infos = normalize(gm)
        attentions = one_layout(traced.graph, find_attention(traced.graph))
        matches = find_caches(traced.graph, attentions)
        traced.graph.lint()
        self.graphs.append(Analysis(gm, traced, infos, attentions, matches))
        traced.recompile()
        return traced.forward


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def analyze():
    """`analyze(f)(args)` runs compiled `f` under no_grad, checks it against eager on copies of the
    arguments, and returns the Analysis of the graph that this call compiled, or of the last one."""

    def wrap(function, *, check: bool = True):
        recorder = Recorder()
        compiled = torch.compile(function, backend=recorder, fullgraph=True)

        def call(*args, **kwargs) -> Analysis:
            with torch.no_grad():
                copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                expected = function(*copies, **kwargs) if check else None
                actual = compiled(*args, **kwargs)
            if check:
                torch.testing.assert_close(actual, expected)
                for left, right in zip(args, copies, strict=True):
                    if isinstance(left, torch.Tensor):
                        torch.testing.assert_close(left, right)
            return recorder.graphs[-1]

        call.recorder = recorder
        return call

    return wrap


def tiny_model(name: str, attention: str):
    """A two-layer random transformers model; sliding windows are 8."""
    transformers = pytest.importorskip("transformers")
    base = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    mixed = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    config, model, extra = {
        "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
        "mistral": ("MistralConfig", "MistralForCausalLM", dict(sliding_window=8)),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", dict(mixed, query_pre_attn_scalar=16)),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", dict(mixed, query_pre_attn_scalar=16)),
        "gptoss": (
            "GptOssConfig",
            "GptOssForCausalLM",
            dict(mixed, num_local_experts=4, num_experts_per_tok=2),
        ),
        "mixtral": (
            "MixtralConfig",
            "MixtralForCausalLM",
            dict(num_local_experts=4, num_experts_per_tok=2),
        ),
        "bloom": (
            "BloomConfig",
            "BloomForCausalLM",
            dict(n_layer=2, n_head=4, hidden_size=32, vocab_size=VOCAB),
        ),
        "deepseek": (
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            dict(
                num_key_value_heads=4,
                head_dim=8,
                n_shared_experts=1,
                moe_intermediate_size=16,
                n_routed_experts=4,
                kv_lora_rank=8,
                q_lora_rank=8,
                qk_rope_head_dim=8,
                v_head_dim=8,
                qk_nope_head_dim=8,
                n_group=2,
                topk_group=1,
                num_experts_per_tok=2,
                first_k_dense_replace=2,
            ),
        ),
    }[name]
    settings = {**base, **extra}
    if name == "bloom":
        settings = {k: v for k, v in settings.items() if k in extra or k.endswith("token_id")}
    settings = getattr(transformers, config)(**settings)
    settings._attn_implementation = attention
    torch.manual_seed(0)
    return getattr(transformers, model)._from_config(settings, attn_implementation=attention).eval()


@pytest.fixture
def steps():
    """`steps(name, "static", "sdpa", (7, 1))`: one Analysis per call of the model on one cache.

    A call that needed no new graph gives the Analysis of the graph it ran before.
    """

    def run(name: str, kind: str, attention: str, lengths: tuple[int, ...]) -> list[Analysis]:
        import transformers

        model = tiny_model(name, attention)
        recorder = Recorder()
        model.forward = torch.compile(model.forward, backend=recorder)
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        else:
            cache = transformers.DynamicCache(config=model.config)
        names = inspect.signature(type(model).forward).parameters
        keyword = "cache" if "cache" in names else "past_key_values"
        results = []
        with torch.no_grad():
            for length in lengths:
                model(torch.randint(3, VOCAB, (1, length)), **{keyword: cache})
                results.append(recorder.graphs[-1])
        return results

    return run
