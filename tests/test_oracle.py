"""Whole models with packed caches against eager models with fake quantization at the same points."""

from __future__ import annotations

import pytest
import torch

from tests import oracle
from tests.compare import TYPICAL, Pair, cheap, error
from tests.configs import CONFIGS
from tests.oracle import Stored

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


def test_ties_are_decided_and_nothing_else(monkeypatch):
    """Values that differ by noise give ties; values that are wrong do not."""
    monkeypatch.setattr(oracle, "NOISE", 4e-4)  # at 4e-6 there is hardly a tie to be had
    spec = CONFIGS["16"].spec("value", 32, "float32")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 192, 32, generator=generator)
    noise = 1 + 1e-4 * torch.randn(x.shape, generator=generator)

    def stored(tokens, witness=None) -> Stored:
        read = None if witness is None else lambda a, b: witness[:, :, a:b]
        result = Stored(spec, 2, 2, 192, 32, read)
        result.write(tokens, 0)
        return result

    theirs = stored(x * noise).values
    alone, watched = stored(x).values, stored(x, theirs)
    assert (alone - theirs).abs().max() > 0.01, "no tie in this test"
    # The window is exact in both: noise.
    assert error(watched.values, theirs) < 4e-4
    assert 0 < watched.ties < x.shape[:3].numel() / 20
    for wrong in (theirs.roll(1, 2), 0 * theirs, theirs.roll(1, 1), 1.001 * theirs):
        judged = stored(x, wrong)
        assert judged.ties == 0
        assert torch.equal(judged.values, alone)
