"""Tokens a second of whole models on the GPU: packed caches against bf16, at long context.

    python -m benchmarks.end_to_end [--seconds 500] [--cases llama-3-8b,131072,1 llama-3-8b,32768,1]
    python -m benchmarks.end_to_end --fit [--verify]

The models have the real shapes and random weights, made on the device. A prefill of 128k tokens for
every figure would cost minutes, so the caches are filled with random keys and values (the same for all
contenders), layer by layer; for hqmq each layer is packed as soon as it is filled, as the first
compiled call would do it, so that the bf16 caches of all layers never exist at once. The first compiled
call then finds packed caches. Every contender decodes greedily with its own compiled forward.

`bf16 split-KV` is the same model under inductor with our own bf16 kernel (`benchmarks/bf16_split_kv.py`)
in place of attention; `inductor` is what users run. The peak is the allocator's, over the measured
steps; resident is what is allocated after them. The bf16 caches hold what the packed ones stand for, and
"Logits" is the relative difference of the first logits to those of bf16 split-KV. With `--fit`, the
largest batch whose caches can be allocated beside the weights.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from . import gpu, largest_batch, shapes
from .common import RESULTS, Table, parser, publish, set_threads
from .decode_session import CONTENDERS, HQMQ, INDUCTOR, SPLIT_KV, Result, run_contender

K = 1024
LARGEST = 0  # as a batch: the largest, up to 8, that a bf16 cache leaves room for

CASES = (  # model, tokens of context, batch
    ("llama-3-8b", 128 * K, 1),
    ("llama-3-8b", 32 * K, 1),
    ("llama-3-8b", 128 * K, LARGEST),
    ("llama-3-8b", 32 * K, 8),
    ("llama-3-8b", 4 * K, 1),
    ("qwen2.5-7b", 128 * K, 1),
    ("mistral-7b", 32 * K, 1),
    ("qwen2.5-7b", 32 * K, 8),
)


def largest_bf16_batch(config: Any, slots: int) -> int:
    """The batch, up to 8, whose bf16 cache fits beside what is allocated now, 8 GiB kept free."""
    room = torch.cuda.mem_get_info()[1] - torch.cuda.memory_allocated() - (8 << 30)
    return max(1, min(8, room // shapes.cache_bytes(config, slots)))


def run(arguments: argparse.Namespace, table: Table, device: str) -> dict[str, dict[str, Result]]:
    """Fill `table`; returns results by case and contender."""
    clock, slowest, results = gpu.Clock(arguments.seconds), 0.0, {}
    model, built = None, None
    chosen = [c for c in CONTENDERS if c.name in (arguments.contenders or [c.name])]
    for name, context, batch in arguments.cases or CASES:
        for contender in chosen:
            if not clock.allows(slowest):
                table.notes.append(
                    f"Stopped by --seconds {arguments.seconds:.0f} before {name}, {context // K}k."
                )
                return results
            begin = time.monotonic()
            if built != name:
                model = None
                gpu.free()
                model, built = shapes.build(name, arguments.layers, device), name
            rows = batch or largest_bf16_batch(model.config, context + 128)
            case = f"{name}, {context // K}k, B={rows}"
            found = results.setdefault(case, {})
            if contender.kind == "dynamic" and rows > 1:
                continue
            try:
                result = run_contender(model, contender, context, rows, arguments)
            except Exception as error:
                gpu.say(table, f"{case}, {contender.name}", *("-",) * 6, gpu.one_line(error))
            else:
                found[contender.name] = result
                _say(table, f"{case}, {contender.name}", result, found.get(SPLIT_KV.name))
            took = time.monotonic() - begin
            slowest = max(slowest, took)
            print(f"  ({took:.0f} s, {clock.left:.0f} s left)", flush=True)
    return results


def _say(table: Table, name: str, result: Result, base: Result | None) -> None:
    error = "-"
    if base is not None:
        error = f"{float((result.logits - base.logits).norm() / base.logits.norm()):.1e}"
    gpu.say(
        table,
        name,
        f"{result.rate:.1f}",
        f"{result.step:.2f}",
        *(f"{n / 2**30:.2f}" for n in (result.cache, result.peak, result.resident)),
        error,
        result.notes,
    )


def ratios(results: dict[str, dict[str, Result]]) -> Table:
    """Tokens a second of hqmq over those of the two baselines, beside what is promised."""
    table = Table(
        "hqmq / baseline, tokens a second",
        (
            "case",
            "bf16 split-KV",
            "promised",
            "inductor, StaticCache",
            "promised",
            "cache, of bf16",
        ),
    )
    for case, found in results.items():
        model, context, batch = case.split(", ")
        llama, one = model == "llama-3-8b", batch == "B=1"
        splits = (1.3 if one else 1.9) if llama and context == "128k" else None
        static = {"128k": 6, "32k": 2.5}.get(context) if llama and one else None
        best = {
            base: max((r.rate for n, r in found.items() if n.startswith(base) and "Dyn" not in n), default=0)
            for base in (HQMQ.name, SPLIT_KV.name, INDUCTOR.name)
        }  # fmt: skip
        cells = []
        for base, least in ((SPLIT_KV.name, splits), (INDUCTOR.name, static)):
            ratio = best[HQMQ.name] / best[base] if best[base] else 0
            verdict = f"{least or '-'}"
            if least and ratio:
                verdict += " kept" if ratio >= least else " MISSED"
            cells += [f"{ratio:.2f}" if ratio else "-", verdict]
        ours, theirs = found.get(HQMQ.name), found.get(SPLIT_KV.name)
        table.add(case, *cells, f"{ours.cache / theirs.cache:.3f}" if ours and theirs else "-")
    return table


def _case(text: str) -> tuple[str, int, int]:
    name, context, batch = text.split(",")
    if name not in shapes.SHAPES:
        raise argparse.ArgumentTypeError(f"no model {name!r}: {', '.join(shapes.SHAPES)}")
    return name, int(context), int(batch)


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--seconds", type=float, default=0, help="stop after; 0: measure all")
    options.add_argument("--cases", nargs="+", type=_case, help="model,context,batch (0: largest)")
    options.add_argument(
        "--contenders", nargs="+", choices=[c.name for c in CONTENDERS], metavar="NAME"
    )
    options.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    options.add_argument("--steps", type=int, default=64, help="measured; 64 pack one block")
    options.add_argument("--warmup", type=int, default=5, help="steps before, which compile")
    options.add_argument("--preset", default="4bit")
    options.add_argument("--fit", action="store_true", help="the largest batch instead of speed")
    options.add_argument("--verify", action="store_true", help="with --fit: decode at that batch")
    options.add_argument("--reserve", type=int, default=4, help="with --fit: GiB for all else")
    arguments = options.parse_args()
    gpu.need_cuda()
    set_threads(arguments.threads)
    if arguments.fit:
        table = largest_batch.fit(arguments, "cuda")
        output = arguments.output or RESULTS / "end_to_end_fit.md"
        publish("end_to_end", __doc__, [table], output)
        return
    columns = (
        *("case", "tokens/s", "ms a step", "cache GiB", "peak GiB", "resident GiB", "logits"),
        "notes",
    )
    layers = f", {arguments.layers} layers" if arguments.layers else ""
    table = Table(f"Greedy decoding, bfloat16{layers}", columns)
    results = run(arguments, table, "cuda")
    written = publish("end_to_end", __doc__, [ratios(results), table], arguments.output)
    drawn = {case: {n: r.rate for n, r in found.items()} for case, found in results.items()}
    gpu.bars(written.with_suffix(".png"), "Whole models", "tokens a second", drawn)


if __name__ == "__main__":
    main()
