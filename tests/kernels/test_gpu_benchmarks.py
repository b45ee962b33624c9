"""The GPU benchmarks run: every contender on tiny caches, with a clock that does not tick."""

import argparse
import dataclasses

import pytest
import torch

from benchmarks import decode_attention, decode_session, gpu, shapes, write_path
from benchmarks import decode_contenders as contenders
from benchmarks.common import Table

CASE = contenders.Case(2, 4, 2, 192, dim=16)


@pytest.fixture
def no_clock(monkeypatch):
    """Timers that call once and answer one microsecond."""

    def once(calls, *args, **options):
        calls[0]()
        return 1.0

    for name in ("burst", "sustained", "eager"):
        monkeypatch.setattr(gpu, name, once)
    monkeypatch.setattr(gpu, "copies", lambda size: 2)
    # The interpreter cannot multiply bfloat16.
    monkeypatch.setattr(contenders, "DTYPE", torch.float16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is run in earnest")
def test_decode_attention(no_clock, monkeypatch):
    monkeypatch.setattr(decode_attention, "CASES", [CASE])
    ours = [n for n in contenders.CONTENDERS if n not in ("cuDNN", "flash", "FlexAttention")]
    arguments = argparse.Namespace(
        seconds=0, sustained=1.0, bandwidth=4.8, contexts=None, contenders=[*ours, "cuDNN"]
    )
    table = Table("", ("case", "burst", "sustained", "eager", "MB", "limit", "error"))
    results = decode_attention.run(arguments, table, "cpu")
    cells = {row[0].removeprefix(f"{CASE} "): row[-1] for row in table.rows}
    assert cells.pop("cuDNN").startswith("failed")
    assert not [cell for cell in cells.values() if "WRONG" in cell or "failed" in cell], cells
    (row,) = decode_attention.ratios(results).rows
    assert row[1] == "1.00"


def test_says_which_kernel_serves():
    assert "kernel" in contenders.path_of(CASE, contenders.HQMQConfig())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is run in earnest")
def test_write_path(no_clock, monkeypatch):
    monkeypatch.setattr(write_path, "HEADS", 1)
    arguments = argparse.Namespace(seconds=0, context=128, prefill=256, preset="4bit")
    table = Table("", ("write", "us", "promised", "eager us", "as intended"))
    write_path.run(arguments, table, "cpu")
    assert [row[-1] for row in table.rows] == ["yes"] * 5


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it is run in earnest")
def test_split_kv_in_a_model(fresh_dynamo):
    model = shapes.build("tiny", 0, "cpu", torch.float32)
    logits = []
    for contender in (None, decode_session.SPLIT_KV):
        if contender is None:
            session = decode_session.Session(model, None, "static", 128)
        else:
            contender = dataclasses.replace(contender, backend="aot_eager", mode=None)
            session = decode_session.open_session(model, contender, 128)
        with torch.no_grad():
            decode_session.fill(session, 2, 70, None)
            logits.append(session(torch.tensor([[7], [3]])))
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
