"""The evaluation: what is compared, standard errors, records that are not measured twice."""

from __future__ import annotations

import argparse
import json
import math

import pytest
import torch

from benchmarks import quality, quality_report


def test_compare():
    want = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    got = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]]).log() + 3  # logits, not normalised
    kl, same, more, base = quality.compare(want, got, torch.tensor([0, 1]))
    assert kl[0] == pytest.approx(0.25 * math.log(2)) and kl[1] == pytest.approx(0, abs=1e-6)
    assert same.tolist() == [0, 1]
    assert more[0] == pytest.approx(math.log(2)) and more[1] == pytest.approx(0, abs=1e-6)
    assert base[1] == pytest.approx(-math.log(0.8))


def records(kl, count=64.0, case="4bit", bits=4.0):
    groups = len(kl)
    return {
        "model": "m", "case": case, "route": "fake", "text": "t", "bits": [bits, bits],
        "bits_at": bits, "allocated": None, "outliers": [0.0, 0.0],
        "capped": [0.0, 0.0], "count": [count] * groups,
        "kl": [k * count for k in kl], "same": [count] * groups, "more": [0.64] * groups,
        "base": [128.0] * groups,
    }  # fmt: skip


def test_standard_error_is_that_of_independent_groups():
    values = torch.randn(400, generator=torch.Generator().manual_seed(3)) * 0.1 + 1
    score = quality_report.score([records(values.tolist())])
    assert score.kl == pytest.approx(values.mean().item(), rel=1e-5)
    assert score.kl_se == pytest.approx(values.std().item() / 20, rel=1e-4)
    assert score.change == pytest.approx(math.exp(0.01) - 1)
    assert score.perplexity == pytest.approx(math.exp(2))


def test_groups_add_up():
    positions = torch.arange(128, 400)
    out = quality.grouped(torch.ones(4, len(positions)), positions)
    assert out["count"] == [64, 64, 64, 64, 16] and out["kl"] == out["count"]


def test_front():
    points = quality_report.scores(
        [
            records([0.1, 0.1], case="4bit", bits=4),
            records([0.2, 0.2], case="int4", bits=4.5),
            records([0.05, 0.05], case="5bit", bits=5),
        ]
    )
    assert quality_report.front(points) == {"4bit", "5bit"}
    assert [p.case for p in points] == ["4bit", "int4", "5bit"]


def test_resumes(tmp_path, monkeypatch):
    """Two texts and two cases; a second run measures only what is new."""
    pytest.importorskip("transformers")
    from tests.models.tiny import prompt, tiny

    loads, model = [], tiny("llama")
    monkeypatch.setattr(quality, "load", lambda name: (loads.append(name), (model, None))[1])
    monkeypatch.setattr(
        quality, "token_ids", lambda tok, text, count, skip=0: prompt(count, seed=3)
    )
    o = argparse.Namespace(
        models=["m"], texts=["a", "b"], cases=["4bit", "int4"], route="fake", cache="static",
        tokens=200, skip=0, prefill=32, chunk=1, positions=2048, records=tmp_path / "q.jsonl",
    )  # fmt: skip
    quality.run(o)
    done = quality.read(o.records)
    assert [(r["text"], r["case"]) for r in done] == [
        ("a", "4bit"), ("a", "int4"), ("b", "4bit"), ("b", "int4"),
    ]  # fmt: skip
    assert all(sum(r["count"]) == 200 - 1 - 32 and sum(r["kl"]) > 0 for r in done)
    o.cases = ["4bit", "KIVI-4"]
    quality.run(o)
    assert [r["case"] for r in quality.read(o.records)[4:]] == ["KIVI-4", "KIVI-4"]
    quality.run(o)
    assert len(quality.read(o.records)) == 6 and loads == ["m", "m"]
    json.dumps(done)
    quality_report.report("q", "About.", done, plot=False, output=tmp_path / "q.md")
    assert "**4bit" in (tmp_path / "q.md").read_text()
    assert len((tmp_path / "q.csv").read_text().splitlines()) == 1 + 2 * 3


def test_codebooks_learn_from_another_text(monkeypatch):
    pytest.importorskip("transformers")
    from benchmarks.baselines import LearnedVQ
    from benchmarks.faithful import Method
    from tests.models.tiny import prompt, tiny

    seen = []
    monkeypatch.setattr(
        quality, "token_ids", lambda tok, text, count: (seen.append(text), prompt(count))[1]
    )
    method = Method(LearnedVQ(index_bits=4), LearnedVQ(index_bits=4))
    quality.calibrate(tiny("llama"), None, method, "python-docs", tokens=100)
    assert seen == ["python-source"]
    assert set(method.key.tables) == {0, 1} and method.value.tables[1].shape == (16, 4)
    assert not torch.equal(method.key.tables[0], method.value.tables[0])


def test_caches_of_transformers_step_by_step():
    pytest.importorskip("transformers")
    from tests.models.tiny import prompt, tiny

    model, ids = tiny("llama"), prompt(60, seed=1)
    logits = quality.stepped(model, "QuantizedCache fp8", ids, 20, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[0, 20:]
    difference = (logits - expected).norm() / expected.norm()
    assert logits.shape == expected.shape and 1e-3 < difference < 0.3


def test_targets():
    """The best case within a budget, and what it misses."""
    points = quality_report.scores(
        [
            records([0.010, 0.010], case="3bit", bits=3.3),
            records([0.007, 0.007], case="4bit", bits=4.0),
            records([0.006, 0.006], case="KIVI-4", bits=5.2),
        ]
    )
    rows = {row[1]: row for row in quality_report.targets(points).rows if row[1]}
    assert set(rows) == {"3bit", "4bit"}
    assert rows["3bit"][-2] == "-" and "KIVI-4 (5.20)" in rows["3bit"][-1]
    last = quality_report.targets(points).rows[-1]  # 5.1 bits: still the 4 bit case, which misses
    assert last[1] == "4bit" and "KL" in last[-2]
