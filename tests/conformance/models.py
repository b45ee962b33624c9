"""Makes the tiny models of `architectures.py`, their caches and their inputs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
)
from transformers import AutoModelForSpeechSeq2Seq as AutoModelForSpeech

from tests.conformance.architectures import STATIC, VOCABULARY, Architecture

SOURCE = 30  # tokens of the encoder; Whisper takes twice as many frames
QUERY_KEY = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "c_q", "c_k", "q_b", "kv_b")


def tiny(architecture: Architecture, attention: str, seed: int = 0) -> Any:
    """A model in eval mode with random weights, the same for the same arguments."""
    settings = {**architecture.base, **architecture.settings}
    config = CONFIG_MAPPING[architecture.type](**settings)
    auto = AutoModelForCausalLM
    if architecture.encoder:
        auto = AutoModelForSpeech if architecture.type == "whisper" else AutoModelForSeq2SeqLM
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = auto.from_config(config, attn_implementation=attention)
        _sharpen(model, architecture.sharpness)
    finally:
        torch.set_rng_state(state)
    return model.float().eval()


@torch.no_grad()
def _sharpen(model: nn.Module, sharpness: float) -> None:
    """Weights of a size that makes attention peaked and the value path count (`models/tiny.py`)."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(weight, std=0.3)
        if not isinstance(weight, Tensor) or weight.ndim != 2 or not _in_attention(model, name):
            continue
        fan_in = weight.shape[0 if type(module).__name__ == "Conv1D" else 1]
        leaf = name.rsplit(".", 1)[-1].lower()
        sharp = leaf in ("q", "k", "wqkv") or any(part in leaf for part in QUERY_KEY)
        nn.init.normal_(weight, std=(sharpness if sharp else 1.5) / fan_in**0.5)
        if getattr(module, "bias", None) is not None:
            nn.init.normal_(module.bias, std=0.25 * sharpness)  # keys far from zero mean


def _in_attention(model: nn.Module, name: str) -> bool:
    path = name.split(".")
    return any(
        "Attention" in type(model.get_submodule(".".join(path[:end]))).__name__
        for end in range(1, len(path))
    )


def attentions(model: nn.Module) -> list[nn.Module]:
    """The modules of the (decoder's) attentions that keep a cache."""
    root = model.get_decoder() if model.config.is_encoder_decoder else model
    named = [m for m in root.modules() if _is_attention(m)]
    return [m for m in named if not any(_is_attention(c) for c in m.modules() if c is not m)]


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return "Attention" in name and "Linear" not in name and "Lightning" not in name


def new_cache(model: Any, kind: str, room: int) -> Cache:
    """As `generate` makes it."""

    def one(length: int) -> Cache:
        if kind == STATIC:
            return StaticCache(config=model.config, max_cache_len=length)
        return DynamicCache(config=model.config)

    if model.config.is_encoder_decoder:
        return EncoderDecoderCache(one(room), one(SOURCE))
    return one(room)


def cache_tensors(cache: Cache) -> list[Tensor]:
    """Keys and values of all layers that have any."""
    if isinstance(cache, EncoderDecoderCache):
        parts = cache.self_attention_cache, cache.cross_attention_cache
        return [tensor for part in parts for tensor in cache_tensors(part)]
    found = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return [tensor for tensor in found if isinstance(tensor, Tensor)]


def cache_keyword(model: Any) -> str:
    """The name of the cache argument: `past_key_values`, and `cache` in newer transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def tokens(length: int, batch: int, seed: int) -> Tensor:
    """`[batch, length]` token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


@torch.no_grad()
def encoded(model: Any, batch: int) -> dict[str, Any]:
    """The encoder's output as a keyword of the decoder's calls; nothing without an encoder."""
    if not model.config.is_encoder_decoder:
        return {}
    if model.config.model_type == "whisper":
        generator = torch.Generator().manual_seed(99)
        shape = (batch, model.config.num_mel_bins, 2 * SOURCE)
        source = torch.randn(shape, generator=generator)
    else:
        source = tokens(SOURCE, batch, seed=99)
    return {"encoder_outputs": model.get_encoder()(source)}
