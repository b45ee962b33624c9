"""Time of one decode step on the CPU: packed caches against inductor's 16-bit and 32-bit ones.

    python -m benchmarks.cpu_decode

Each cache kind and dtype is compiled by `hqmq` and by `inductor`, filled with the same prompt by the
compiled prefill, and then stepped in turns, one token each, so that a busy moment of the machine
meets both. The project promises at most 1.5 times inductor's bfloat16 step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from .common import Session, Table, parser, progress, publish, set_threads
from .models import load, token_ids

PROMISED = 1.5


def measure(
    model, ids: torch.Tensor, kind: str, context: int, steps: int, warmup: int
) -> dict[str, list[float]]:
    """Seconds of `steps` decode steps a backend, taken in turns after `context` tokens."""
    torch._dynamo.reset()
    sessions = {
        name: Session(model, name, kind, context + warmup + steps) for name in ("inductor", "hqmq")
    }
    for session in sessions.values():
        session(ids[:, :context])
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for i in progress(range(warmup + steps), f"{kind}, {str(model.dtype)[6:]}"):
        token = ids[:, context + i : context + i + 1]
        for name in list(sessions)[:: 1 if i % 2 else -1]:  # each is first half of the time
            start = time.perf_counter()
            sessions[name](token)
            times[name].append(time.perf_counter() - start)
    unpacked = [t for t in sessions["hqmq"].tensors() if not getattr(t, "is_packed", False)]
    if unpacked:
        raise RuntimeError(f"{len(unpacked)} caches are not packed: this is no measurement of hqmq")
    return {name: seconds[warmup:] for name, seconds in times.items()}


def quantiles(seconds: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile in milliseconds."""
    values = torch.tensor(seconds, dtype=torch.float64) * 1e3
    low, middle, high = values.quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    ).tolist()
    return low, middle, high


def rows(arguments: argparse.Namespace) -> Iterator[tuple[str, str, float, Iterator[str | int]]]:
    for dtype in arguments.dtypes:
        model, tokenizer = load(arguments.model, dtype=getattr(torch, dtype))
        needed = arguments.context + arguments.warmup + arguments.steps
        ids = token_ids(tokenizer, arguments.text, needed)
        for kind in arguments.kinds:
            times = measure(model, ids, kind, arguments.context, arguments.steps, arguments.warmup)
            middles = {}
            for name, seconds in times.items():
                low, middles[name], high = quantiles(seconds)
                ratio = middles[name] / middles["inductor"]
                cells = (
                    f"{dtype}, {kind}, {name}",
                    f"{middles[name]:.1f}",
                    f"{low:.1f}-{high:.1f}",
                )
                yield dtype, name, ratio, (*cells, f"{1 / middles[name] * 1e3:.1f}", f"{ratio:.2f}")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--context", type=int, default=2048, help="tokens before the first step")
    options.add_argument("--steps", type=int, default=60, help="measured steps of each backend")
    options.add_argument("--warmup", type=int, default=6, help="steps before, which compile")
    options.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    options.add_argument("--kinds", nargs="+", default=["static", "dynamic"])
    options.add_argument("--text", default="python-docs", help="of benchmarks.models")
    arguments = options.parse_args()
    set_threads(arguments.threads)
    table = Table(
        f"Decode step, {arguments.model}, {arguments.context} tokens of context, batch 1",
        ("dtype, cache, backend", "median ms", "quartiles", "tokens/s", "of inductor"),
    )
    worst = 0.0
    for dtype, name, ratio, row in rows(arguments):
        table.add(*row)
        if name == "hqmq" and dtype == "bfloat16":
            worst = max(worst, ratio)
    if worst:
        verdict = "kept" if worst <= PROMISED else "MISSED"
        table.notes.append(
            f"Promise: at most {PROMISED} times inductor's bfloat16 step: {worst:.2f}, {verdict}."
        )
    publish("cpu_decode", __doc__, [table], arguments.output)


if __name__ == "__main__":
    main()
