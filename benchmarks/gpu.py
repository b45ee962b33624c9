"""Shared by the GPU benchmarks: time from CUDA graphs, a budget of seconds, rows as they are measured.

Burst is what most papers quote: a few replays on a cool GPU, median. Sustained is one second without a
pause, after which the power cap decides. Both replay CUDA graphs, so the time that Python needs to
launch kernels is not in them; `eager` has it. Pass enough copies of the inputs that all of them
together exceed the L2 cache (`copies`), or the cache is what is measured.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from .common import Table

Call = Callable[[], object]
log = logging.getLogger("hqmq.benchmarks")
SLEEP = 10_000_000  # GPU cycles in which the host gets ahead, some 6 ms
MOST_REPLAYS = 60


def need_cuda() -> None:
    """Stop with one clear sentence where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device, and torch sees none")


class Clock:
    """Seconds left of a budget; 0 is no limit."""

    def __init__(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds if seconds else float("inf")

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes `seconds` may begin."""
        return self.left > seconds


def say(table: Table, *cells: str | int) -> None:
    """Add a row, and print it now: a run that is cut short has shown what it measured."""
    table.add(*cells)
    print(" | ".join(str(cell) for cell in cells), flush=True)


def one_line(error: BaseException) -> str:
    """An exception as the cell of a table."""
    text = str(error).strip().split("\n")[0]
    return f"failed: {type(error).__name__}: {text}"[:90].replace("|", "/")


def free() -> None:
    """Give back what is unreachable."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -- time ----------------------------------------------------------------------------------------
def copies(size: int, most: int = 64) -> int:
    """Copies of inputs of `size` bytes that together are three times the L2 cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, min(most, -(-3 * cache // max(size, 1))))


def captured(calls: Sequence[Call], repeats: int = 1) -> torch.cuda.CUDAGraph:
    """A CUDA graph of all calls, `repeats` times, after each has run twice."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (calls[0], *calls):
            call()
        torch.cuda.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(repeats):
                for call in calls:
                    call()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def burst(calls: Sequence[Call], *, budget_ms: float = 25.0, before: Call | None = None) -> float:
    """Microseconds of one call: median over replays of a graph of all `calls`.

    Args:
        calls: the same work on different memory.
        budget_ms: time of all replays, about.
        before: put in front of every replay, and not timed; then each call is made once a replay.
    """
    repeats = 1 if before else max(1, 8 // len(calls))
    graph = captured(calls, repeats)

    def replays(count: int) -> list[float]:
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in ("begin", "end")
        ]
        torch.cuda._sleep(SLEEP)
        for begin, end in zip(*events, strict=True):
            if before:
                before()
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(*events, strict=True)]

    once = min(replays(2))
    times = replays(int(min(MOST_REPLAYS, max(5, budget_ms / max(once, 1e-3)))))
    return statistics.median(times) * 1e3 / (len(calls) * repeats)


def sustained(calls: Sequence[Call], seconds: float = 1.0) -> float:
    """Microseconds of one call when the GPU does nothing else for `seconds`."""
    repeats = max(1, 8 // len(calls))
    graph = captured(calls, repeats)
    first, chunk_end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    first.record()
    graph.replay()
    last.record()
    torch.cuda.synchronize()
    chunk = max(1, int(20 / max(first.elapsed_time(last), 1e-3)))
    done, stop = 0, time.monotonic() + seconds
    first.record()
    while time.monotonic() < stop:
        for _ in range(chunk):
            graph.replay()
        done += chunk
        if done > chunk:
            chunk_end.synchronize()  # the chunk before this one: the queue never runs empty
        chunk_end.record()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) * 1e3 / (done * len(calls) * repeats)


def eager(calls: Sequence[Call], count: int = 30) -> float:
    """Microseconds of one call made from Python, launches included."""
    calls[0]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(count):
        calls[i % len(calls)]()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / count


@dataclasses.dataclass
class Steps:
    """What the steps of a loop took; bytes are of torch's allocator."""

    milliseconds: list[float]  # of each, on the device
    seconds: float  # of all, on the host
    peak: int
    resident: int


def timed_steps(step: Call, count: int) -> Steps:
    """Call `step` `count` times, without waiting in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return Steps(
        [a.elapsed_time(b) for a, b in itertools.pairwise(events)],
        time.perf_counter() - start,
        torch.cuda.max_memory_allocated(),
        torch.cuda.memory_allocated(),
    )


# -- pictures ------------------------------------------------------------------------------------
def bars(
    path: Path, title: str, unit: str, groups: Mapping[str, Mapping[str, float]]
) -> Path | None:
    """Write `groups` of named bars as a PNG; None, and one logged line, without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        log.warning("no matplotlib here: %s is not drawn", path.name)
        return None
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = pyplot.subplots(figsize=(max(6, 0.9 * len(groups) + 2), 4.5))
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        at = [g + (i - (len(names) - 1) / 2) * width for g in range(len(groups))]
        heights = [group.get(name, 0.0) for group in groups.values()]
        axes.bar(at, heights, width, label=name)
    axes.set_xticks(range(len(groups)), list(groups), rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(unit)
    axes.set_title(title)
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
