"""Decode attention, and the scratch path of long queries, over packed caches."""

import math

import pytest
import torch

from hqmq_compile.cache.attend import attend as reference
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import DEVICES, copy_to, filled, immediate, small

SLOTS = 56
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}  # the GPU multiplies in tf32 or tf32x3


def run(
    device, key_spec, value_spec, *, group=2, n=1, batch=1, heads=2, writes=((0, 50),), first=0,
    length=SLOTS, keep=0, dtype=torch.float32, **options,
):  # fmt: skip
    """Compares a call with the reference; returns the result."""
    key = filled(key_spec, batch, heads, SLOTS, writes, keep)
    value = filled(value_spec, batch, heads, SLOTS, writes, keep)
    query = torch.randn(batch, heads * group, n, key_spec.head_dim).to(dtype)
    options = {"scale": key_spec.head_dim**-0.5 / 8} | options
    start = int(key.state[0])
    expected = reference(
        query.float(), key_spec, key, value_spec, value, start + first, length, **options
    )
    moved = {k: v.to(device) if torch.is_tensor(v) else v for k, v in options.items()}
    out = launch.attend(
        query.to(device), key_spec, copy_to(key, device), value_spec, copy_to(value, device),
        first, length, **moved,
    )  # fmt: skip
    assert out.dtype == dtype and out.is_contiguous()
    tolerance = TOLERANCE[device] if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu().float(), expected, rtol=tolerance, atol=tolerance)
    return out.cpu()


PAIRS = [
    ("key", "value"),
    ("odd-dim", "odd-dim"),
    ("odd-row", "value"),
    ("paper", "paper"),
    ("wide", "wide"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_attend_matches_reference(names, device):
    run(device, *(small(name) for name in names))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("group, n", [(1, 1), (3, 5), (8, 16)])
def test_attend_groups_and_queries_matches_reference(group, n, device):
    run(device, small("value"), small("value"), group=group, n=n, batch=2, heads=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [3, 20])
def test_attend_causal_matches_reference(n, device):
    run(device, small("value"), small("value"), n=n, heads=1, causal=True)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_window_of_slots_matches_reference(device):
    run(device, small("odd-dim"), small("value"), first=9, length=37, n=2, heads=1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [2, 17])
@pytest.mark.parametrize("shape", ["full", "row", "head"])
def test_attend_bool_mask_matches_reference(shape, n, device):
    sizes = {"full": (2, 2, n, SLOTS), "row": (1, 1, 1, SLOTS), "head": (2, 1, n, SLOTS)}[shape]
    mask = torch.rand(sizes) > 0.5
    mask[..., :33] = False  # whole tiles that nobody sees
    mask[..., 40] = True
    run(device, small("value"), small("value"), n=n, batch=2, heads=1, mask=mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [2, 17])
def test_attend_strided_mask_matches_reference(n, device):
    mask = (torch.rand(SLOTS + 3, 1, n, 2) > 0.3).permute(3, 1, 2, 0)[..., 2:-1]
    mask[..., 40] = True
    run(device, small("value"), small("value"), n=n, batch=2, heads=1, mask=mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [2, 17])
@pytest.mark.parametrize("hidden", [-math.inf, torch.finfo(torch.float32).min])
def test_attend_added_mask_matches_reference(hidden, n, device):
    mask = torch.randn(1, 2, n, SLOTS)
    mask[..., :20] = hidden
    run(device, small("value"), small("value"), n=n, heads=1, mask=mask)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [3, 18])
def test_attend_hidden_rows_are_zero(n, device):
    mask = torch.ones(1, 1, n, SLOTS, dtype=torch.bool)
    mask[:, :, 1] = False
    out = run(device, small("value"), small("value"), n=n, heads=1, mask=mask)
    assert (out[:, :, 1] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [2, 17])
def test_attend_softcap_and_sinks_matches_reference(n, device):
    sinks = torch.tensor([1.0, -2.0])
    run(device, small("odd-dim"), small("value"), n=n, heads=1, softcap=4.0, sinks=sinks)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_sinks_of_hidden_rows_matches_reference(device):
    mask = torch.zeros(1, 1, 1, SLOTS, dtype=torch.bool)
    run(device, small("value"), small("value"), heads=1, mask=mask, sinks=torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("device", DEVICES)
def test_attend_after_rewind_matches_reference(device):
    spec = small("odd-dim")
    run(device, spec, small("value"), heads=1, writes=((0, 55), (20, 2)), length=50)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_sliding_matches_reference(device):
    spec = small("value")
    run(device, spec, spec, heads=1, writes=((0, 40), (40, 1), (40, 1)), keep=40, length=40)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_immediate_matches_reference(device):
    run(device, immediate("odd-dim"), immediate("paper"), writes=((0, 30), (30, 1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["float16", pytest.param("bfloat16", marks=pytest.mark.gpu)])
def test_attend_half_precision_matches_reference(name, device):
    if device == "cpu" and name == "bfloat16":
        pytest.skip("the interpreter truncates bfloat16")
    dtype = getattr(torch, name)
    key, value = small("key", dtype=name), small("value", dtype=name)
    run(device, key, value, heads=1, dtype=dtype)
    run(device, key, value, heads=1, dtype=dtype, n=17)


@pytest.mark.parametrize("device", DEVICES)
def test_attend_strided_query_matches_reference(device):
    spec = small("value")
    cache = filled(spec, 1, 2, SLOTS)
    query = torch.randn(1, 3, 4, 64).transpose(1, 2)
    expected = reference(query, spec, cache, spec, cache, 0, 40, scale=0.1)
    moved = copy_to(cache, device)
    out = launch.attend(
        query.contiguous().to(device).transpose(1, 2).contiguous().transpose(1, 2),
        spec, moved, spec, moved, 0, 40, scale=0.1,
    )  # fmt: skip
    tolerance = TOLERANCE[device]
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
