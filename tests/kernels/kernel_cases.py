"""Caches, tokens and comparisons for the kernel tests.

The reference always runs on the CPU; kernels run on `device` on copies of the same buffers.
"""

import os

import pytest
import torch

from hqmq_compile.cache import write as reference_write
from hqmq_compile.cache.buffers import Buffers
from hqmq_compile.cache.read import read_slots
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.codec.spec import CacheSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CPU = pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="no interpreter"))
CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
DEVICES = [CPU, CUDA]

# Words of 8 to 17 bits, every plane width, odd rows, head dimensions that are no powers of two.
SPECS = {
    "key": CacheSpec("key", 128, secondary=170, med3x=3.0, center="block"),
    "value": CacheSpec("value", 64, secondary=42, radius_bits=3),
    "odd-dim": CacheSpec("key", 80, secondary=21, radius_bits=3, med3x=2.0, center="block"),
    "odd-row": CacheSpec("key", 96, secondary=341, med3x=3.0, outliers="16bit"),
    "paper": CacheSpec(
        "key", 32, secondary=7, radius_bits=3, codebook="haar", scale="float16",
        least_squares=False, zero_level=True, med3x=2.0, outliers="16bit", outlier_flag="bit",
    ),
    "wide": CacheSpec("key", 256, secondary=10, radius_bits=2, med3x=3.0, center="block"),
}  # fmt: skip
SMALL = {"window": 16, "block": 16, "sink_tokens": 4, "dtype": "float32"}


def small(name: str, **changes) -> CacheSpec:
    """One of SPECS with a small window, so that little data packs."""
    return SPECS[name].replace(**SMALL | changes)


def immediate(name: str, **changes) -> CacheSpec:
    """One of SPECS that packs at once."""
    spec = small(name, window=0, outliers="16bit")
    center = "first" if spec.center == "block" else spec.center
    return spec.replace(center=center, **changes)


def random_tokens(spec: CacheSpec, batch: int, heads: int, count: int, seed: int = 0):
    """`[B, H, count, D]` in the dtype of the cache, with a mean and with outliers."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    x = torch.randn(batch, heads, count, spec.head_dim, generator=generator)
    loud = torch.randn(spec.head_dim, generator=torch.Generator().manual_seed(1)).exp()
    shift = 2 * torch.randn(spec.head_dim, generator=torch.Generator().manual_seed(2))
    return (x * loud + shift).to(spec.torch_dtype)


def empty(spec: CacheSpec, batch: int, heads: int, slots: int) -> Buffers:
    return PackedKV.empty(spec, batch, heads, slots).buffers


def filled(spec: CacheSpec, batch=1, heads=2, slots=64, writes=((0, 40),), keep=0) -> Buffers:
    """Buffers on the CPU after `writes`, (logical slot, count) each, by the reference."""
    buffers = empty(spec, batch, heads, slots)
    for i, (start, count) in enumerate(writes):
        tokens = random_tokens(spec, batch, heads, count, i)
        reference_write.write(spec, buffers, tokens, start, keep)
    return buffers


def copy_to(buffers: Buffers, device: str) -> Buffers:
    return Buffers(*(t.to(device, copy=True) for t in buffers))


def assert_same_cache(spec: CacheSpec, expected: Buffers, got: Buffers, slots: int) -> None:
    """The same state, and the same content of `slots` slots from START on.

    Codes may differ where a chunk lies between two codewords: less than one word in a thousand.
    """
    got = copy_to(got, "cpu")
    assert got.state.tolist() == expected.state.tolist()
    start = int(expected.state[0])
    want = read_slots(spec, expected, start, start + slots)
    have = read_slots(spec, got, start, start + slots)
    chunks = lambda x: x.unflatten(-1, (-1, 4))  # noqa: E731
    tolerance = 1e-5 * want.abs().max() + 1e-30
    different = ((chunks(want) - chunks(have)).abs() > tolerance).any(-1)
    assert different.float().mean() < 1e-3, f"{int(different.sum())} chunks differ"
    assert (want - have).abs().max() < 0.3 * want.abs().max() + 1e-30
    torch.testing.assert_close(got.sinks, expected.sinks)
    torch.testing.assert_close(got.means, expected.means, rtol=1e-3, atol=1e-3)
