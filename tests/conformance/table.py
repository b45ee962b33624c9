"""Writes `docs/compatibility.md` from measurements: `python -m tests.conformance.table`.

Rows are measured one by one, and kept in a file of JSON lines: a run that was stopped goes on where it
was, `--fresh` starts again, `--only TEXT` takes the rows whose name contains TEXT.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import json
import platform
from pathlib import Path

import torch
import transformers

import hqmq_compile
import hqmq_compile.backend
from tests.compare import TOLERANCE
from tests.conformance.architectures import ARCHITECTURES, LEFT_OUT
from tests.conformance.rows import ROWS, STYLES, Row
from tests.conformance.session import Result

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "compatibility.md"
MEASURED = ROOT / "build" / "conformance.jsonl"


def measure(path: Path, only: str = "", seconds: float = float("inf"), styles=False) -> None:
    """Append a line for each row that `path` does not have yet."""
    done = load(path)
    spent = 0.0
    for row in ROWS:
        if row.id in done or only not in row.id or (styles and not row.is_style):
            continue
        if spent > seconds:
            break
        result = row.measure()
        spent += result.seconds
        with path.open("a") as file:
            file.write(json.dumps({"row": row.id, **dataclasses.asdict(result)}) + "\n")
        print(line(row, result), flush=True)
        gc.collect()


def load(path: Path) -> dict[str, Result]:
    """Results by the row's id."""
    results = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        entry = json.loads(text)
        name = entry.pop("row")
        results[name] = Result(**entry)
    return results


def line(row: Row, result: Result) -> str:
    """A row for the eye of whoever watches."""
    parts = [
        f"{row.id}: {result.rewritten}/{result.attentions}",
        f"found {result.found} direct {result.direct} packed {result.packed}/{result.tensors}",
        f"oracle {result.oracle:.1e} exact {result.exact:.1e} effect {result.effect:.1e}",
        f"ties {result.ties} graphs {result.graphs}/{result.plain_graphs} {result.seconds:.0f} s",
        *([result.problem] if result.problem else []),
        *result.reasons,
        *(f"silent: {reason}" for reason in result.silent),
    ]
    return "; ".join(parts)


def page(results: dict[str, Result]) -> str:
    """The text of `docs/compatibility.md`."""
    rows = [row for row in ROWS if row.id in results]
    chosen = [results[row.id] for row in rows]
    full = sum(result.full for result in chosen)
    direct = sum(result.full and result.direct == result.attentions for result in chosen)
    right = sum(_is_right(result) for result in chosen)
    models = [row for row in rows if not row.is_style]
    names = {row.name for row in models}
    parts = [
        "# Compatibility",
        "",
        "Measured, never typed: `python -m tests.conformance.table` writes this page.",
        "",
        f"- {datetime.date.today():%d %B %Y}, Python {platform.python_version()}, torch"
        f" {torch.__version__}, transformers {transformers.__version__}, hqmq-compile"
        f" {hqmq_compile.__version__}, CPU, float32.",
        f"- {len(rows)} rows: {len(names)} models of transformers"
        f" ({len({ARCHITECTURES[n].type for n in names})} architectures, tiny random weights) and"
        f" {len(rows) - len(models)} hand-written caches.",
        f"- **{full} of {len(rows)} rows ({_percent(full, len(rows))}) are rewritten in full**: every"
        f" cache is packed; in {direct} of them every attention reads the packed bits, in the others a"
        " dense copy that lives as long as the layer.",
        f"- **{right} of {len(rows)} ({_percent(right, len(rows))}) are numerically right**, rewritten"
        " or not.",
        "",
        "A row runs a prompt of 37 tokens, steps, a second prompt and steps again, with a window of 8"
        " tokens so that the rest is packed. *Rewritten* counts attentions whose caches are packed, *packed"
        " bits* those of them that read these bits, both in the call with fewest."
        " *Error* is the largest relative difference of the logits from the oracle, an eager model"
        " whose cache is quantised by the reference codec; *lossless* that from the plain eager model,"
        " where the window is longer than the text. *Graphs* is how many Dynamo made, and in brackets"
        ' how many for `backend="eager"`.',
        "",
        "## Models of transformers",
        "",
        "| model | cache | attention | rewritten | packed bits | error | lossless | graphs | reason |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_cells(row, results[row.id]) for row in models),
        "",
        "## Caches written by hand",
        "",
        "| style | cache | attention | rewritten | packed bits | error | lossless | graphs | reason |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_cells(row, results[row.id]) for row in rows if row.is_style),
        "",
        *(f"- {name}: {_summary(style)}" for name, style in STYLES.items()),
        "",
        "## Left out",
        "",
        *(f"- {name}: {reason}" for name, reason in LEFT_OUT.items()),
        "",
    ]
    return "\n".join(parts)


def _cells(row: Row, result: Result) -> str:
    reason = "; ".join([*([result.problem] if result.problem else []), *result.reasons])
    cells = [
        row.name,
        row.cache,
        row.attention.removesuffix("_attention"),
        f"{result.rewritten}/{result.attentions}",
        f"{result.direct}/{result.attentions}",
        f"{result.oracle:.0e}",
        f"{result.exact:.0e}",
        f"{result.graphs} ({result.plain_graphs})",
        reason.replace("|", "\\|"),
    ]
    return "| " + " | ".join(cells) + " |"


def _summary(style: type) -> str:
    return " ".join(style.__doc__.split("\n\n")[0].split())


def _is_right(result: Result) -> bool:
    return not result.problem and max(result.oracle, result.exact) <= TOLERANCE


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--fresh", action="store_true", help="measure all rows again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--measured", type=Path, default=MEASURED, help="file of JSON lines")
    parser.add_argument("--styles", action="store_true", help="the hand-written caches alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    # Rewritten graphs run as they are: inductor takes most of the time, and is torch's.
    hqmq_compile.backend.compile_fx = lambda gm, inputs, config_patches=None: gm.forward
    options.measured.parent.mkdir(exist_ok=True)
    if options.fresh:
        options.measured.unlink(missing_ok=True)
    measure(options.measured, options.only, options.seconds, options.styles)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(load(options.measured)))


if __name__ == "__main__":
    main()
