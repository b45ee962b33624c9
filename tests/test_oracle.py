"""Whole models with packed caches against eager models with fake quantization at the same points."""

from __future__ import annotations

import pytest
import torch

from hqmq_compile import HQMQConfig
from tests import oracle
from tests.compare import TYPICAL, Pair, cheap, error
from tests.configs import CONFIGS
from tests.oracle import Stored

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

ONE = {"num_hidden_layers": 1}
# Dynamo needs two seconds for a graph: hence few lengths, and one layer where one will do.


def session(pair: Pair, second: int = 11) -> list[float]:
    """Prefill, steps, second prompt, steps; then reset, prefill, steps."""
    errors = pair.calls_of(37, 1, 1, 1, second, 1, 1)
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
    ("qwen3", "sdpa", "immediate", {"num_hidden_layers": 1}),
    ("mistral", "sdpa", "16", {"sliding_window": 24, "num_hidden_layers": 1}),
    ("gemma3", "sdpa", "8", {"sliding_window": 24}),
    ("gemma3", "eager", "paper", {"sliding_window": 32}),
    ("gemma2", "eager", "3bit", {"sliding_window": 24}),
    ("gpt-oss", "eager", "5bit", {"sliding_window": 24}),
]
ATTENTION = {name: attn for name, attn, *_ in reversed(MODELS)}  # the first one of each model


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("name, attn, which, settings", MODELS)
def test_models(name, attn, which, settings, kind):
    pair = Pair(name, kind, CONFIGS[which], attn=attn, **settings)
    # The second prompt has a graph of its own; the eager twin of a model does without.
    check(session(pair, second=11 if attn == ATTENTION[name] else 1))


@pytest.mark.parametrize("kind, attn", [("static", "sdpa"), ("dynamic", "eager")])
def test_left_padding(kind, attn):
    """Three sequences of a batch, two of them padded: padding is masked in every call."""
    pair = Pair("llama", kind, CONFIGS["16"], attn=attn, padding=(0, 5, 21), **ONE)
    check(pair.calls_of(37, 1, 1, 1))
    pair.check_packed()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_window_longer_than_the_text_is_exact(kind):
    """Nothing is packed, and the model is the unquantized one with an ordinary cache."""
    pair = Pair("gemma2", kind, HQMQConfig(window=64), sliding_window=24)
    plain = pair.new_cache()
    pair.oracle = plain
    check(pair.calls_of(37, 1, 1))
    assert not any(p.packed_slots for p in pair.packed)
    assert any(layer.keys.shape[2] < 50 for layer in plain.layers)  # one slid


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_layers_with_a_config_of_their_own(kind):
    """Layer 0 stays in 16 bits and its cache a plain tensor; layer 1 has other settings."""
    changes = {0: None, 1: {"key": {"secondary": 42, "radius_bits": 3}, "sink_tokens": 0}}
    pair = Pair("llama", kind, HQMQConfig(window=8, block=8, layers=changes))
    check(pair.calls_of(37, 1, 1))
    plain, packed = pair.cache.layers
    assert type(plain.keys) is torch.Tensor and type(plain.values) is torch.Tensor
    assert packed.keys.packed.spec.secondary == 42
    assert packed.keys.packed.packed_slots > 0


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_cache_is_cropped(kind):
    """Tokens taken back within the window, then deep into packed blocks, then all of them."""
    pair = Pair("llama", kind, CONFIGS["16"], **ONE)
    errors = pair.calls_of(60, 1, 1, 1)
    pair.crop(2)
    errors += pair.calls_of(1, 1)
    pair.crop(40)
    errors += pair.calls_of(1, 1, 1)
    pair.check_packed()
    if kind == "static":
        pair.crop(pair.length)
        errors += pair.calls_of(60, 1)
    check(errors)


def test_batch_is_reordered_repeated_and_selected():
    """What beam search and several return sequences do to a cache between two steps."""
    pair = Pair("llama", "dynamic", CONFIGS["16"], batch=2, **ONE)
    errors = pair.calls_of(37, 1)
    both = (pair.cache, pair.oracle)
    for cache in both:
        cache.batch_repeat_interleave(3)
    pair.batch = 6
    errors += pair.calls_of(1, 1)
    for cache in both:
        cache.reorder_cache(torch.tensor([5, 5, 0, 3, 1, 2]))
    errors += pair.calls_of(1, 1)
    for cache in both:
        cache.batch_select_indices(torch.tensor([4, 0, 0]))
    pair.batch = 3
    errors += pair.calls_of(1, 1)
    check(errors)
    pair.check_packed()


def test_inference_mode():
    check(session(Pair("llama", "static", CONFIGS["8"], inference=True, **ONE), second=1))


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
