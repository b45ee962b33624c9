"""The custom ops: schemas and fakes by opcheck, and no clone of a cache under inductor."""

from __future__ import annotations

import pytest
import torch

from hqmq_compile import HQMQConfig, ops
from hqmq_compile.cache.store import PackedKV

CONFIGS = {
    "default": HQMQConfig(block=16, window=16),
    "immediate": HQMQConfig(block=16, window=0),
    "paper": HQMQConfig.preset("paper", block=16),
}


@pytest.fixture(params=CONFIGS)
def specs(request):
    config = CONFIGS[request.param]
    return [config.spec(role, 32, torch.float32, 0) for role in ("key", "value")]


def stores(specs, written=70, length=96):
    dense = torch.randn(2, 2, length, 32)
    dense[:, :, written:] = 0
    return [PackedKV.from_dense(spec, dense, written) for spec in specs]


def write_attend_args(specs, query, tokens, positions, stores, mask=None, length=96):
    key, value = stores
    return (
        query, tokens, tokens, positions, 0, 0, 96, *key.buffers, *value.buffers, mask, None, 0,
        length, 0.2, False, 0.0, None, None, True, str(specs[0]), str(specs[1]), "auto",
    )  # fmt: skip


def test_write_attend_schema_and_fake(specs):
    query, tokens = torch.randn(2, 4, 3, 32), torch.randn(2, 2, 3, 32)
    mask = torch.arange(96)[None, :] <= torch.arange(70, 73)[:, None]
    args = write_attend_args(specs, query, tokens, torch.arange(70, 73), stores(specs), mask)
    torch.library.opcheck(torch.ops.hqmq.write_attend.default, args)


def test_write_and_append_schema_and_fake(specs):
    store, tokens = stores(specs)[0], torch.randn(2, 2, 3, 32)
    torch.library.opcheck(
        torch.ops.hqmq.write.default,
        (tokens, torch.arange(70, 73), 0, 0, 96, *store.buffers, None, str(specs[0]), "auto"),
    )
    torch.library.opcheck(
        torch.ops.hqmq.append.default,
        (tokens, 0, *store.buffers, None, str(specs[0]), "auto"),
    )


def test_attend_and_dequantize_schema_and_fake(specs):
    key, value = stores(specs)
    query = torch.randn(2, 4, 1, 32)
    torch.library.opcheck(
        torch.ops.hqmq.attend.default,
        (
            query, *key.buffers, *value.buffers, None, None, 0, 70, 0.2, False, 0.0,
            str(specs[0]), str(specs[1]), "auto",
        ),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.hqmq.dequantize.default, (*key.buffers, 70, str(specs[0])))


def test_ops_equal_each_other(specs):
    """Writing, then attending, is what the fused op does for a call no longer than the window."""
    if specs[0].window == 0:
        pytest.skip("exact attention to the call's own tokens is not two ops")
    query, tokens, positions = (
        torch.randn(2, 4, 3, 32),
        torch.randn(2, 2, 3, 32),
        torch.arange(70, 73),
    )
    dense = stores(specs)
    fused, parts = [[s.clone() for s in dense] for _ in range(2)]
    mask = torch.arange(96)[None, :] <= positions[:, None]
    out = torch.ops.hqmq.write_attend(
        *write_attend_args(specs, query, tokens, positions, fused, mask)
    )
    for store, spec in zip(parts, specs, strict=True):
        torch.ops.hqmq.write(tokens, positions, 0, 0, 96, *store.buffers, None, str(spec), "auto")
    want = torch.ops.hqmq.attend(
        query, *parts[0].buffers, *parts[1].buffers, mask, None, 0, 96, 0.2, False, 0.0,
        str(specs[0]), str(specs[1]), "auto",
    )  # fmt: skip
    assert torch.equal(out, want)
    for a, b in zip(fused, parts, strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())


def test_triton_asked_for_where_it_cannot_run_says_so_once(specs, caplog, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    from hqmq_compile.kernels import launch

    if launch.why_not(torch.device("cpu"), specs[0]) is None:
        pytest.skip("the Triton interpreter is on")
    ops._log_once.cache_clear()
    store = stores(specs)[0]
    for _ in range(2):
        torch.ops.hqmq.write(
            torch.randn(2, 2, 1, 32), None, 70, 0, 96, *store.buffers, None, str(specs[0]), "triton"
        )
    lines = [r for r in caplog.records if "falling back to the plain torch ops" in r.getMessage()]
    assert len(lines) == 1


def test_inductor_clones_no_cache(specs):
    """Two calls in one graph, on the same buffers: the compiled code has no copy of any of them."""
    from torch._inductor.utils import run_and_get_code

    query, tokens = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 1, 32)
    both = stores(specs)
    expect = [s.clone() for s in both]
    texts = [str(spec) for spec in specs]

    def step(query, tokens, positions, *buffers):
        first, second = buffers[:8], buffers[8:]
        rest = (None, None, 0, 96, 0.2, False, 0.0, None, None, True, *texts, "auto")
        out = torch.ops.hqmq.write_attend(
            query, tokens, tokens, positions, 0, 0, 96, *first, *second, *rest
        )
        return torch.ops.hqmq.write_attend(
            query + out, tokens, tokens, positions + 1, 0, 0, 96, *first, *second, *rest
        )

    buffers = [*both[0].buffers, *both[1].buffers]
    out, code = run_and_get_code(
        torch.compile(step, fullgraph=True), query, tokens, torch.tensor([70]), *buffers
    )
    want = step(query, tokens, torch.tensor([70]), *expect[0].buffers, *expect[1].buffers)
    torch.testing.assert_close(out, want)
    for a, b in zip(both, expect, strict=True):
        assert torch.equal(a.dequantize(), b.dequantize())
    text = "\n".join(code)
    assert text.count("torch.ops.hqmq.write_attend.default(") == 2
    rows = both[0].buffers.codes.shape[2]
    allocations = [ln for ln in text.splitlines() if "empty_strided" in ln and f", {rows}, " in ln]
    assert not allocations, allocations
