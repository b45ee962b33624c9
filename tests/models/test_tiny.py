"""The tiny models notice a wrong cache: otherwise tests that use them would prove nothing."""

from __future__ import annotations

import pytest
import torch

from tests.models.tiny import ARCHITECTURES, cache_keyword, prompt, tiny

pytest.importorskip("transformers")


@torch.no_grad()
def _next_logits(model, ids, spoil=None):
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    for layer in cache.layers:
        if spoil:
            layer.keys, layer.values = spoil(layer.keys, layer.values)
    return model(ids[:, -1:], **{cache_keyword(model): cache}).logits


SPOILED = {
    "zeroed keys": lambda k, v: (torch.zeros_like(k), v),
    "zeroed values": lambda k, v: (k, torch.zeros_like(v)),
    "keys one slot late": lambda k, v: (k.roll(1, -2), v),
    "values one slot late": lambda k, v: (k, v.roll(1, -2)),
    "keys and values swapped": lambda k, v: (v, k),
    "heads swapped": lambda k, v: (k.flip(1), v.flip(1)),
    "last key lost": lambda k, v: (torch.cat((k[..., :-1, :], 0 * k[..., -1:, :]), -2), v),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_wrong_cache_changes_logits(name):
    model, ids = tiny(name), prompt(13)
    right = _next_logits(model, ids)
    torch.testing.assert_close(_next_logits(model, ids), right, rtol=0, atol=0)
    for what, spoil in SPOILED.items():
        if what == "heads swapped" and model.config.num_key_value_heads == 1:
            continue
        change = (_next_logits(model, ids, spoil) - right).norm() / right.norm()
        assert change > 0.01, f"{what}: {change:.4f}"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_seed_gives_the_model_and_leaves_the_generator(name):
    torch.manual_seed(7)
    state = torch.get_rng_state()
    first, second = tiny(name).state_dict(), tiny(name).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not torch.equal(
        first["model.layers.0.self_attn.q_proj.weight"],
        tiny(name, seed=1).state_dict()["model.layers.0.self_attn.q_proj.weight"],
    )
