"""Decode attention on packed caches: microseconds, and what a perfect kernel would need for the bytes.

    python -m benchmarks.decode_attention [--seconds 170]

One query token attends to a full cache. `hqmq` is the default recipe (block means, Med3x with 4 % of
outliers, window, sinks), `stripped` the codes and the window alone. Against them: our own bf16 split-KV
kernel, tuned over its plans for every case, and what PyTorch has: cuDNN, flash, FlexAttention, and
SDPA after dequantising. Caches are rotated so that they exceed the L2 cache. Burst and sustained
replay CUDA graphs (`benchmarks/gpu.py`); eager calls the op from Python. "Of the limit" is the time
that the stored bytes take at full bandwidth, divided by the burst time; "error" is the norm of the
difference to float32 attention over the same stored values.
"""

from __future__ import annotations

import argparse

import torch

from hqmq_compile.config import HQMQConfig

from . import gpu, kv_data
from .common import Table, parser, publish, set_threads
from .decode_contenders import (
    BF16,
    CASES,
    CONTENDERS,
    HQMQ,
    LATE,
    STRIPPED,
    Case,
    Data,
    path_of,
)

TOLERANCE = 0.02
LONG = (BF16, HQMQ, STRIPPED)  # measured sustained, too


# -- measuring -------------------------------------------------------------------------------------
def reference(data: Data, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention in float32, a sequence at a time."""
    case = data.case
    rows = []
    for q, k, v in zip(data.query, keys, values, strict=True):
        score = q.float().view(case.heads, -1, case.dim) @ k.float().mT * case.dim**-0.5
        rows.append((score.softmax(-1) @ v.float()).view(q.shape))
    return torch.stack(rows)


def measure(data: Data, name: str, seconds: float) -> dict[str, float]:
    """Times in microseconds, `size` in bytes, and `error`."""
    contender = CONTENDERS[name](data)
    got = contender.calls[-1]().float()
    want = reference(data, *contender.stored())
    result = {
        "error": float((got - want).norm() / want.norm()),
        "size": contender.size,
        "burst": gpu.burst(contender.calls),
        "eager": gpu.eager(contender.calls),
    }
    if name in LONG and seconds:
        result["sustained"] = gpu.sustained(contender.calls, seconds)
    return result


def run(arguments: argparse.Namespace, table: Table, device: str) -> dict[Case, dict[str, dict]]:
    """Fill `table`; returns what was measured, by case and contender."""
    clock = gpu.Clock(arguments.seconds)
    results: dict[Case, dict[str, dict]] = {}
    names = [name for name in CONTENDERS if name in (arguments.contenders or CONTENDERS)]
    for group in ([n for n in names if n not in LATE], [n for n in names if n in LATE]):
        for case in CASES:
            if not group or (arguments.contexts and case.context not in arguments.contexts):
                continue
            if not clock.allows():
                table.notes.append(f"Stopped after {arguments.seconds:.0f} s, before {case}.")
                return results
            gpu.free()
            data = Data(case, device)
            for name in group:
                if clock.allows():
                    result = _row(data, name, arguments, table)
                    results.setdefault(case, {})[name] = result
                gpu.free()
            del data
    return results


def _row(data: Data, name: str, arguments: argparse.Namespace, table: Table) -> dict[str, float]:
    try:
        result = measure(data, name, arguments.sustained)
    except Exception as error:
        gpu.say(table, f"{data.case} {name}", *("-",) * 5, gpu.one_line(error))
        return {}
    limit = result["size"] / (arguments.bandwidth * 1e6)
    error = result["error"]
    gpu.say(
        table,
        f"{data.case} {name}",
        f"{result['burst']:.1f}",
        f"{result['sustained']:.1f}" if "sustained" in result else "-",
        f"{result['eager']:.1f}",
        f"{result['size'] / 1e6:.1f}",
        f"{limit / result['burst']:.0%}",
        f"{error:.1e}" if error < TOLERANCE else f"{error:.1e} WRONG",
    )
    return result


def ratios(results: dict[Case, dict[str, dict]]) -> Table:
    """How much faster than our bf16 kernel, beside what is promised."""
    table = Table(
        "bf16 split-KV / hqmq: how many times faster",
        ("(B, Hq, Hkv) T", "burst", "promised", "stripped", "promised", "sustained", "stripped"),
    )
    for case, found in results.items():
        promised = case.promised or (None, None)
        cells = []
        for name, least in zip((HQMQ, STRIPPED), promised, strict=True):
            ratio = _ratio(found, name, "burst")
            verdict = "-"
            if least:
                verdict = (
                    f"{least}"
                    if not ratio
                    else f"{least} kept"
                    if ratio >= least
                    else f"{least} MISSED"
                )
            cells += [_text(ratio), verdict]
        cells += [_text(_ratio(found, name, "sustained")) for name in (HQMQ, STRIPPED)]
        table.add(str(case), *cells)
    return table


def _ratio(found: dict[str, dict], name: str, regime: str) -> float | None:
    ours, theirs = found.get(name, {}).get(regime), found.get(BF16, {}).get(regime)
    return theirs / ours if ours and theirs else None


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--seconds", type=float, default=0, help="stop after; 0: measure all")
    options.add_argument("--sustained", type=float, default=1.0, help="seconds each; 0: not at all")
    options.add_argument("--bandwidth", type=float, default=4.8, help="of the memory, TB/s")
    options.add_argument("--contexts", type=int, nargs="+", help="only these, in tokens")
    options.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), metavar="NAME")
    arguments = options.parse_args()
    gpu.need_cuda()
    set_threads(arguments.threads)
    columns = ("case", "burst us", "sustained us", "eager us", "MB", "of the limit", "error")
    table = Table("Decode attention, one query token, bfloat16", columns)
    table.notes.append(f"The limit is {arguments.bandwidth} TB/s.")
    for case, name, config in (
        (CASES[0], HQMQ, HQMQConfig()),
        (CASES[0], STRIPPED, kv_data.STRIPPED),
        (CASES[-1], HQMQ, HQMQConfig()),
    ):
        table.notes.append(f"{case} {name}: {path_of(case, config)}.")
        print(table.notes[-1], flush=True)
    with torch.no_grad():
        results = run(arguments, table, "cuda")
    summary = ratios(results)
    written = publish("decode_attention", __doc__, [summary, table], arguments.output)
    drawn = {
        str(case): {name: r["burst"] for name, r in found.items() if r}
        for case, found in list(results.items())[:8]
    }
    picture = written.with_suffix(".png")
    gpu.bars(picture, "Decode attention", "microseconds (burst)", drawn)


if __name__ == "__main__":
    main()
