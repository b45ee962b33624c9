"""Tiny random models of real architectures, in which attention matters.

    model = tiny("gemma3", attn="eager", sliding_window=8)

Random transformers attend almost evenly, so a wrong key would hardly change the output. Here the
query and key weights are scaled up until attention is peaked, and the value path until it carries
the residual stream: `tests/models/test_tiny.py` holds that zeroed, shifted or swapped keys
and values change the logits by far more than any tolerance used.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import torch

VOCABULARY = 128


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Names of the transformers classes and what differs from `_BASE`."""

    config: str
    model: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"]

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM"),  # biases on keys
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),  # norm on keys
    "mistral": Architecture("MistralConfig", "MistralForCausalLM", {"sliding_window": 16}),
    "gemma2": Architecture(  # softcap, alternating sliding windows
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 16,
            "layer_types": _MIXED,
            "attn_logit_softcapping": 20.0,
        },
    ),
    "gemma3": Architecture(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "layer_types": _MIXED,
            "head_dim": 32,
            "num_key_value_heads": 1,
        },
    ),
    "gpt-oss": Architecture(  # attention sinks, mixture of experts
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "sliding_window": 16,
            "layer_types": _MIXED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}


def tiny(
    name: str,
    *,
    attn: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """A model in eval mode with random weights, the same for the same arguments.

    Args:
        name: one of `ARCHITECTURES`.
        attn: "sdpa" or "eager"; by default SDPA, but eager where transformers has nothing else
            that is right (softcap, sinks).
        dtype: of the weights.
        seed: of the weights.
        settings: of the transformers config, in place of the defaults.
    """
    import transformers

    architecture = ARCHITECTURES[name]
    config_class = getattr(transformers, architecture.config)
    config = config_class(**{**_BASE, **architecture.settings, **settings})
    attn = attn or ("eager" if name in ("gemma2", "gpt-oss") else "sdpa")
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = getattr(transformers, architecture.model)._from_config(
            config, attn_implementation=attn
        )
        _sharpen(model)
    finally:
        torch.set_rng_state(generator_state)
    return model.to(dtype).eval()


@torch.no_grad()
def _sharpen(model: torch.nn.Module) -> None:
    """Weights of a size that makes attention peaked and the value path count."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            torch.nn.init.normal_(weight, std=2.0 / weight.shape[1] ** 0.5)
        elif name.endswith(("v_proj.weight", "o_proj.weight")):
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
        elif name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias")):
            torch.nn.init.normal_(weight, std=0.5)  # as in Qwen2: keys far from zero mean
        elif name.endswith("q_norm.weight"):
            weight.add_(1.0)  # Gemma stores it minus one: both become 2
        elif name.endswith("sinks"):
            torch.nn.init.normal_(weight, std=1.0)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            torch.nn.init.normal_(weight, std=0.3)


def prompt(length: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """`[batch, length]` int64 token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def cache_keyword(model: Any) -> str:
    """The name of the cache argument: `past_key_values`, and `cache` in newer transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
