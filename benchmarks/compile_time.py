"""What rewriting adds to compile time, and how many graphs a session compiles.

    python -m benchmarks.compile_time

A session is: prefill, 3 decode steps, a second prompt, 2 decode steps. Every session runs in a process
of its own with inductor's caches off and an empty folder, so that everything is really compiled. The
project promises that rewriting adds less than 15 % to inductor's own time, and at most one graph a
cache kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from .common import Session, Table, parser, progress, publish, set_threads

PROMISED = 0.15
LENGTHS = (64, 1, 1, 1, 24, 1, 1)


def session(model_name: str, kind: str, backend_name: str) -> dict[str, float]:
    """Run one session in this process.

    Returns seconds: `total` of all calls, `backend` in the backend, `inductor` in `compile_fx`; and
    `graphs`.
    """
    import torch
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx

    import hqmq_compile.backend

    from .models import load, token_ids

    spent = {"backend": 0.0, "inductor": 0.0}

    def timed(name, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        return call

    inductor = timed("inductor", compile_fx)
    if backend_name == "hqmq":
        hqmq_compile.backend.compile_fx = inductor
        backend = timed("backend", hqmq_compile.backend.hqmq)
    else:
        backend = timed("backend", inductor)
    model, tokenizer = load(model_name, dtype=torch.bfloat16)
    ids = token_ids(tokenizer, "python-docs", sum(LENGTHS))
    # What the first compilation of a process pays once is not the question: importing, mostly.
    torch.compile(lambda x: x.sin() + 1, backend="inductor")(torch.ones(8))
    counters.clear()
    spent.update(backend=0.0, inductor=0.0)
    run = Session(model, backend, kind, sum(LENGTHS))
    start, place = time.perf_counter(), 0
    for count in LENGTHS:
        run(ids[:, place : place + count])
        place += count
    total = time.perf_counter() - start
    return {"total": total, "graphs": counters["stats"]["unique_graphs"], **spent}


def isolated(arguments: argparse.Namespace, kind: str, backend: str) -> dict[str, float]:
    """`session` in a new process without anything compiled before."""
    with tempfile.TemporaryDirectory(prefix="hqmq-compile-time-") as folder:
        environment = os.environ | {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
        }
        command = [sys.executable, "-m", "benchmarks.compile_time", "--one", kind, backend]
        command += ["--model", arguments.model, "--threads", str(arguments.threads)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--kinds", nargs="+", default=["static", "dynamic"])
    options.add_argument("--repeat", type=int, default=1, help="sessions a row; the median counts")
    options.add_argument("--one", nargs=2, metavar=("KIND", "BACKEND"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    set_threads(arguments.threads)
    if arguments.one:
        print(json.dumps(session(arguments.model, *arguments.one)))
        return
    plan = [(k, b) for k in arguments.kinds for b in ("inductor", "hqmq")] * arguments.repeat
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for kind, backend in progress(plan, "sessions"):
        runs.setdefault((kind, backend), []).append(isolated(arguments, kind, backend))
    table = Table(
        f"One session of {arguments.model}: tokens a call {', '.join(map(str, LENGTHS))}",
        ("cache, backend", "graphs", "inductor s", "rewriting s", "adds", "whole session s"),
    )
    worst, more = 0.0, 0
    for kind in arguments.kinds:
        own = median(runs[kind, "inductor"])
        for backend in ("inductor", "hqmq"):
            run = median(runs[kind, backend])
            rewriting = run["backend"] - run["inductor"]
            share = rewriting / own["inductor"]
            more = max(more, run["graphs"] - own["graphs"])
            worst = max(worst, share)
            table.add(
                f"{kind}, {backend}",
                run["graphs"],
                f"{run['inductor']:.1f}",
                f"{rewriting:.1f}" if backend == "hqmq" else "-",
                f"{100 * share:.1f} %" if backend == "hqmq" else "-",
                f"{run['total']:.1f}",
            )
    table.notes += [
        f"Promise: rewriting adds less than {100 * PROMISED:.0f} % to inductor's own time:"
        f" {100 * worst:.1f} %, {'kept' if worst < PROMISED else 'MISSED'}.",
        f"Promise: at most 1 graph more a cache kind: {more}, {'kept' if more <= 1 else 'MISSED'}.",
        "'inductor s' is the time in compile_fx, of that backend's own graphs; 'rewriting s' all else"
        " in the backend; 'adds' compares it with what inductor alone needs for the session.",
    ]
    publish("compile_time", __doc__, [table], arguments.output)


def median(runs: list[dict[str, float]]) -> dict[str, float]:
    """The run whose backend time is in the middle."""
    return sorted(runs, key=lambda run: run["backend"])[len(runs) // 2]


if __name__ == "__main__":
    main()
