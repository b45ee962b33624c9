"""The paper's tables on our models: its presets with and without Med3x, seeds, thresholds, parts.

    python -m benchmarks.paper_tables --models smollm2 qwen2.5-coder

In the paper's setting (arXiv 2605.27646): the whole text is one call that reads its own keys and values as
stored, every token is quantised on its own, Med3x has one median for each layer, head and role over the
text, and nothing is kept in 16 bits but outliers. Bits here: index, radius level and flag of every chunk,
a 16-bit scale per token, and 80 bits (64 and a pointer) for each outlier that was found. "published":
the paper's own formula, (log2(24 S) + b_r) / 4 + 16 / D. Records: `results/paper_tables.jsonl`, resumable.
"""

from __future__ import annotations

import json
import math
import statistics
from typing import Any

from . import quality
from .baselines import IntOutliers
from .common import RESULTS, Table, parser, publish, set_threads
from .models import load
from .quality_cases import BASELINES, PAPER, config
from .quality_report import Score, score

# Perplexity, 16 bit and HQMQ, as published (method.md).
PUBLISHED = (
    ("Mistral-7B", 5.07, 5.316, 5.291),
    ("Mistral-7B", 3.79, 5.364, 5.291),
    ("Llama-3-8B", 5.00, 6.317, 6.278),
    ("Qwen3-8B", 4.99, 9.621, 9.603),
    ("Qwen2.5-7B", 5.15, 8.83, 7.59),
    ("Qwen2.5-7B", 4.42, 9.69, 7.59),
    ("gpt-oss-20b", 5.25, 460.0, 447.0),
)
SEEDS, SEEDED = range(5), ("s24_r3", "s96_r4")
THRESHOLDS = (2.0, 4.0, 5.0, 8.0)
PARTS = {
    "int4": "int4 per token",
    "int4 + Med3x": "with Med3x, scale of the bulk",
    's96_r4{"med3x": null}': "s96_r4 without Med3x",
    "s96_r4": "s96_r4 with Med3x",
    's96_r4{"key": {"codebook": "universal", "secondary": 85}, '
    '"value": {"codebook": "universal", "secondary": 85}}': "universal codebook, S = 85",
}


def seeded(preset: str, seed: int) -> str:
    """A preset with another seed; 0 is the preset."""
    return preset + (json.dumps({r: {"seed": seed} for r in ("key", "value")}) if seed else "")


def threshold(multiplier: float) -> str:
    return "s96_r4" + json.dumps({"med3x": {"multiplier": multiplier}})


def without(preset: str) -> str:
    return preset + json.dumps({"med3x": None})


def cases() -> list[str]:
    names = [case for preset in PAPER for case in (without(preset), preset)]
    names += [seeded(preset, seed) for preset in SEEDED for seed in SEEDS]
    return list(dict.fromkeys(names + [threshold(m) for m in THRESHOLDS] + list(PARTS)))


def bits(case: str, dim: int, outliers: list[float]) -> tuple[float, float | None]:
    """Stored bits with the outliers that were found, and the paper's formula."""
    own = config(case)
    if own is None:
        codec = BASELINES[case]().key
        if isinstance(codec, IntOutliers):
            codec.chunks, codec.outliers = 10**6, round(10**6 * sum(outliers) / 2)
        return codec.packed_bits(dim), None
    each = []
    for found, role in zip(outliers, ("key", "value"), strict=True):
        spec = own.spec(role, dim, "bfloat16")
        each.append(spec.word_bits / 4 + 16 / dim + found * (64 + 16) / 4)
    formula = (math.log2(24 * own.key.secondary) + own.key.radius_bits) / 4 + 16 / dim
    return sum(each) / 2, formula


def cells(s: Score) -> tuple[str, str]:
    return f"{s.kl:.4f} ± {s.kl_se:.4f}", f"{100 * s.change:+.2f} ± {100 * s.change_se:.2f} %"


def tables(model: str, dim: int, records: list[dict[str, Any]]) -> list[Table]:
    """All tables of one model; rows that were not measured are left out."""
    found: dict[str, list[dict[str, Any]]] = {}
    for r in records:
        if r["model"] == model:
            found.setdefault(r["case"], []).append(r)
    by_case = {case: score(group) for case, group in found.items()}

    def stored(case: str) -> tuple[float, float | None]:
        shares = [statistics.mean(r["outliers"][i] for r in found[case]) for i in (0, 1)]
        return bits(case, dim, shares)

    columns = ("stored bits", "published", "KL", "perplexity")
    presets = Table(f"{model}: presets", ("case", *columns, "outliers"))
    rest = Table(f"{model}: what each part brings", ("case", *columns, "outliers"))
    sweep = Table(f"{model}: threshold of Med3x, s96_r4", ("case", *columns, "outliers"))
    for table, rows in (
        (presets, {c: c.replace('{"med3x": null}', " without Med3x") for c in cases()[:12]}),
        (rest, PARTS),
        (sweep, {threshold(m): f"C = {m:g}" for m in THRESHOLDS} | {"s96_r4": "C = 3"}),
    ):
        for case, name in rows.items():
            if case in by_case:
                count, formula = stored(case)
                share = f"{100 * by_case[case].outliers:.1f} %"
                published = "" if formula is None else f"{formula:.2f}"
                table.add(name, f"{count:.2f}", published, *cells(by_case[case]), share)
    seeds = Table(f"{model}: seeds", ("preset", "seeds", "KL", "its deviation", "perplexity"))
    for preset in SEEDED:
        some = [by_case[c] for seed in SEEDS if (c := seeded(preset, seed)) in by_case]
        if len(some) > 1:
            kl, change = [s.kl for s in some], [100 * s.change for s in some]
            seeds.add(
                preset,
                len(some),
                f"{statistics.mean(kl):.4f}",
                f"{statistics.stdev(kl):.4f}",
                f"{statistics.mean(change):+.2f} (deviation {statistics.stdev(change):.2f}) %",
            )
    return [t for t in (presets, rest, sweep, seeds) if t.rows]


def published() -> Table:
    table = Table(
        "As published, on other models", ("model", "bits", "perplexity", "16 bit", "change")
    )
    for model, count, hqmq, plain in PUBLISHED:
        change = f"{100 * (hqmq / plain - 1):+.2f} %"
        table.add(model, f"{count:.2f}", f"{hqmq:g}", f"{plain:g}", change)
    return table


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--models", nargs="+", default=["smollm2", "qwen2.5-coder"])
    options.add_argument("--cases", nargs="+", default=cases())
    options.add_argument("--texts", nargs="+", default=["python-docs"])
    options.add_argument("--tokens", type=int, default=1024)
    o = options.parse_args()
    o.skip, o.prefill, o.chunk, o.positions = 0, o.tokens, 1, o.tokens
    o.route, o.cache, o.records = "fake", "", RESULTS / "paper_tables.jsonl"
    set_threads(o.threads)
    quality.run(o)
    wanted = [quality.key_of(o, m, t, c) for m in o.models for t in o.texts for c in cases()]
    known = quality.read(o.records)
    records = [r for r, key in zip(known, quality.keys(known), strict=True) if key in wanted]
    shown = [published()]
    for model in o.models:
        shown += tables(model, quality.shape_of(load(model)[0])[2], records)
    publish("paper_tables", __doc__, shown, o.output, timed=False)


if __name__ == "__main__":
    main()
