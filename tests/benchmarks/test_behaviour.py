"""Tasks whose answers are in the text, and answers that are right only as a whole."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import behaviour
from benchmarks.quality import fake
from benchmarks.quality_cases import method
from tests.models.tiny import prompt, tiny


class Letters:
    """A tokenizer: one token a character."""

    def __call__(self, text, add_special_tokens=False):
        return type("Encoding", (), {"input_ids": [ord(c) for c in text]})()


def text_of(ids) -> str:
    return "".join(map(chr, ids.tolist()))


@pytest.fixture
def hay(monkeypatch):
    monkeypatch.setattr(
        behaviour, "token_ids", lambda tok, text, count: torch.full((1, count), ord("x"))
    )


@pytest.mark.parametrize("make, count", [(behaviour.needle, 10), (behaviour.variables, 5)])
def test_answers_follow_from_the_text(hay, make, count):
    task = make(Letters(), "any", 2000, seed=4)
    ids = task.ids[0]
    assert task.prefill == 2000 and len(task.answers) == count
    text, asked = text_of(ids[:2000]), text_of(ids[2000:])
    for (first, last), question in zip(task.answers, asked.strip().split("\n"), strict=True):
        answer, name = text_of(ids[first:last]).strip(), question.split(" is ")[0].split()[-1]
        if make is behaviour.variables:
            name = re.search(rf"VAR {name} = VAR (\w+)", text).group(1)
            assert f"VAR {name} = {answer}." in text
        else:
            assert f"The magic number of {name} is {answer}." in text


def test_right_only_as_a_whole():
    task = behaviour.Task(torch.tensor([[0, 1, 2, 3, 4]]), 1, [(1, 3), (4, 5)])
    positions = torch.tensor([0, 1, 3])
    best = torch.nn.functional.one_hot(torch.tensor([1, 2, 4]), 6).float()
    assert behaviour.right(best, task, positions) == [True, True]
    best[1] = 0
    assert behaviour.right(best, task, positions) == [False, True]


def test_greedy_text_is_kept_without_quantization(monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr(behaviour, "token_ids", lambda tok, text, count: prompt(count, seed=2))
    task = behaviour.greedy(model, None, "any", 80, count=20)
    positions = torch.arange(79, 99)
    logits = fake(model, method("16 bit"), task.ids, positions, 80, 1)
    assert all(behaviour.right(logits, task, positions))
    logits = fake(model, method("int2"), task.ids, positions, 80, 1)
    assert not all(behaviour.right(logits, task, positions))
