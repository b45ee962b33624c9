"""The dense tensor of a packed cache."""

import pytest
import torch

from hqmq_compile.cache.buffers import allocate
from hqmq_compile.cache.read import dequantize
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import (
    CUDA,
    DEVICES,
    SPECS,
    copy_to,
    filled,
    immediate,
    random_tokens,
    small,
)


def check(spec, buffers, slots, device):
    out = launch.dequantize(spec, copy_to(buffers, device), slots)
    torch.testing.assert_close(out.cpu(), dequantize(spec, buffers, slots), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SPECS)
def test_dequantize_matches_reference(name, device):
    spec = small(name)
    check(spec, filled(spec, slots=56), 56, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["odd-dim", "paper"])
def test_dequantize_immediate_matches_reference(name, device):
    spec = immediate(name)
    check(spec, filled(spec, slots=40, writes=((0, 20), (20, 1))), 40, device)


@pytest.mark.parametrize("device", DEVICES)
def test_dequantize_after_rewind_matches_reference(device):
    spec = small("odd-dim")
    buffers = filled(spec, heads=1, slots=80, writes=((0, 70), (21, 3)))
    check(spec, buffers, 80, device)  # leftovers of the longer sequence are read as packed


@pytest.mark.parametrize("device", DEVICES)
def test_dequantize_sliding_matches_reference(device):
    spec = small("value")
    buffers = filled(spec, slots=48, writes=((0, 60), (48, 13)), keep=48)
    assert int(buffers.state[0]) == 25
    check(spec, buffers, 48, device)


@pytest.mark.parametrize("device", DEVICES)
def test_dequantize_into_matches_reference(device):
    spec = small("value", dtype="float16")
    buffers = filled(spec, batch=2, heads=1)
    out = torch.empty(2, 1, 40, 64, device=device)
    assert launch.dequantize(spec, copy_to(buffers, device), 40, out) is out
    expected = dequantize(spec, buffers, 40).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", [CUDA])
def test_dequantize_int64_offsets(device):
    spec = SPECS["value"].replace(window=64, sink_tokens=4)
    heads = 5  # the last one's rows begin beyond byte 2^31
    blocks = 2**31 // (spec.row_bytes * spec.block * (heads - 1)) + 1
    buffers = allocate(spec, 1, heads, blocks, device)
    tokens = random_tokens(spec, 1, heads, 1000)
    launch.write(spec, buffers, tokens.to(device))
    expected = filled(spec, heads=heads, slots=1024, writes=((0, 1000),))
    out = launch.dequantize(spec, buffers, 1000).cpu()
    error = (out - dequantize(spec, expected, 1000)).abs().unflatten(-1, (-1, 4)).amax(-1)
    assert (error > 1e-2).float().mean() < 1e-3  # chunks between two codewords
