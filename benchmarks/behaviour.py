"""What a user would notice: facts found again in a long text, and the text that greedy decoding writes.

    python -m benchmarks.behaviour --models qwen2.5-coder --tokens 1024 4096

needle      sentences "The magic number of <word> is <number>." at even depths of a text; all are asked for
variables   in the style of RULER: chains "VAR b = VAR a" whose first one has a number; its end is asked for
greedy      500 tokens that the unquantised model wrote after a text: how many choices are kept

The text is one call, as a prompt is; questions and answers then come one token a call, and read the
stored cache (`faithful.py`: one pass for all of them). An answer is right if every token of it is the
most likely one. Records: `results/behaviour.jsonl`, resumable.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .common import RESULTS, Session, Table, parser, progress, publish, set_threads
from .models import load, token_ids
from .quality import calibrate, fake, read, shape_of
from .quality_cases import fingerprint, label, method, named

WORDS = re.findall(
    r"\w+",
    "amber basil cedar delta ember fjord grove hazel indigo jasper kernel lotus maple nectar "
    "onyx pepper quartz raven saffron thistle umber velvet willow yarrow zephyr",
)
CASES = ("16 bit", "5bit", "4bit", "3bit", "KIVI-4", "KIVI-2", "TurboQuant 4 bit", "int4")


class Task(NamedTuple):
    """Tokens, and where the answers are."""

    ids: Tensor  # [1, T]
    prefill: int  # of these, the prompt
    answers: list[tuple[int, int]]  # first and last position of every answer


def _with_facts(
    tokenizer: Any, text: str, tokens: int, facts: list[str], asked: list[tuple[str, str]]
):
    def encode(piece: str) -> list[int]:
        return tokenizer(piece, add_special_tokens=False).input_ids

    inserts = [encode(f"\n{fact}\n") for fact in facts]
    room = tokens - sum(map(len, inserts))
    hay = token_ids(tokenizer, text, room)[0].tolist()
    ids: list[int] = []
    for number, insert in enumerate(inserts):
        a, b = (room * n // len(inserts) for n in (number, number + 1))
        middle = (a + b) // 2
        ids += hay[a:middle] + insert + hay[middle:b]
    prefill, answers = len(ids), []
    for question, answer in asked:
        ids += encode(f"\n{question}")
        expected = encode(f" {answer}")
        answers.append((len(ids), len(ids) + len(expected)))
        ids += expected + encode(".")
    return Task(torch.tensor([ids]), prefill, answers)


def needle(tokenizer: Any, text: str, tokens: int, seed: int, count: int = 10) -> Task:
    """`count` facts at even depths, asked for in random order."""
    rng = random.Random(seed)
    pairs = [(word, rng.randint(1000, 9999)) for word in rng.sample(WORDS, count)]
    facts = [f"The magic number of {word} is {number}." for word, number in pairs]
    asked = [(f"The magic number of {word} is", str(n)) for word, n in rng.sample(pairs, count)]
    return _with_facts(tokenizer, text, tokens, facts, asked)


def variables(
    tokenizer: Any, text: str, tokens: int, seed: int, count: int = 5, hops: int = 1
) -> Task:
    """`count` chains of `hops` assignments, interleaved over the text."""
    rng = random.Random(seed)
    names = rng.sample(WORDS, count * (hops + 1))
    chains = [names[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(count)]
    numbers = [rng.randint(1000, 9999) for _ in chains]
    facts = [f"VAR {c[0]} = {n}." for c, n in zip(chains, numbers, strict=True)]
    for hop in range(hops):
        facts += [f"VAR {c[hop + 1]} = VAR {c[hop]}, and so it is too." for c in chains]
    asked = [(f"The value of VAR {c[-1]} is", str(n)) for c, n in zip(chains, numbers, strict=True)]
    return _with_facts(tokenizer, text, tokens, facts, rng.sample(asked, count))


@torch.no_grad()
def greedy(model: Any, tokenizer: Any, text: str, tokens: int, count: int = 500) -> Task:
    """What the unquantised model writes after `tokens` of a text; every token is an answer."""
    ids = token_ids(tokenizer, text, tokens)
    session = Session(model, None, "dynamic", tokens + count)
    written, last = [], ids
    for _ in progress(range(count), "greedy text"):
        last = session(last)[:, -1:].argmax(-1)
        written.append(last)
    return Task(
        torch.cat([ids, *written], 1), tokens, [(tokens + i, tokens + i + 1) for i in range(count)]
    )


def right(logits: Tensor, task: Task, positions: Tensor) -> list[bool]:
    """For every answer: is each of its tokens the most likely one?"""
    where = {int(p): i for i, p in enumerate(positions)}
    best = logits.argmax(-1)
    return [
        all(best[where[p - 1]] == task.ids[0, p] for p in range(first, last))
        for first, last in task.answers
    ]


def run(o: Any) -> None:
    done = [r["key"] for r in read(o.records)]
    for name in o.models:
        model = None
        for tokens in o.tokens:
            for kind in o.tasks:
                for seed in range(1 if kind == "greedy" else o.seeds):
                    keys = {c: _key(o, name, tokens, kind, seed, c) for c in o.cases}
                    cases = [c for c, key in keys.items() if key not in done]
                    if not cases:
                        continue
                    if model is None:
                        model, tokenizer = load(name)
                    if kind == "greedy":
                        task = greedy(model, tokenizer, o.text, tokens, o.greedy)
                    else:
                        task = (needle if kind == "needle" else variables)(
                            tokenizer, o.text, tokens, seed
                        )
                    wanted = [p - 1 for a, b in task.answers for p in range(a, b)]
                    positions = torch.tensor(wanted)
                    for case in progress(cases, f"{name}, {kind}, {tokens}"):
                        codecs = method(case)
                        calibrate(model, tokenizer, codecs, o.text)
                        logits = fake(model, codecs, task.ids, positions, task.prefill, 1)
                        hits = right(logits, task, positions)
                        layers, _, dim = shape_of(model)
                        bits = sum(codecs.bits(dim, 4096, layers)) / 2
                        first = hits.index(False) if False in hits else len(hits)
                        record = {"key": keys[case], "right": sum(hits), "of": len(hits)}
                        record |= {"first": first, "bits": round(bits, 4)}
                        with o.records.open("a") as file:
                            file.write(json.dumps(record) + "\n")


def _key(o: Any, model: str, tokens: int, task: str, seed: int, case: str) -> list[Any]:
    rest = [o.greedy] if task == "greedy" else []
    return [model, o.text, tokens, task, seed, case, fingerprint(case), *rest]


def tables(o: Any) -> list[Table]:
    records = read(o.records)
    result = []
    for name in o.models:
        columns = [f"{task}, {tokens}" for tokens in o.tokens for task in o.tasks]
        table = Table(name, ("case", "bits", *columns))
        for case in o.cases:
            cells, bits = [], ""
            for tokens in o.tokens:
                for task in o.tasks:
                    wanted = [_key(o, name, tokens, task, seed, case) for seed in range(o.seeds)]
                    some = [r for r in records if r["key"] in wanted]
                    cells.append(_cell(task, some))
                    bits = f"{some[0]['bits']:.2f}" if some else bits
            table.add(label(case), bits, *cells)
        table.notes.append(
            "greedy: choices kept when fed the text of the unquantised model, and how many before "
            "the first other one. ±: standard error of a share."
        )
        result.append(table)
    return result


def _cell(task: str, records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    n = sum(r["of"] for r in records)
    share = sum(r["right"] for r in records) / n
    if task == "greedy":
        return f"{100 * share:.1f} %, first {records[0]['first']}"
    return f"{100 * share:.0f} ± {100 * math.sqrt(share * (1 - share) / n):.0f} % of {n}"


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--models", nargs="+", default=["qwen2.5-coder"])
    options.add_argument("--cases", nargs="+", default=list(CASES))
    options.add_argument("--tasks", nargs="+", default=["needle", "variables", "greedy"])
    options.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--greedy", type=int, default=500, help="tokens of the greedy text")
    options.add_argument("--text", default="python-docs", help="of benchmarks.models, or a file")
    options.add_argument("--records", type=Path, default=RESULTS / "behaviour.jsonl")
    o = options.parse_args()
    o.cases = named(o.cases)
    set_threads(o.threads)
    o.records.parent.mkdir(parents=True, exist_ok=True)
    run(o)
    publish("behaviour", __doc__, tables(o), o.output, timed=False)


if __name__ == "__main__":
    main()
