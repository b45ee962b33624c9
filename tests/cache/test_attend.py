"""Reference attention over packed caches against plain attention over what they read as."""

from __future__ import annotations

import math

import pytest
import torch

from hqmq_compile.cache import attend as attention
from hqmq_compile.cache.attend import Fresh, attend
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.codec.spec import CacheSpec
from hqmq_compile.kernels import cpu
from hqmq_compile.kernels.cpu_tile import read_tile

KEY = CacheSpec("key", 32, "float32", med3x=3.0, center="block", window=16, block=16, sink_tokens=2)
VALUE = KEY.replace(role="value", med3x=0.0, center="none", head_dim=16)
LENGTH, HEADS, GROUP = 150, 2, 3
needs_compiler = pytest.mark.skipif(cpu.why_not(KEY) is not None, reason="no C++ compiler")


def stores(length: int = LENGTH) -> tuple[PackedKV, PackedKV]:
    key = PackedKV.from_dense(KEY, torch.randn(2, HEADS, length, 32))
    value = PackedKV.from_dense(VALUE, torch.randn(2, HEADS, length, 16))
    return key, value


def plain(query, key, value, scale, mask=None, causal=False, softcap=0.0, sinks=None):
    """Attention as the formula says, in float64."""
    key, value = (t.double().repeat_interleave(GROUP, 1) for t in (key, value))
    logits = query.double() @ key.transpose(-1, -2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
    if causal:
        hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(hidden, -math.inf)
    if sinks is not None:
        extra = sinks.double().view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return torch.nan_to_num(weights) @ value


def causal_mask(n: int, length: int) -> torch.Tensor:
    return torch.arange(length)[None, :] <= torch.arange(length - n, length)[:, None]


CASES = {
    "plain": {},
    "bool mask": {"mask": "bool"},
    "additive mask": {"mask": "additive"},
    "causal": {"causal": True},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "everything": {"mask": "bool", "softcap": 2.0, "sinks": True},
}


@pytest.mark.parametrize("fused", [None, pytest.param(read_tile, marks=needs_compiler)])
@pytest.mark.parametrize("tile", [16, 64, 1024])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("case", CASES)
def test_attend_matches_formula(case, n, tile, fused, monkeypatch):
    monkeypatch.setattr(attention, "TILE", tile * 2 * HEADS * 32)
    options = dict(CASES[case])
    key, value = stores()
    query = torch.randn(2, HEADS * GROUP, n, 32)
    if "mask" in options:
        mask = causal_mask(n, LENGTH).expand(2, 1, n, LENGTH).clone()
        mask[1, :, :, :40] = False  # left padding of one row
        additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        options["mask"] = mask if options["mask"] == "bool" else additive
    if "sinks" in options:
        options["sinks"] = torch.randn(HEADS * GROUP)
    caches = (KEY, key.buffers, VALUE, value.buffers)
    out = attend(query, *caches, 0, LENGTH, scale=0.2, fused=fused, **options)
    want = plain(query, key.dequantize(), value.dequantize(), 0.2, **options)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_slots_read_are_the_slots_asked_for():
    key, value = stores()
    query = torch.randn(2, HEADS * GROUP, 1, 32)
    out = attend(query, KEY, key.buffers, VALUE, value.buffers, 33, 50, scale=0.2)
    k, v = (s.dequantize()[:, :, 33:83] for s in (key, value))
    torch.testing.assert_close(out.double(), plain(query, k, v, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("slot", [0, 100])
def test_tokens_of_this_call_are_exact(slot, softcap):
    key, value = stores()
    new_key, new_value = torch.randn(2, HEADS, 50, 32), torch.randn(2, HEADS, 50, 16)
    query = torch.randn(2, HEADS * GROUP, 50, 32)
    mask = torch.arange(LENGTH)[None, :] <= torch.arange(slot, slot + 50)[:, None]
    out = attend(
        query, KEY, key.buffers, VALUE, value.buffers, 0, LENGTH, scale=0.2, mask=mask,
        softcap=softcap, fresh=Fresh(new_key, new_value, slot),
    )  # fmt: skip
    k, v = key.dequantize(), value.dequantize()
    k[:, :, slot : slot + 50], v[:, :, slot : slot + 50] = new_key, new_value
    want = plain(query, k, v, 0.2, mask=mask, softcap=softcap)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("minimum", [False, True], ids=["bool", "finfo.min"])
def test_rows_that_see_nothing(minimum):
    """A bool mask gives zeros; the lowest float gives softmax's uniform weights."""
    key, value = stores()
    query = torch.randn(2, HEADS * GROUP, 2, 32)
    mask = torch.ones(2, LENGTH, dtype=torch.bool)
    mask[0] = False
    if minimum:
        mask = torch.zeros(2, LENGTH).masked_fill(~mask, torch.finfo(torch.float32).min)
    out = attend(query, KEY, key.buffers, VALUE, value.buffers, 0, LENGTH, scale=0.2, mask=mask)
    want = value.dequantize().mean(2).repeat_interleave(GROUP, 1) if minimum else torch.zeros(())
    torch.testing.assert_close(out[:, :, 0], want.expand_as(out[:, :, 0]), rtol=1e-4, atol=1e-5)
    assert out[:, :, 1].abs().min() > 0


def test_hidden_tiles_are_not_read(monkeypatch):
    monkeypatch.setattr(attention, "TILE", 16 * 2 * HEADS * 32)
    key, value = stores()
    read, original = [], attention.read_slots

    def spy(spec, buffers, first, last, state=None):
        read.append((first, last))
        return original(spec, buffers, first, last, state)

    monkeypatch.setattr(attention, "read_slots", spy)
    mask = torch.zeros(1, LENGTH, dtype=torch.bool)
    mask[:, 40:44] = True
    query = torch.randn(2, HEADS * GROUP, 1, 32)
    attend(query, KEY, key.buffers, VALUE, value.buffers, 0, LENGTH, scale=0.2, mask=mask)
    assert set(read) == {(40, 44)}
