"""Records of `quality.py` as tables, CSV and plots."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

from .common import RESULTS, Table, publish
from .quality_cases import BASELINES, label

COLUMNS = ("bits", "at 4096", "KL", "perplexity", "equal top token")


@dataclasses.dataclass(frozen=True)
class Score:
    """A case on a model, over its texts; `_se` are standard errors."""

    model: str
    case: str
    route: str
    text: str
    bits: float
    bits_at: float
    allocated: float | None
    kl: float
    kl_se: float
    top1: float
    top1_se: float
    change: float  # of the perplexity, relative
    change_se: float
    perplexity: float  # of the unquantised model
    positions: int
    outliers: float  # of the chunks of keys and of values
    capped: float  # outliers of them that found no room

    @property
    def ours(self) -> bool:
        return self.case not in BASELINES


def _mean(sums: list[float], counts: list[float]) -> tuple[float, float]:
    # Mean over positions, and its standard error from the groups.
    mean, n = sum(sums) / sum(counts), len(sums)
    if n < 2:
        return mean, math.nan
    spread = sum((s - mean * c) ** 2 for s, c in zip(sums, counts, strict=True))
    return mean, math.sqrt(spread * n / (n - 1)) / sum(counts)


def score(records: list[dict[str, Any]], text: str = "all") -> Score:
    """One score of the records of one case on one model."""
    flat = {
        name: [x for r in records for x in r[name]]
        for name in ("kl", "same", "more", "base", "count")
    }
    kl, top1, more, base = (_mean(flat[n], flat["count"]) for n in ("kl", "same", "more", "base"))
    first, change = records[-1], math.exp(more[0])
    mean_bits = [sum(r["bits"]) / 2 for r in records]
    return Score(
        model=first["model"],
        case=first["case"],
        route=first["route"],
        text=text,
        bits=sum(mean_bits) / len(mean_bits),
        bits_at=sum(r["bits_at"] for r in records) / len(records),
        allocated=first["allocated"],
        kl=kl[0],
        kl_se=kl[1],
        top1=top1[0],
        top1_se=top1[1],
        change=change - 1,
        change_se=change * more[1],
        perplexity=math.exp(base[0]),
        positions=int(sum(flat["count"])),
        outliers=sum(sum(r["outliers"]) / 2 for r in records) / len(records),
        capped=sum(sum(r["capped"]) / 2 for r in records) / len(records),
    )


def scores(records: list[dict[str, Any]], by_text: bool = False) -> list[Score]:
    """Scores by model and case, in the order of stored bits; with `by_text` those of each text too."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in records:
        groups.setdefault((r["model"], r["case"]), []).append(r)
    out = []
    for group in groups.values():
        out.append(score(group))
        if by_text:
            out += [score([r], r["text"]) for r in group]
    models = list(dict.fromkeys(r["model"] for r in records))
    return sorted(out, key=lambda s: (models.index(s.model), s.bits))


def front(points: list[Score]) -> set[str]:
    """The cases that no other case of the model beats in both bits and KL."""
    return {
        p.case
        for p in points
        if not any(q.kl < p.kl and q.bits <= p.bits for q in points if q.case != p.case)
    }


def table(model: str, points: list[Score]) -> Table:
    best = front(points)
    result = Table(f"{model}, {points[0].positions:,} positions", ("case", *COLUMNS))
    for p in points:
        name = label(p.case) + (" *" if p.case in best else "")
        result.add(
            f"**{name}**" if p.ours else name,
            f"{p.bits:.2f}",
            f"{p.bits_at:.2f}",
            f"{p.kl:.4f} ± {p.kl_se:.4f}",
            f"{100 * p.change:+.2f} ± {100 * p.change_se:.2f} %",
            f"{100 * p.top1:.1f} ± {100 * p.top1_se:.1f} %",
        )
    result.notes.append(
        f"Perplexity of the unquantised model: {points[0].perplexity:.3f}. **Bold**: hqmq. "
        "*: no other case has fewer bits and a lower KL. bits: mean over lengths around 4k tokens; "
        "at 4096: at that length."
    )
    return result


# Stored bits at 4,096 tokens; at most this KL, perplexity within, at least this share of equal top tokens.
TARGETS = (
    (3.4, 0.020, 0.030, 0.920),
    (4.0, 0.008, 0.015, 0.950),
    (4.6, 0.006, 0.012, 0.960),
    (5.1, 0.004, 0.0075, 0.965),
)


def targets(points: list[Score]) -> Table:
    """The best of our cases within each budget, what it misses, and who has a lower KL."""
    columns = ("budget, model", "case", "bits", "KL", "perplexity", "top token", "misses", "better")
    result = Table("Targets", columns)
    for budget, kl, change, top1 in TARGETS:
        goal = f"at most {kl}", f"within {100 * change:g} %", f"{100 * top1:g} %"
        result.add(f"**{budget} bits**", "", "", *goal, "", "")
        for model in dict.fromkeys(p.model for p in points):
            some = [p for p in points if p.model == model]
            ours = [p for p in some if p.ours and p.bits_at < budget + 0.02]
            if not ours:
                continue
            best = min(ours, key=lambda p: p.kl)
            fails = (best.kl > kl, abs(best.change) > change, best.top1 < top1)
            missed = [n for n, f in zip(("KL", "perplexity", "top"), fails, strict=True) if f]
            better = [p for p in some if not p.ours and p.kl < best.kl and p.bits_at < 15]
            cheapest = sorted(better, key=lambda p: p.bits_at)[:2]
            names = ", ".join(f"{p.case} ({p.bits_at:.2f})" for p in cheapest)
            result.add(
                model,
                label(best.case),
                f"{best.bits_at:.2f}",
                f"{best.kl:.4f} ± {best.kl_se:.4f}",
                f"{100 * best.change:+.2f} ± {100 * best.change_se:.2f} %",
                f"{100 * best.top1:.1f} ± {100 * best.top1_se:.1f} %",
                ", ".join(missed) or "-",
                names or "-",
            )
    result.notes.append(
        "bits: at exactly 4,096 tokens. misses: by its mean, whatever the standard error. better: "
        "other methods with a lower mean KL, the two with the fewest bits, and these."
    )
    return result


def draw(model: str, points: list[Score], path: Path) -> None:
    """Stored bits against KL with error bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6), layout="constrained")
    for ours, colour, marker, legend in (
        (True, "tab:blue", "o", "hqmq"),
        (False, "tab:gray", "s", "other methods"),
    ):
        some = [p for p in points if p.ours == ours and p.bits < 9 and p.kl > 0]
        if not some:
            continue
        x, y = [p.bits for p in some], [p.kl for p in some]
        bars = [min(p.kl_se, 0.9 * p.kl) if p.kl_se == p.kl_se else 0 for p in some]
        axes.errorbar(x, y, yerr=bars, fmt=marker, color=colour, ms=4, capsize=2, label=legend)
        for p in some:
            axes.annotate(
                p.case, (p.bits, p.kl), fontsize=6, color=colour, xytext=(4, 2),
                textcoords="offset points",
            )  # fmt: skip
    best = front(points)
    line = [p for p in points if p.case in best and p.bits < 9]
    axes.plot([p.bits for p in line], [p.kl for p in line], color="tab:orange", lw=0.8, zorder=0)
    axes.set(
        yscale="log", title=model, ylabel="KL divergence from the unquantised model, nats",
        xlabel="stored bits an element at 4k context, everything counted",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def report(
    name: str,
    about: str,
    records: list[dict[str, Any]],
    *,
    plot: bool = True,
    output: Path | None = None,
) -> None:
    """Markdown, CSV and one plot a model, beside each other."""
    if not records:
        raise SystemExit("no records of these cases")
    folder = output.parent if output else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    every = scores(records, by_text=True)
    with (folder / f"{name}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in dataclasses.fields(Score)])
        writer.writeheader()
        for s in every:
            row = dataclasses.asdict(s)
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})
    tables = []
    for model in dict.fromkeys(s.model for s in every):
        points = [s for s in every if s.model == model and s.text == "all"]
        tables.append(table(model, points))
        if plot:
            try:
                draw(model, points, folder / f"{name}-{Path(model).name}.png")
            except ImportError:
                print("no plots: pip install matplotlib")
    if any(s.ours for s in every):
        tables.insert(0, targets([s for s in every if s.text == "all"]))
    publish(name, about, tables, output, module="quality", timed=False)
