"""torch.export: an exported decoder with a static cache is compiled as any module."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from tests.compare import TYPICAL, cheap, error
from tests.models.tiny import cache_keyword, prompt, tiny
from tests.oracle import OracleCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]

ROOM, CONFIG = 64, HQMQConfig(block=8, window=8)


def test_exported_program_with_a_static_cache():
    model = tiny("llama")
    model.generation_config = GenerationConfig(
        use_cache=True,
        cache_implementation="static",
        max_length=ROOM,
        cache_config={"batch_size": 1, "max_cache_len": ROOM, "device": "cpu"},
    )
    example = {"input_ids": prompt(1), "cache_position": torch.tensor([0])}
    with torch.no_grad():
        exported = torch.export.export(
            TorchExportableModuleWithStaticCache(model), (), example, strict=True
        )
    module = exported.module()
    step = torch.compile(module, backend="hqmq", options={"config": CONFIG})
    twin = tiny("llama")
    oracle = OracleCache(twin.config, CONFIG, ROOM)
    for position in range(30):
        ids = prompt(1, seed=position)
        with torch.no_grad():
            actual = step(input_ids=ids, cache_position=torch.tensor([position]))
            expected = twin(ids, **{cache_keyword(twin): oracle}).logits
        assert error(actual, expected) <= TYPICAL, position
    caches = [value for name, value in module.named_buffers() if "_cache_" in name]
    assert len(caches) == 4 and all(isinstance(c, HQMQTensor) and c.is_packed for c in caches)
    assert all(c.packed.packed_slots == 16 for c in caches)
    assert hqmq_compile.explain(module).complete
