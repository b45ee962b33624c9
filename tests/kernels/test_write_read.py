"""The write that returns its cache dense, and the fused call where several attentions read one cache."""

import pytest
import torch

from hqmq_compile import ops  # noqa: F401  registers torch.ops.hqmq
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import (
    DEVICES,
    assert_same_cache,
    copy_to,
    empty,
    random_tokens,
    small,
)

SLOTS = 64
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("keep", [0, 12])
def test_write_read(keep, exact, device):
    """Longer than the window, one token, and up to what the window holds."""
    spec = small("odd-dim")
    expected = empty(spec, 2, 2, SLOTS)
    got = copy_to(expected, device)
    past = 0
    for i, count in enumerate((21, 1, 3, 9)):
        tokens = random_tokens(spec, 2, 2, count, i)
        length = past + count
        want = torch.ops.hqmq.write_read(
            tokens, None, past, keep, 0, *expected, 0, length, None, exact, str(spec), "torch"
        )
        out = launch.write_read(
            spec, got, tokens.to(device), None, past, keep, 0, 0, length, None, exact
        )
        torch.testing.assert_close(out.cpu(), want, rtol=TOLERANCE[device], atol=TOLERANCE[device])
        past = min(length, keep) if keep else length
        assert_same_cache(spec, expected, got, past)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", [0, 12])
def test_three_readers(keep, device):
    """Each sees the same slots, the cache is written once."""
    specs = small("odd-dim"), small("value")
    expected = [empty(s, 1, 1, SLOTS) for s in specs]
    got = [copy_to(b, device) for b in expected]
    past = 0
    for i, count in enumerate((21, 1, 1, 9)):
        key, value = (random_tokens(s, 1, 1, count, 10 * j + i) for j, s in enumerate(specs))
        query = torch.randn(1, 2, count, specs[0].head_dim)
        length = past + count
        mask = torch.arange(length) <= past + torch.arange(count)[:, None]
        for turn in ((True, False), (False, False), (False, True)):
            want = torch.ops.hqmq.write_attend(
                query, key, value, None, past, keep, 0, *expected[0], *expected[1], mask, None,
                0, length, 0.02, False, 0.0, None, None, True, *map(str, specs), "torch", *turn,
            )  # fmt: skip
            out = launch.write_attend(
                query.to(device), key.to(device), value.to(device), None, past, keep, 0, *got,
                0, length, None, None, True, *specs, scale=0.02, mask=mask.to(device),
                opens=turn[0], closes=turn[1],
            )  # fmt: skip
            torch.testing.assert_close(
                out.cpu(), want, rtol=TOLERANCE[device], atol=TOLERANCE[device]
            )
            query = query + 0.1
        past = min(length, keep) if keep else length
        for spec, a, b in zip(specs, expected, got, strict=True):
            assert_same_cache(spec, a, b, past)
