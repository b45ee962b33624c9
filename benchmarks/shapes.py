"""Models of the shapes that people serve, with random weights made on the device: nothing is downloaded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architecture": "Llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen2.5-7b": {
        "architecture": "Qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
    },
    "mistral-7b": {
        "architecture": "Mistral",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": None,
    },
    "llama-3-70b": {
        "architecture": "Llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "tiny": {  # for tests
        "architecture": "Llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def config_of(name: str, layers: int = 0) -> Any:
    """The transformers config of one of SHAPES; `layers` other than 0 replaces their number."""
    import transformers

    shape = dict(SHAPES[name])
    kind = getattr(transformers, shape.pop("architecture") + "Config")
    if layers:
        shape["num_hidden_layers"] = layers
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return kind(**shape, **special, max_position_embeddings=1 << 18)


def build(name: str, layers: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model of random weights, in evaluation mode."""
    import transformers

    config = config_of(name, layers)
    kind = getattr(transformers, SHAPES[name]["architecture"] + "ForCausalLM")
    torch.manual_seed(0)
    with torch.device(device), default_dtype(dtype):
        return kind(config).eval().requires_grad_(False)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def dims(config: Any) -> tuple[int, int, int]:
    """Layers, KV heads, head dimension."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, config.num_key_value_heads, head_dim


def cache_bytes(config: Any, slots: int) -> int:
    """Bytes of the 16-bit keys and values of one sequence."""
    layers, heads, dim = dims(config)
    return 2 * 2 * layers * heads * dim * slots
