"""What the entry points refuse, and with which words."""

import sys

import pytest
import torch

from hqmq_compile.cache.buffers import Buffers
from hqmq_compile.kernels import launch, served
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
    served._interpreted.cache_clear()
    launch.why_not.cache_clear()
    assert "not installed" in launch.why_not(torch.device("cuda"), small("value"))
    served._interpreted.cache_clear()
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


def test_launches_where_the_tensors_are(monkeypatch):
    """Triton launches on the current device, which need not be that of a layer."""
    seen = []

    class Guard:
        def __init__(self, tensor):
            seen.append(tensor)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return False

    monkeypatch.setattr(torch.cuda, "device_of", Guard)
    spec = small("value")
    buffers, tokens, query = filled(spec), random_tokens(spec, 1, 2, 1), torch.randn(1, 2, 1, 64)
    calls = {
        launch.dequantize: (spec, buffers, 1),
        launch.attend: (query, spec, buffers, spec, buffers, 0, 1),
        launch.write: (spec, buffers, tokens),
        launch.write_attend: (query, tokens, tokens, None, 0, 0, 0, buffers, buffers, 0, 1, None,
                              None, True, spec, spec),
        launch.write_read: (spec, buffers, tokens, None, 0, 0, 0, 0, 1, None, True),
    }  # fmt: skip
    monkeypatch.setattr(launch, "why_not", lambda *_: "here it ends")
    for entry, args in calls.items():
        options = {"scale": 1.0} if entry in (launch.attend, launch.write_attend) else {}
        with pytest.raises(NotImplementedError, match="here it ends"):
            entry(*args, **options)
    assert len(seen) == len(calls)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_while_the_first_is_current():
    spec = small("value")
    tokens, query = random_tokens(spec, 1, 2, 100), torch.randn(1, 2, 1, 64)
    outs = []
    for current in (0, 1):
        with torch.cuda.device(current):
            buffers = copy_to(filled(spec, slots=128), "cuda:1")
            launch.write(spec, buffers, tokens.to("cuda:1"))
            out = launch.attend(query.to("cuda:1"), spec, buffers, spec, buffers, 0, 100, scale=1.0)
            outs.append((*buffers, out, launch.dequantize(spec, buffers, 100)))
            torch.cuda.synchronize("cuda:1")
    for one, other in zip(*outs, strict=True):
        assert torch.equal(one, other)
