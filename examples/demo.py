"""The same model answers about a long text with its KV cache as it is, and packed in HQMQ.

    make demo
    python -m examples.demo --model qwen2.5-coder --preset 3bit --context 4096

What a user needs of this is two lines:

    model.forward = torch.compile(model.forward, backend="hqmq")
    model.generate(...)
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
import warnings
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from benchmarks.models import NotFetched, load, token_ids

INSTRUCTION = "Describe in a few sentences what the text above explains."


@dataclasses.dataclass
class Run:
    """What one generation gave, and at what cost."""

    name: str
    tokens: torch.Tensor  # [n] int64, the new ones
    logits: torch.Tensor  # [n, vocabulary] float32: where each of them was chosen
    cache: Any
    cache_bytes: int
    first: float  # seconds to the first token: prefill, and compiling it
    steps: list[float]  # seconds of each later token

    @property
    def tokens_per_second(self) -> float:
        """By the median step, which no compilation falls into."""
        return 1 / statistics.median(self.steps) if self.steps else float("nan")


class Clock(BaseStreamer):
    """Notes when tokens arrive, and shows it."""

    def __init__(self, progress: Progress, task: Any) -> None:
        self.progress, self.task = progress, task
        self.times = [time.perf_counter()]
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if not self.prompt_seen:  # generate hands over the prompt first
            self.prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.progress.advance(self.task)

    def end(self) -> None:
        self.progress.update(self.task, total=len(self.times) - 1)


def build_prompt(tokenizer: Any, text: str, context: int, instruction: str) -> torch.Tensor:
    """`[1, n]` token ids: `context` tokens of text and an instruction, as the model expects it."""
    passage = tokenizer.decode(token_ids(tokenizer, text, context)[0])
    question = f"{passage}\n\n{instruction}"
    if not tokenizer.chat_template:
        return tokenizer(question + "\n\nThe text", return_tensors="pt").input_ids
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).input_ids


def new_cache(model: Any, kind: str, length: int) -> Any:
    """An empty cache: "dynamic" grows, "static" is allocated for `length` tokens at once."""
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    return DynamicCache(config=model.config)


def cache_bytes(cache: Any) -> int:
    """Bytes of the buffers behind the keys and values of a cache, each storage once."""
    total, seen = 0, set()
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            if getattr(tensor, "is_packed", False):
                total += tensor.stored_bytes
            elif tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                total += tensor.untyped_storage().nbytes()
    return total


def generate(model: Any, ids: torch.Tensor, count: int, kind: str, name: str, progress: Progress):
    """Greedy generation; returns a `Run`."""
    task = progress.add_task(name, total=count)
    clock = Clock(progress, task)
    cache = new_cache(model, kind, ids.shape[1] + count)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=count,
        do_sample=False,
        streamer=clock,
        return_dict_in_generate=True,
        output_logits=True,
    )
    seconds = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return Run(
        name,
        result.sequences[0, ids.shape[1] :].cpu(),
        torch.cat([step.float().cpu() for step in result.logits]),
        cache,
        cache_bytes(cache),
        seconds[0],
        seconds[1:],
    )


class Forced:
    """A logits processor that makes `generate` follow given tokens, whatever the model prefers."""

    def __init__(self, tokens: torch.Tensor, start: int) -> None:
        self.tokens, self.start = tokens, start

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.tokens[ids.shape[1] - self.start]] = 0.0
        return forced


def follow(model: Any, ids: torch.Tensor, run: Run, kind: str, progress: Progress) -> torch.Tensor:
    """`[n, vocabulary]` logits of `model` while it is fed the tokens of `run`, one at a time."""
    count = len(run.tokens)
    task = progress.add_task("following the first text", total=count)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=new_cache(model, kind, ids.shape[1] + count),
        max_new_tokens=count,
        do_sample=False,
        streamer=Clock(progress, task),
        logits_processor=[Forced(run.tokens, ids.shape[1])],
        return_dict_in_generate=True,
        output_logits=True,
    )
    return torch.cat([step.float().cpu() for step in result.logits])


def divergence(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Mean over positions of KL(reference || other), in nats."""
    p, q = reference.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def compare(console: Console, plain: Run, packed: Run, followed: torch.Tensor) -> None:
    """Prints the numbers of both runs side by side."""
    length = min(len(plain.tokens), len(packed.tokens))
    same = plain.tokens[:length] == packed.tokens[:length]
    prefix = length if bool(same.all()) else int((~same).int().argmax())
    choices = (followed.argmax(-1) == plain.tokens).float().mean()

    table = Table(title="", show_edge=False)
    for column in ("", plain.name, packed.name):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("KV cache, bytes", f"{plain.cache_bytes:,}", f"{packed.cache_bytes:,}")
    table.add_row("", "", f"{packed.cache_bytes / plain.cache_bytes:.3f} of it")
    table.add_row("first token, s", f"{plain.first:.1f}", f"{packed.first:.1f} (compiles)")
    rates = (f"{run.tokens_per_second:.1f}" for run in (plain, packed))
    table.add_row("tokens/s, median", *rates)
    console.print(table)
    console.print(
        f"Texts agree in their first {prefix} of {len(plain.tokens)} tokens. Following the first "
        f"text, the packed model would have chosen {choices:.1%} of its tokens, "
        f"mean KL {divergence(plain.logits, followed):.4f} nats.",
        highlight=False,
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--model", default="smollm2", help="of benchmarks.models, a folder, or a hub id"
    )
    parser.add_argument(
        "--preset", default="4bit", help="of HQMQConfig: 3bit, 4bit, 5bit, paper, ..."
    )
    parser.add_argument(
        "--text", default="python-docs", help="of benchmarks.models, or a text file"
    )
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="tokens of text")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="tokens to generate")
    parser.add_argument("--instruction", default=INSTRUCTION)
    parser.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", default="hqmq", help="what to compare with the eager model")
    parser.add_argument(
        "--baseline",
        choices=("eager", "inductor"),
        default="eager",
        help="how the first text is made",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    console = Console()
    # transformers renames past_key_values to cache; both names work with the versions supported.
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module="transformers|examples|__main__"
    )
    with console.status(f"loading {options.model}"):
        try:
            model, tokenizer = load(
                options.model, dtype=getattr(torch, options.dtype), device=options.device
            )
        except NotFetched as missing:
            console.print(f"[red]{missing}[/red]")
            raise SystemExit(1) from None
    ids = build_prompt(tokenizer, options.text, options.context, options.instruction)
    ids = ids.to(options.device)
    console.print(
        f"{options.model}, {options.dtype}, {options.device}; prompt of {ids.shape[1]} tokens: "
        f"{options.text}, then {options.instruction!r}",
        highlight=False,
    )

    forward = model.forward
    hqmq = options.backend == "hqmq"
    settings = {"options": {"preset": options.preset}} if hqmq else {}
    title = f"hqmq {options.preset}" if hqmq else options.backend
    columns = (TextColumn("{task.description:>24}"), BarColumn(), "{task.completed:.0f} tokens")
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        if not console.is_terminal:  # where no bar can move, say at least what takes its time
            console.print(
                "generating twice, then following the first text; compiling takes minutes"
            )
        if options.baseline == "inductor":
            model.forward = torch.compile(forward)
        plain = generate(model, ids, options.tokens, options.cache, options.baseline, progress)
        model.forward = torch.compile(forward, backend=options.backend, **settings)
        packed = generate(model, ids, options.tokens, options.cache, title, progress)
        followed = follow(model, ids, plain, options.cache, progress)

    for run in (plain, packed):
        text = tokenizer.decode(run.tokens, skip_special_tokens=True).strip()
        console.print(Panel(text, title=run.name, title_align="left"))
    compare(console, plain, packed, followed)
    if hqmq:
        import hqmq_compile

        report = str(hqmq_compile.explain(model))
        console.print(report, highlight=False, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
