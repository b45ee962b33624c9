"""`device_map`: accelerate's hooks move tensors between layers; every cache is packed where its layer is."""

from __future__ import annotations

import pytest
import torch

from hqmq_compile.backend import hqmq
from tests.compare import cheap, error  # noqa: F401
from tests.configs import CONFIGS
from tests.models.tiny import prompt, tiny

pytestmark = pytest.mark.slow
accelerate = pytest.importorskip("accelerate")


def generate(model, device: str, kind: str):
    model.forward = torch.compile(model.forward, backend=hqmq, options={"config": CONFIGS["16"]})
    # Hooks are graph breaks, and one code object serves all modules: eight are soon used up.
    with torch._dynamo.config.patch(recompile_limit=64):
        return model.generate(
            prompt(40).to(device),
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            cache_implementation=kind,
            return_dict_in_generate=True,
            output_logits=True,
        )


def check(devices: list[str], kind: str) -> None:
    first, second = devices
    model = tiny("llama")
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.layers.0": first}
    places |= {"model.layers.1": second, "model.norm": second, "lm_head": second}
    model = accelerate.dispatch_model(model, places, main_device=first, force_hooks=True)
    actual = generate(model, first, kind)
    for layer, device in zip(actual.past_key_values.layers, devices, strict=True):
        for cache in (layer.keys, layer.values):
            assert cache.is_packed and cache.packed.packed_slots > 0
            assert all(t.device == torch.device(device) for t in cache.packed.buffers)
    torch._dynamo.reset()
    expected = generate(tiny("llama").to(first), first, kind)
    assert torch.equal(actual.sequences, expected.sequences)
    logits = (torch.cat([x.cpu() for x in out.logits]) for out in (actual, expected))
    assert error(*logits) < 1e-4


def test_hooks_of_accelerate(cheap, fresh_dynamo):  # noqa: F811
    check(["cpu", "cpu"], "dynamic")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_two_gpus(fresh_dynamo, kind):
    check(["cuda:0", "cuda:1"], kind)
