"""Tensor parallelism over gloo: packed caches as in one process, on every rank.

The heavy part runs once: two processes for all models (`ranks.py`), whose facts the tests read.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.tensor")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4  # measured: 2e-7 to 6e-7
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def torchrun(ranks: int, *module: str) -> None:
    """Run a module with its arguments on every rank."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        + [str(ranks), "-m", *module],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-8000:]


def facts_of(ranks: int, folder: Path, *cases: str) -> dict[str, list[dict]]:
    """Facts of every rank, by case."""
    torchrun(ranks, "tests.distributed.ranks", str(folder), *cases)
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    styles = pytest.importorskip("transformers.integrations.tensor_parallel").ALL_PARALLEL_STYLES
    cases = ["divided", "llama", "qwen"] + ["sinks"] * ("local_params" in styles)
    return facts_of(2, tmp_path_factory.mktemp("ranks"), *cases)


def check(facts: Sequence[dict], first_heads: list[int]) -> None:
    for rank, fact in enumerate(facts):
        assert fact["error"] < TOLERANCE
        assert min(fact["packed_slots"]) > 0, "nothing was packed"
        assert fact["different"] == [0] * len(fact["bytes"]) and min(fact["bytes"]) > 0
        assert set(fact["first_head"]) == {first_heads[rank]}


@pytest.mark.parametrize(
    "case, first_heads",
    [
        ("llama", [0, 1]),  # StaticCache, inductor, a codebook for each head
        ("qwen", [0, 0]),  # DynamicCache, biases on keys, one codebook
        ("sinks", [0, 1]),  # gpt-oss, sliding and full layers
    ],
)
def test_generates_as_one_process_does(two_ranks, case, first_heads):
    if case not in two_ranks:
        pytest.skip("this transformers cannot divide attention sinks")
    facts = two_ranks[case]
    assert [fact["heads"] for fact in facts] == [1, 1]  # of two
    check([f | {"packed_slots": f["packed_slots"][-2:]} for f in facts], first_heads)
    assert facts[0]["tokens"] == facts[1]["tokens"]


def test_compiled_graphs_are_not_shared_between_heads(two_ranks):
    """The second session comes from inductor's cache on disk, to which all ranks wrote."""
    facts = two_ranks["divided"]
    for session in zip(*facts, strict=True):
        check(session, [0, 2])
    assert min(fact["hits"] for fact in session) > 0


def test_ranks_that_hold_the_same_head(tmp_path):
    facts = facts_of(4, tmp_path, "copied")["copied"]
    check([fact for (fact,) in facts], [0, 0, 1, 1])


def test_benchmark(tmp_path):
    pytest.importorskip("transformers")
    one = {"hqmq": {"rate": 1.0, "cache": 2}, "inductor": {"rate": 1.0, "cache": 2}}
    title = "tiny, 2 of 2 layers, float32, ranks, default"
    left = json.dumps({"title": title, "found": {"200, B=2": one}})
    (tmp_path / "tensor_parallel_1.json").write_text(left)
    output = tmp_path / "tensor_parallel_2.md"
    options = "--model tiny --layers 0 --dtype float32 --mode default --cases 200,2 --steps 2"
    options += f" --warmup 2 --contenders hqmq --output {output}"
    torchrun(2, "benchmarks.tensor_parallel", *options.split())
    text = output.read_text()
    assert "all packed" in text and "From one GPU to 2" in text


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, tuple[float, subprocess.Popen, str]]:
    """By case: seconds, process and output of rank 0, whose peer stops in the middle."""
    folder = tmp_path_factory.mktemp("broken")
    started = {case: start(2, folder, case) for case in ("raises", "hangs")}
    found = {}
    for case, (first, second) in started.items():
        try:
            for line in first.stdout:  # until both have compiled and called the model
                if "at work" in line:
                    break
            begin = time.monotonic()
            output, _ = first.communicate(timeout=60)
            found[case] = time.monotonic() - begin, first, output
        finally:
            for process in (first, second):
                process.kill()
                process.wait()
    return found


def start(ranks: int, folder: Path, case: str) -> list[subprocess.Popen]:
    """Processes without torchrun, which would end the others when one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.ranks", str(folder), case],
            cwd=ROOT,
            env=ENVIRONMENT | world | {"RANK": str(rank)},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize(
    "case, words", [("raises", "Connection closed by peer"), ("hangs", "Timed out")]
)
def test_a_rank_that_stops_is_an_error_on_the_others(broken, case, words):
    seconds, process, output = broken[case]
    assert process.returncode != 0
    assert "RuntimeError" in output and words in output, output[-4000:]
    assert seconds < 20  # the process group waits five
