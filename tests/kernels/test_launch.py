"""What the entry points refuse, and with which words."""

import sys

import pytest
import torch

from hqmq_compile.cache.buffers import Buffers
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import DEVICES, copy_to, filled, random_tokens, small


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rotate": True}, "rotate"),
        ({"dtype": "float64"}, "float64"),
        ({"block": 24}, "block=24"),
        ({"head_dim": 512}, "512"),
        ({"window": 0, "center": "block"}, "center"),
        ({"window": 0, "med3x": 3.0}, "int8x4"),
        ({"med3x": 3.0, "med3x_scope": "batch"}, "batch"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_why_not_names_the_reason(changes, words, device):
    assert launch.why_not(torch.device(device), small("value")) is None
    spec = small("value", **changes)
    assert words in launch.why_not(torch.device(device), spec)
    with pytest.raises(NotImplementedError, match=words):
        launch._check_spec(torch.device(device), spec)


def test_why_not_without_triton(monkeypatch):
    for name in ("triton", "triton.runtime.interpreter"):
        monkeypatch.setitem(sys.modules, name, None)
    launch._interpreted.cache_clear()
    launch.why_not.cache_clear()
    assert "not installed" in launch.why_not(torch.device("cuda"), small("value"))
    launch._interpreted.cache_clear()
    launch.why_not.cache_clear()


def test_why_not_knows_other_devices():
    assert "meta" in launch.why_not(torch.device("meta"), small("value"))


@pytest.mark.parametrize("device", DEVICES)
def test_write_rejects_invalid_shapes(device):
    spec = small("value")
    buffers = copy_to(filled(spec), device)
    tokens = random_tokens(spec, 1, 2, 3).to(device)
    with pytest.raises(ValueError, match="do not fit"):
        launch.write(spec, buffers, tokens[:, :1])
    with pytest.raises(ValueError, match="do not fit"):
        launch.write(spec, buffers, tokens[..., :32])
    with pytest.raises(IndexError, match="3 tokens were written at 2"):
        launch.write(spec, buffers, tokens, torch.arange(2, device=device))
    with pytest.raises(ValueError, match="not of the spec"):
        launch.write(small("odd-dim"), buffers, tokens)
    swapped = Buffers(buffers.codes.transpose(2, 3).contiguous().transpose(2, 3), *buffers[1:])
    with pytest.raises(ValueError, match="contiguous"):
        launch.write(spec, swapped, tokens)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_rejects_invalid_shapes(device):
    spec = small("value")
    buffers = copy_to(filled(spec), device)
    query = torch.randn(1, 3, 1, 64, device=device)
    with pytest.raises(ValueError, match="query"):
        launch.attend(query, spec, buffers, spec, buffers, 0, 40, scale=1.0)
    query = torch.randn(1, 2, 1, 64, device=device)
    mask = torch.zeros(1, 1, 1, 40, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="mask"):
        launch.attend(query, spec, buffers, spec, buffers, 0, 40, scale=1.0, mask=mask)


@pytest.mark.parametrize("device", DEVICES)
def test_no_slots_give_zeros(device):
    spec = small("value")
    buffers = copy_to(filled(spec), device)
    query = torch.randn(1, 2, 1, 64, device=device)
    assert (launch.attend(query, spec, buffers, spec, buffers, 0, 0, scale=1.0) == 0).all()
    launch.write(spec, buffers, random_tokens(spec, 1, 2, 0).to(device))
    assert launch.dequantize(spec, buffers, 0).shape == (1, 2, 0, 64)
