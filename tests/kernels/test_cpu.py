"""The C++ kernel of the CPU against decoding by the reference codec."""

from __future__ import annotations

import pytest
import torch

from hqmq_compile.cache.attend import attend
from hqmq_compile.cache.buffers import PACKED, START
from hqmq_compile.cache.read import read_slots
from hqmq_compile.kernels import cpu
from hqmq_compile.kernels.cpu_tile import PackedTile, read_tile

from ..configs import CONFIGS
from .kernel_cases import SPECS, filled, small

pytestmark = pytest.mark.skipif(
    cpu.why_not(SPECS["key"]) is not None, reason="no C++ compiler on this machine"
)
CASES = {f"{name}-{role}": config.spec(role, 64, torch.bfloat16, 0)
         for name, config in CONFIGS.items() for role in ("key", "value")}  # fmt: skip
CASES |= {name: small(name) for name in SPECS} | {
    "odd-chunks": small("key", head_dim=12),
    "27 bits": small("key", head_dim=20, secondary=100_000, radius_bits=4, codebook="haar"),
    "rows of half": small("key", dtype="float16", outliers="16bit"),
}


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).norm() <= 2e-6 * expected.norm()


@pytest.mark.parametrize("rows", [1, 3, 11])
@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_decoded_tokens(name, rows):
    spec = CASES[name]
    buffers = filled(spec, batch=2, heads=3, slots=200, writes=((0, 90), (90, 1), (91, 50)))
    state = buffers.state.tolist()
    for first, last in ((0, 141), (5, 130), (state[PACKED] - 20, 141), (16, 17)):
        tile = read_tile(spec, buffers, first, last, state)
        assert isinstance(tile, PackedTile)
        tokens = read_slots(spec, buffers, first, last, state)
        query = torch.randn(2, 3, rows, spec.head_dim)
        assert_same(tile.scores(query), query @ tokens.mT)
        weights = torch.rand(2, 3, rows, last - first)
        weights[:, :, 0, 0] = 0.0  # a token that some rows do not see
        weights[0, 1, :, -1] = 0.0  # and one that none does
        assert_same(tile.weighted_sum(weights), weights @ tokens)


@pytest.mark.parametrize("name", ["key", "value", "odd-row"])
def test_a_window_that_wrapped_around(name):
    spec = small(name)
    writes = [(0, 60), *((60, 1) for _ in range(90))]
    buffers = filled(spec, slots=61, writes=writes, keep=60)
    state = buffers.state.tolist()
    first, last = state[START], state[START] + 60
    assert last > buffers.capacity > 60
    tokens = read_slots(spec, buffers, first, last, state)
    tile = read_tile(spec, buffers, first, last, state)
    query = torch.randn(1, 2, 4, spec.head_dim)
    assert_same(tile.scores(query), query @ tokens.mT)
    weights = torch.rand(1, 2, 4, 60)
    assert_same(tile.weighted_sum(weights), weights @ tokens)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads):
    key, value = small("key"), small("value", head_dim=128)
    caches = [
        filled(spec, batch=2, heads=2, slots=300, writes=((0, 257),)) for spec in (key, value)
    ]
    query = torch.randn(2, 6, 1, 128)
    mask = (torch.rand(2, 1, 1, 257) < 0.7).index_fill(3, torch.arange(100, 180), False)
    inputs = (query, key, caches[0], value, caches[1], 0, 257)
    expected = attend(*inputs, scale=0.1, mask=mask)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(attend(*inputs, scale=0.1, mask=mask, fused=read_tile), expected)
    finally:
        torch.set_num_threads(before)


def test_empty_tokens_read_as_zeros():
    spec = small("key", sink_tokens=0)
    tokens = torch.randn(1, 2, 80, 128)
    tokens[:, :, 10:20] = 0.0
    buffers = filled(spec, slots=100, writes=())
    from hqmq_compile.cache.write import write

    write(spec, buffers, tokens, 0)
    tile = read_tile(spec, buffers, 0, 48, buffers.state.tolist())
    scores = tile.scores(torch.randn(1, 2, 1, 128))
    assert not scores[..., 10:20].any() and scores[..., 20:].all()


def test_a_machine_without_a_compiler_says_so(monkeypatch):
    def missing(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpu, "_compile", missing)
    monkeypatch.setattr(cpu, "FLAGS", ("-unknown",))  # so that it is not built yet
    cpu._library.cache_clear()
    cpu._build_problem.cache_clear()
    try:
        assert "no compiler" in cpu._build_problem()
    finally:
        monkeypatch.undo()
        cpu._library.cache_clear()
        cpu._build_problem.cache_clear()


def test_the_library_is_built_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    cpu._library.cache_clear()
    try:
        cpu._library()
        (built,) = (tmp_path / "hqmq").iterdir()
        stamp = built.stat().st_mtime_ns
        cpu._library.cache_clear()
        cpu._library()
        assert built.stat().st_mtime_ns == stamp
    finally:
        cpu._library.cache_clear()
