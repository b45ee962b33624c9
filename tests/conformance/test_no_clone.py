"""Inductor updates packed buffers in place: its code hands the graph's own inputs to our ops."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from hqmq_compile.backend import hqmq
from tests.conformance import models
from tests.conformance.architectures import ARCHITECTURES
from tests.conformance.session import CONFIG, PATTERNS, ROOM, Side

pytestmark = [pytest.mark.conformance, pytest.mark.slow, pytest.mark.usefixtures("fresh_dynamo")]


@pytest.mark.parametrize(
    "name, kind, attention",
    [
        ("Llama", "static", "sdpa"),
        ("Gemma 3", "dynamic", "sdpa"),
        ("gpt-oss", "static", "eager"),
        ("GPT-2", "dynamic", "eager"),
        ("BART", "static", "sdpa"),
        ("Bloom", "static", "eager"),
        ("DeepSeek-V3", "dynamic", "sdpa"),
    ],
)
def test_no_clone_of_a_cache(name, kind, attention):
    model = models.tiny(ARCHITECTURES[name], attention)
    keyword = models.cache_keyword(model)
    model.forward = torch.compile(model.forward, backend=hqmq, options={"config": CONFIG})
    cache = models.new_cache(model, kind, ROOM)
    side = Side(model, cache, PATTERNS["prompts"], keyword)
    codes = []
    for count in (37, 1, 1):
        codes += run_and_get_code(side, count)[1]
    mutated = [argument for code in codes for argument in mutated_arguments(code)]
    assert mutated, "no op of ours in the compiled code"
    copies = [argument for argument in mutated if not argument.startswith("arg")]
    assert not copies, f"copied before they are written: {copies}"


def mutated_arguments(code: str) -> list[str]:
    """What generated code passes to our ops for the arguments that they write."""
    found = []
    for part in code.split("torch.ops.hqmq.")[1:]:
        op, _, rest = part.partition(".default(")
        if not rest or not op.isidentifier():  # a comment of inductor, with more text
            continue
        schema = getattr(torch.ops.hqmq, op).default._schema
        for argument, text in zip(schema.arguments, _arguments(rest), strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found.append(text)
    return found


def _arguments(text: str) -> list[str]:
    """Split `a, f(b, c), d) ...` at the commas of its own level, up to the closing bracket."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        if letter in ")]" and depth == 0:
            return [*found, text[start:place].strip()]
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            found.append(text[start:place].strip())
            start = place + 1
    return found
