"""Shared by the benchmarks: where a figure was taken, models with a cache, tables on screen and disk."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import datetime
import importlib.metadata
import inspect
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")

import torch

RESULTS = Path(__file__).resolve().parent / "results"
LOAD = os.getloadavg()[0]  # before we add to it
T = TypeVar("T")


# -- where and when ------------------------------------------------------------------------------
def machine() -> dict[str, str]:
    """Hardware, versions, commit and date, for the head of every result."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    facts = {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
        "cpu": f"{_cpu()}, {os.cpu_count()} logical cores, {torch.get_num_threads()} torch threads,"
        f" {memory:.0f} GiB",
        "load": f"{LOAD:.1f} before, {os.getloadavg()[0]:.1f} after (minute averages)"
        + (", **the machine was busy**: not figures to quote" if LOAD > 0.6 else ""),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": ", ".join(_versions("torch", "transformers", "triton")),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str:
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        edits = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + (" with uncommitted changes" if edits.stdout.strip() else "")


def _versions(*names: str) -> Iterator[str]:
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


# -- tables ----------------------------------------------------------------------------------------
@dataclasses.dataclass
class Table:
    """Rows of text and numbers; numbers are right-aligned, floats need a format in the cell."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str | int]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, *cells: str | int) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def _texts(self) -> list[list[str]]:
        return [[f"{c:,}" if isinstance(c, int) else c for c in row] for row in self.rows]

    def markdown(self) -> str:
        align = ["---" if i == 0 else "--:" for i in range(len(self.columns))]
        lines = [" | ".join(row) for row in (self.columns, align, *self._texts())]
        table = "\n".join(f"| {line} |" for line in lines)
        notes = "".join(f"\n\n{note}" for note in self.notes)
        return f"## {self.title}\n\n{table}{notes}\n"

    def show(self) -> None:
        try:
            from rich.console import Console
            from rich.table import Table as RichTable
        except ImportError:
            print(self.markdown())
            return
        table = RichTable(title=self.title, title_justify="left")
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
        for row in self._texts():
            table.add_row(*row)
        # A pipe is 80 columns wide to rich, which cuts tables.
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(table)
        for note in self.notes:
            console.print(note)


def publish(
    name: str,
    about: str,
    tables: Sequence[Table],
    output: Path | None = None,
    *,
    module: str | None = None,
    timed: bool = True,
) -> Path:
    """Show `tables` and write them with the head of `machine` to `results/<name>.md`, or `output`.

    Args:
        module: that was run, if it is not called `name`.
        timed: whether the figures depend on the load of the machine.
    """
    facts = machine()
    if not timed:
        del facts["load"]
    for table in tables:
        table.show()
    path = output or RESULTS / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = [f"# {name}", "", about.strip(), ""]
    head += [f"- {key}: {value}" for key, value in facts.items()]
    head += [
        f"- command: `python -m benchmarks.{module or name} {shlex.join(sys.argv[1:])}`".rstrip(
            " `"
        )
        + "`",
        "",
    ]
    path.write_text("\n".join(head) + "\n" + "\n".join(t.markdown() for t in tables))
    print(f"written to {path}")
    return path


# -- command line ----------------------------------------------------------------------------------
def parser(about: str, *, model: str | None = "smollm2") -> argparse.ArgumentParser:
    """`--model`, `--threads`, `--output`."""
    result = argparse.ArgumentParser(
        description=about.strip().split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if model:
        result.add_argument("--model", default=model, help="of benchmarks.models, folder or hub id")
    result.add_argument(
        "--threads", type=int, default=0, help="torch threads; 0: torch's own choice"
    )
    result.add_argument("--output", type=Path, help="file to write; default: benchmarks/results/")
    return result


def set_threads(count: int) -> None:
    if count:
        torch.set_num_threads(count)


def progress(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """`items` with a progress bar where rich is there and someone watches."""
    if total is None and hasattr(items, "__len__"):
        total = len(items)  # type: ignore[arg-type]
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        return items
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{what} ...", file=sys.stderr, flush=True)
        return items
    return track(items, what, total=total, console=console)


# -- models ------------------------------------------------------------------------------------------
def cache_keyword(model: Any) -> str:
    """The name of the cache argument: `past_key_values`, and `cache` in newer transformers."""
    return (
        "cache"
        if "cache" in inspect.signature(type(model).forward).parameters
        else "past_key_values"
    )


class Session:
    """A model, compiled by one backend, with a cache of one kind, called as in a hand-written loop.

    Args:
        model: shared between sessions, not changed: each compiles an object of its own over the
            same weights.
        backend: of torch.compile; None runs eager.
        kind: "static" or "dynamic".
        length: `max_cache_len` of the static cache.
        options: of the backend.
        dynamic: of torch.compile.
    """

    def __init__(
        self,
        model: Any,
        backend: Any,
        kind: str,
        length: int,
        *,
        options: dict[str, Any] | None = None,
        dynamic: bool | None = None,
    ) -> None:
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if backend is not None:
            self.model.forward = torch.compile(
                self.model.forward, backend=backend, options=options, dynamic=dynamic
            )
        self.keyword = cache_keyword(model)
        self.kind, self.length = kind, length
        self.start()

    def start(self) -> None:
        """A new, empty cache."""
        from transformers import DynamicCache, StaticCache

        config = self.model.config
        if self.kind == "static":
            self.cache: Any = StaticCache(config=config, max_cache_len=self.length)
        else:
            self.cache = DynamicCache(config=config)

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor, keep: int = 1) -> torch.Tensor:
        """Logits `[B, keep, V]` of the last `keep` tokens of `ids` `[B, n]` (0: of all)."""
        return self.model(ids, **{self.keyword: self.cache}, logits_to_keep=keep).logits

    def tensors(self) -> list[torch.Tensor]:
        """Keys and values of all layers."""
        return [t for layer in self.cache.layers for t in (layer.keys, layer.values)]
