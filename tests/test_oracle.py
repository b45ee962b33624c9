"""Whole models with packed caches against eager models with fake quantization at the same points."""

from __future__ import annotations

import pytest
import torch
from tests.compare import TOLERANCE, TYPICAL, Pair, cheap, error

from hqmq_compile import HQMQConfig, Med3xConfig

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

ROOMY = Med3xConfig(pool=0.5)  # never full, so that no outlier depends on the order of writes
CONFIGS = {
    "16": HQMQConfig(window=16, block=16),
    "8": HQMQConfig(window=8, block=8, sink_tokens=2),
    "long block": HQMQConfig(window=8, block=32, sink_tokens=0),
    "immediate": HQMQConfig(window=0, block=16, med3x=ROOMY),
    "stored": HQMQConfig(window=8, block=16, prefill="stored"),
    "3bit": HQMQConfig.preset("3bit", window=8, block=16),
    "5bit": HQMQConfig.preset("5bit", window=16, block=8),
    "paper": HQMQConfig.preset("paper", block=16),
    "rotated": HQMQConfig(window=8, block=16, med3x=None, rotate=True),
    "first": HQMQConfig(window=0, block=16, center="first", prefill="stored", med3x=ROOMY),
    "haar": HQMQConfig(
        window=8,
        block=16,
        key={"codebook": "haar", "secondary": 30, "radius_bits": 4},
        value={"codebook": "haar", "secondary": 20, "radius_bits": 3, "scale": "float16"},
        med3x={"roles": ["key", "value"]},
    ),
}
LENGTHS = (37, 1, 1, 1, 11, 1, 1)  # 37 > window: exact prefill; 11 <= 16, > 8: both rules


def session(pair: Pair) -> list[float]:
    """Prefill, steps, second prompt, steps; then reset, prefill, steps."""
    errors = pair.calls_of(*LENGTHS)
    pair.check_packed()
    pair.reset()
    errors += pair.calls_of(29, 1, 1)
    return errors


def check(errors: list[float]) -> None:
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)


MODELS = [
    ("llama", "sdpa", {}),
    ("llama", "eager", {}),
    ("qwen3", "sdpa", {}),
    ("mistral", "sdpa", {"sliding_window": 32}),
    ("gemma3", "sdpa", {"sliding_window": 32}),
    ("gemma3", "eager", {"sliding_window": 32}),
    ("gemma2", "eager", {"sliding_window": 32}),
    ("gpt-oss", "eager", {"sliding_window": 32}),
]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name, attn, settings", MODELS)
def test_models(name, attn, settings, kind):
    check(session(Pair(name, kind, CONFIGS["8"], attn=attn, **settings)))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("which", [name for name in CONFIGS if name != "8"])
def test_configs(which, kind):
    check(session(Pair("llama", kind, CONFIGS[which])))
