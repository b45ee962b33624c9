"""The 16-bit baseline of the benchmarks is right: a wrong baseline would make our speed-ups wrong."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import bf16_split_kv as split_kv
from tests.kernels.kernel_cases import DEVICES

SHAPES = [  # batch, query heads, KV heads, D, slots, plan
    (2, 8, 2, 64, 100, split_kv.Plan(splits=3, tile=16, warps=4, stages=2)),
    (1, 7, 1, 32, 64, split_kv.Plan(splits=2, tile=32, warps=4, stages=3)),
    (1, 40, 2, 16, 33, None),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_sdpa(device, shape, masked):
    batch, query_heads, heads, dim, slots, plan = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query = torch.randn(batch, query_heads, 1, dim, device=device).to(dtype)
    keys, values = torch.randn(2, batch, heads, slots, dim, device=device).to(dtype)
    mask = None
    if masked:
        mask = torch.rand(batch, 1, 1, slots, device=device) > 0.5
        mask[0, ..., : slots // 2] = False  # whole splits are hidden
    got = split_kv.attend(query, keys, values, mask=mask, plan=plan)
    want = scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), mask, enable_gqa=True
    )
    torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("device", DEVICES)
def test_reads_only_the_first_slots(device):
    query, keys = torch.randn(1, 2, 1, 16, device=device), torch.randn(1, 2, 40, 16, device=device)
    values = keys + 1
    got = split_kv.attend(query, keys, values, length=20)
    want = scaled_dot_product_attention(query, keys[:, :, :20], values[:, :, :20])
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pairs, length", [(8, 131072), (64, 131072), (4, 4096), (300, 32768)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_no_plan_has_empty_splits(pairs, length, dim):
    for plan in [
        split_kv.default_plan(pairs, length, dim, 132),
        *split_kv.plans(pairs, length, dim, 132),
    ]:
        span = -(-length // (plan.splits * plan.tile)) * plan.tile
        assert (plan.splits - 1) * span < length <= plan.splits * span
