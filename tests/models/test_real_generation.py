"""Real models: text generated with packed caches is the oracle's text, token for token.

The oracle is the eager model with `tests.oracle.OracleCache`, which quantises the same tokens at the
same moments and keeps them dense. Everything else is what a user has: real weights, a real prompt,
`generate`, inductor, the default preset. Prompt and answer fill several blocks behind the window.
"""

from __future__ import annotations

import copy
import gc
import os
from typing import Any, NamedTuple

import pytest
import torch

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from tests.compare import TOLERANCE, cheap, error

pytest.importorskip("transformers")
from tests.models.tiny import cache_keyword
from tests.oracle import OracleCache

__all__ = ["cheap"]

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.timeout(900)]

STEPS = 200
PROMPT = """Summarize the text, then list the dates in it.

The Antikythera mechanism is an Ancient Greek hand-powered model of the Solar System. It is the oldest \
known example of an analogue computer. It could be used to predict astronomical positions and eclipses \
decades in advance, and to track the four-year cycle of athletic games. The artefact was among wreckage \
retrieved from a shipwreck off the coast of the Greek island Antikythera in 1901. In 1902, during a \
visit to the National Archaeological Museum in Athens, it was noticed by the politician Spyridon Stais \
as containing a gear, which started the first study of the fragment by his cousin, the museum director \
Valerios Stais. In 2005, a team from Cardiff University used X-ray tomography to look inside the \
fragments and read faint inscriptions that once covered the outer casing. This suggests that it had 37 \
meshing bronze gears, the largest about 13 centimetres in diameter, with 223 teeth."""


class Expected(NamedTuple):
    """What the oracle says: `tokens` `[STEPS]`, the `logits` `[STEPS, V]` that chose them."""

    ids: torch.Tensor
    tokens: torch.Tensor
    logits: torch.Tensor
    packed_slots: list[int]


@torch.no_grad()
def _oracle(model: Any, tokenizer: Any) -> Expected:
    """Greedy decoding by the eager model with fake quantization."""
    message = [{"role": "user", "content": PROMPT}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    cache = OracleCache(model.config, HQMQConfig())
    logits, token = [], ids
    for _ in range(STEPS):
        out = model(token, **{cache_keyword(model): cache}, logits_to_keep=1).logits[:, -1]
        logits.append(out[0])
        token = out.argmax(-1, keepdim=True)
    logits = torch.stack(logits)
    return Expected(ids, logits.argmax(-1), logits, cache.packed_slots)


@pytest.fixture(scope="module")
def smollm2_expected(smollm2):
    return _oracle(*smollm2)


@pytest.fixture(scope="module")
def qwen_expected(qwen):
    return _oracle(*qwen)


def _compiled(model: Any, dynamic: bool | None) -> Any:
    """A model over the same weights whose forward is compiled by hqmq."""
    model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    model.forward = torch.compile(model.forward, backend="hqmq", dynamic=dynamic)
    return model


# With inductor keys and values differ in their last bits from the eager model's. At a near tie another
# codeword is then the nearest, and the logits move by a step that no tolerance of rounding covers (seen:
# 3e-3 in 1 of 200 steps). Without inductor nothing of that happens: `test_qwen_without_inductor`.
MOST = 1e-2


def _check(model: Any, expected: Expected, kind: str, most: float = MOST) -> None:
    # Otherwise Dynamo learns that a growing cache grows by compiling a graph in vain.
    compiled = _compiled(model, dynamic=True if kind == "dynamic" else None)
    out = compiled.generate(
        expected.ids,
        attention_mask=torch.ones_like(expected.ids),
        max_new_tokens=STEPS,
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
        cache_implementation=kind if kind == "static" else None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    _check_packed(compiled, out.past_key_values, expected)
    tokens = out.sequences[0, expected.ids.shape[1] :]
    logits = torch.stack([step[0] for step in out.logits])
    same = (tokens == expected.tokens).long().cumprod(0).sum().item()
    if same < STEPS:
        top = expected.logits[same].topk(2).values
        pytest.fail(
            f"token {same} is {tokens[same]}, the oracle's {expected.tokens[same]}; relative error of"
            f" the logits {error(logits[same], expected.logits[same]):.1e}, lead of the oracle's choice"
            f" {top[0] - top[1]:.4f}"
        )
    errors = [error(a, b) for a, b in zip(logits, expected.logits, strict=True)]
    assert sorted(errors)[STEPS // 2] <= min(TOLERANCE, most)
    assert max(errors) <= most, f"step {errors.index(max(errors))}: {max(errors):.1e}"
    with torch.no_grad():
        plain = model(out.sequences[:, :-1], logits_to_keep=STEPS).logits[0]
    differ = error(plain[-64:], expected.logits[-64:])
    assert differ > 5 * TOLERANCE, f"quantization changes the logits by {differ:.1e} only"


def _check_packed(model: Any, cache: Any, expected: Expected) -> None:
    """Every cache tensor is packed to the block where the oracle is, and the report says the same."""
    assert min(expected.packed_slots) >= min(4, (STEPS + 100) // 64) * HQMQConfig().block
    for layer, slots in zip(cache.layers, expected.packed_slots, strict=True):
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, HQMQTensor) and tensor.is_packed
            assert tensor.packed.packed_slots == slots
    gc.collect()  # Dynamo's frames hold the caches of the calls that they compiled
    report = hqmq_compile.explain(model)
    assert report.complete, report
    assert len(report.caches) == 2 * len(cache.layers), (len(report.caches), str(report))


# Minutes on two cores; the dynamic cache is always tested.
minutes = pytest.mark.skipif(
    bool(os.environ.get("CI")) and not os.environ.get("HQMQ_ALL_MODELS"),
    reason="takes minutes: set HQMQ_ALL_MODELS=1 to run it in CI",
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", pytest.param("static", marks=minutes)])
def test_smollm2_equals_oracle(smollm2, smollm2_expected, kind):
    _check(smollm2[0], smollm2_expected, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_qwen_equals_oracle(qwen, qwen_expected, kind):
    _check(qwen[0], qwen_expected, kind)


@pytest.mark.slow
@pytest.mark.usefixtures("cheap")
def test_qwen_without_inductor(qwen, qwen_expected):
    _check(qwen[0], qwen_expected, "dynamic", most=1e-5)
