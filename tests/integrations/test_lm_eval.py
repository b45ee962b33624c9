"""lm-evaluation-harness with packed caches, on a local task; skipped where it is not installed."""

from __future__ import annotations

import json
import string

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("datasets")

from benchmarks.faithful import Method, calls_of, through
from hqmq_compile import HQMQConfig
from hqmq_compile.integrations.lm_eval import HQMQLM
from tests.compare import cheap, error
from tests.models.tiny import tiny

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]
CONFIG = {"window": 8, "block": 8}


@pytest.fixture(scope="module")
def tokenizer():
    """One token a character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(["<pad>", "<s>", "</s>", *string.printable[:95]])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def evaluator(tokenizer, **settings) -> HQMQLM:
    model = tiny("llama", attn="sdpa")
    return HQMQLM(
        model, tokenizer=tokenizer, batch_size=2, max_length=128, device="cpu", **settings
    )


def test_texts_are_scored_from_packed_caches(tokenizer):
    lm = evaluator(tokenizer, config=CONFIG)
    ids = torch.randint(3, 90, (2, 60))
    actual = lm._model_call(ids)
    reference = tiny("llama", attn="sdpa")
    for row in range(2):
        with (
            torch.no_grad(),
            through(reference, Method.of(HQMQConfig(**CONFIG)), calls_of(60, 0, lm.chunk)),
        ):
            expected = reference(ids[row : row + 1], use_cache=False).logits
        assert error(actual[row : row + 1], expected) < 1e-3
        with torch.no_grad():
            assert error(actual[row : row + 1], reference(ids[row : row + 1]).logits) > 1e-2


def test_a_local_task(tokenizer, tmp_path):
    """Multiple choice and generation from a JSON file, through the harness's evaluator."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    rows = [
        {"question": f"How many letters has {word * 5}?", "choices": ["few", "many"], "gold": 1}
        for word in ("tree", "house", "cat")
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
    )
    common += "test_split: test\ndoc_to_text: '{{question}}'\n"
    (tmp_path / "choice.yaml").write_text(
        common + "task: hqmq_choice\noutput_type: multiple_choice\n"
        "doc_to_choice: choices\ndoc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    (tmp_path / "generate.yaml").write_text(
        common + "task: hqmq_generate\noutput_type: generate_until\ndoc_to_target: many\n"
        "generation_kwargs: {until: ['?'], max_gen_toks: 12, do_sample: false}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    results = lm_eval.simple_evaluate(
        evaluator(tokenizer, config=CONFIG),
        tasks=["hqmq_choice", "hqmq_generate"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
        log_samples=True,
    )
    assert len(results["samples"]["hqmq_choice"]) == 3
    assert 0 <= results["results"]["hqmq_choice"]["acc,none"] <= 1
    answers = [s["resps"][0][0] for s in results["samples"]["hqmq_generate"]]
    assert all(len(answer) > 0 for answer in answers)


def test_is_registered_under_its_name():
    from lm_eval.api.registry import get_model

    assert get_model("hqmq") is HQMQLM


def test_rejects_a_chunk_longer_than_the_window(tokenizer):
    with pytest.raises(ValueError, match="from 1 to the window, 8"):
        evaluator(tokenizer, config=CONFIG, chunk=9)


def test_configs(tokenizer, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(HQMQConfig(window=16).to_json())
    assert evaluator(tokenizer, config=str(path)).hqmq_config.window == 16
    assert evaluator(tokenizer, preset="paper").chunk == 1
