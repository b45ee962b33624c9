"""`generate()` in every way in which it reaches the backend, and the one way in which it does not."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from transformers import CompileConfig, DynamicCache, StaticCache

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from hqmq_compile.backend import hqmq
from tests.compare import cheap
from tests.configs import CONFIGS
from tests.models.tiny import cache_keyword, prompt, tiny
from tests.oracle import OracleCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]
CONFIG = CONFIGS["16"]
NEW = 24


def generate(model, ids, **options):
    """Sequences and cache of NEW more tokens, greedy where nothing else is asked for."""
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW} | options
    result = model.generate(ids, return_dict_in_generate=True, **options)
    return result.sequences, result.past_key_values


def small(name: str, **settings):
    """One layer, where layers are alike: Dynamo takes most of the time."""
    return tiny(name, **({} if name == "gemma3" else {"num_hidden_layers": 1}) | settings)


def expected(name: str, ids, config: HQMQConfig = CONFIG, room: int = 0, settings=None, **options):
    """The same from the eager model with the oracle."""
    twin = small(name, **(settings or {}))
    cache = OracleCache(twin.config, config, room)
    sequences, _ = generate(twin, ids, **{cache_keyword(twin): cache}, **options)
    assert max(cache.packed_slots) > 0, "nothing was packed"
    return sequences


def check_packed(cache) -> None:
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, HQMQTensor) and tensor.is_packed
    assert max(layer.keys.packed.packed_slots for layer in cache.layers) > 0


def compiled(name: str, config: HQMQConfig = CONFIG, **settings):
    model = small(name, **settings)
    model.compile(backend=hqmq, options={"config": config})
    return model


def test_dynamic_cache_by_default():
    model, ids = compiled("llama"), prompt(37)
    sequences, cache = generate(model, ids)
    assert type(cache) is DynamicCache
    check_packed(cache)
    assert torch.equal(sequences, expected("llama", ids))
    # A, B, A: nothing of one call is left for the next.
    other = prompt(50, seed=1)
    assert torch.equal(generate(model, other)[0], expected("llama", other))
    assert torch.equal(generate(model, ids)[0], sequences)


def test_compiled_forward():
    model, ids = small("llama"), prompt(37)
    model.forward = torch.compile(model.forward, backend="hqmq", options={"config": CONFIG})
    sequences, cache = generate(model, ids)
    check_packed(cache)
    assert torch.equal(sequences, expected("llama", ids))


def compile_config(config: HQMQConfig = CONFIG, **fields) -> CompileConfig:
    # generate() always sets a mode, and torch takes no options beside one: hence `partial`.
    backend = functools.partial(hqmq, options={"config": config})
    result = CompileConfig(**{"backend": backend} | fields)
    result._compile_all_devices = True  # also on a CPU
    return result


def test_compile_config_and_static_cache(monkeypatch):
    """An eager prefill, then compiled steps on the cache it filled; mode="reduce-overhead"."""
    seen = []

    def inner(gm, inputs, config_patches=None):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(hqmq_compile.backend, "compile_fx", inner)
    model, ids = small("llama"), prompt(37)
    options = {"cache_implementation": "static", "compile_config": compile_config()}
    sequences, cache = generate(model, ids, **options)
    assert type(cache) is StaticCache
    check_packed(cache)
    assert torch.equal(sequences, expected("llama", ids, room=37 + NEW))
    assert seen and all(patches["triton.cudagraphs"] for patches in seen)
    # Another length: another cache, and again the right one for the first.
    other = prompt(52, seed=1)
    sequences_2, cache_2 = generate(model, other, **options)
    check_packed(cache_2)
    assert torch.equal(sequences_2, expected("llama", other, room=52 + NEW))
    assert torch.equal(generate(model, ids, **options)[0], sequences)


def test_compile_config_by_name():
    """`CompileConfig(backend="hqmq")`: the default recipe, whose window is 64."""
    model, ids = small("qwen2"), prompt(150)
    options = {"cache_implementation": "static", "compile_config": compile_config(backend="hqmq")}
    sequences, cache = generate(model, ids, **options)
    check_packed(cache)
    assert torch.equal(sequences, expected("qwen2", ids, HQMQConfig(), room=150 + NEW))


def test_static_cache_with_compiled_prefill():
    model, ids = compiled("gemma3", sliding_window=32), prompt(37)
    sequences, cache = generate(model, ids, cache_implementation="static")
    assert type(cache) is StaticCache
    check_packed(cache)
    settings = {"sliding_window": 32}
    assert torch.equal(sequences, expected("gemma3", ids, room=37 + NEW, settings=settings))


def test_cache_of_the_user_is_continued_and_reset():
    """A conversation of two turns on one static cache, then a reset and the first turn again."""
    model, ids = compiled("llama"), prompt(37)
    cache = StaticCache(config=model.config, max_cache_len=128)
    keyword = cache_keyword(model)
    first, _ = generate(model, ids, **{keyword: cache})
    both = torch.cat([first, prompt(9, seed=1)], dim=1)
    second, _ = generate(model, both, **{keyword: cache})
    check_packed(cache)

    twin = small("llama")
    oracle = OracleCache(twin.config, CONFIG, 128)
    assert torch.equal(first, generate(twin, ids, **{keyword: oracle})[0])
    assert torch.equal(second, generate(twin, both, **{keyword: oracle})[0])
    cache.reset()
    assert torch.equal(first, generate(model, ids, **{keyword: cache})[0])


def test_beam_search():
    model, ids = compiled("llama"), prompt(37, batch=2)
    sequences, cache = generate(model, ids, num_beams=3)
    check_packed(cache)
    assert torch.equal(sequences, expected("llama", ids, num_beams=3))


def test_left_padding_and_several_sequences():
    model, ids = compiled("llama"), prompt(37, batch=2)
    mask = torch.ones_like(ids)
    ids[0, :8] = mask[0, :8] = 0
    options = {"attention_mask": mask, "num_return_sequences": 2, "do_sample": True, "top_k": 5}
    torch.manual_seed(0)
    sequences, cache = generate(model, ids, **options)
    check_packed(cache)
    torch.manual_seed(0)
    assert torch.equal(sequences, expected("llama", ids, **options))


def test_speculative_decoding():
    """Drafts of several tokens, and `crop` where they are rejected."""
    model = compiled("llama")
    ids = prompt(13).repeat(1, 3)  # so that prompt lookup finds drafts
    sequences, cache = generate(model, ids, prompt_lookup_num_tokens=3)
    check_packed(cache)
    assert torch.equal(sequences, expected("llama", ids, prompt_lookup_num_tokens=3))


def test_inference_mode():
    model, ids = compiled("qwen3"), prompt(37)
    with torch.inference_mode():
        sequences, cache = generate(model, ids)
        again, _ = generate(model, ids)
    check_packed(cache)
    assert torch.equal(sequences, again)
    assert torch.equal(sequences, expected("qwen3", ids))
    # The cache is of use outside, too.
    with torch.no_grad():
        model(prompt(1), **{cache_keyword(model): cache})


def test_compiled_module_runs_uncompiled():
    """The trap of README: `torch.compile(model).generate()` never calls the compiled forward."""
    model, ids = small("llama"), prompt(37)
    wrapped = torch.compile(model, backend="hqmq")
    _, cache = generate(wrapped, ids)
    assert hqmq_compile.explain(model).graphs == []
    assert all(type(layer.keys) is torch.Tensor for layer in cache.layers)


# -- options of torch.compile ---------------------------------------------------------------------
def test_mode_and_options_are_forwarded(monkeypatch):
    seen = []

    def inner(gm, inputs, config_patches=None):
        seen.append(config_patches)
        return gm.forward

    monkeypatch.setattr(hqmq_compile.backend, "compile_fx", inner)
    x = torch.randn(4)
    for options, patches in (
        ({}, None),
        (
            {"mode": "max-autotune-no-cudagraphs"},
            {"max_autotune": True, "coordinate_descent_tuning": True},
        ),
        ({"mode": "reduce-overhead"}, {"triton.cudagraphs": True}),
        ({"options": {"preset": "3bit", "max_autotune": True}}, {"max_autotune": True}),
        ({"options": {"epilogue_fusion": False}}, {"epilogue_fusion": False}),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(lambda x: x + 1, backend="hqmq", **options)(x)
        assert (seen.pop() or {}).items() >= (patches or {}).items()


@pytest.mark.parametrize(
    "options, words",
    [
        ({"windw": 3}, ["windw", "config", "preset"]),
        ({"preset": "4bits"}, ["4bits", "4bit", "3bit", "paper"]),
        ({"preset": "4bit", "config": HQMQConfig()}, ["config", "preset"]),
        ({"config": 4}, ["int"]),
        ({"config": {"window": -1}}, ["window", "-1"]),
    ],
)
def test_wrong_options_are_errors(options, words):
    with torch.no_grad(), pytest.raises(Exception) as caught:
        torch.compile(lambda x: x + 1, backend="hqmq", options=options)(torch.ones(2))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_recompile_limit_is_not_reached(caplog):
    """Several prompts, lengths and caches in one program: graphs enough, and all of them packed."""
    caplog.set_level(logging.WARNING)
    model = compiled("llama")
    for seed, length in enumerate((20, 33, 47, 21, 60)):
        ids = prompt(length, seed=seed)
        _, cache = generate(model, ids)
        check_packed(cache)
        _, cache = generate(model, ids, cache_implementation="static")
        check_packed(cache)
    assert "recompile_limit" not in caplog.text
