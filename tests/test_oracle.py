"""Whole models with packed caches against eager models with fake quantization at the same points."""

from __future__ import annotations

import pytest

from tests.compare import TYPICAL, Pair, cheap
from tests.configs import CONFIGS

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

LENGTHS = (37, 1, 1, 1, 11, 1, 1)  # 37 > window: exact prefill; 11 <= 16, > 8: both rules


def session(pair: Pair) -> list[float]:
    """Prefill, steps, second prompt, steps; then reset, prefill, steps."""
    errors = pair.calls_of(*LENGTHS)
    pair.check_packed()
    pair.reset()
    errors += pair.calls_of(37, 1, 1)
    return errors


def check(errors: list[float]) -> None:
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)


# Every model with a config of its own: `test_hand_written.py` has every config with every kind of cache.
MODELS = [
    ("llama", "sdpa", "8", {}),
    ("llama", "eager", "haar", {}),
    ("qwen3", "sdpa", "immediate", {}),
    ("mistral", "sdpa", "16", {"sliding_window": 24}),
    ("gemma3", "sdpa", "8", {"sliding_window": 24}),
    ("gemma3", "eager", "paper", {"sliding_window": 32}),
    ("gemma2", "eager", "3bit", {"sliding_window": 24}),
    ("gpt-oss", "eager", "5bit", {"sliding_window": 24}),
]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name, attn, which, settings", MODELS)
def test_models(name, attn, which, settings, kind):
    pair = Pair(name, kind, CONFIGS[which], attn=attn, **settings)
    check(session(pair))
