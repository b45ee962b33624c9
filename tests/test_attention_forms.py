"""Every spelling of attention over a packed cache gives what the spelling itself gives on the oracle's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, softmax

import hqmq_compile
from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from tests import hand_written
from tests.compare import TYPICAL, cheap, error
from tests.configs import CONFIGS
from tests.hand_written import Loop, split
from tests.oracle import Past

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]
BATCH, HEADS, QUERY_HEADS, DIM, ROOM = 2, 2, 4, 16, 96
SCALE = DIM**-0.5
LOW = torch.finfo(torch.float32).min


def repeated(x):
    """Key-value heads for all query heads, as transformers' `repeat_kv`."""
    batch, heads, length, dim = x.shape
    groups = QUERY_HEADS // heads
    x = x[:, :, None, :, :].expand(batch, heads, groups, length, dim)
    return x.reshape(batch, heads * groups, length, dim)


# In each: query [B, 4, n, D], keys and values [B, 2, L, D], visible bool [n, L], extras a tensor [4].
def gqa(query, keys, values, visible, extras):
    return scaled_dot_product_attention(query, keys, values, attn_mask=visible, enable_gqa=True)


def scaled(query, keys, values, visible, extras):
    keys, values = repeated(keys), repeated(values)
    return scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=0.37)


def additive(query, keys, values, visible, extras):
    mask = torch.where(visible, 0.0, LOW)[None, None]
    return scaled_dot_product_attention(query, repeated(keys), repeated(values), attn_mask=mask)


def alibi(query, keys, values, visible, extras):
    places = torch.arange(keys.shape[2])
    mask = torch.where(visible, extras.view(1, 4, 1, 1) * 0.05 * places, float("-inf"))
    return scaled_dot_product_attention(query, repeated(keys), repeated(values), attn_mask=mask)


def eager(query, keys, values, visible, extras):
    """transformers' `eager_attention_forward`."""
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = scores + torch.where(visible, 0.0, LOW)
    weights = softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, repeated(values))


def divided(query, keys, values, visible, extras):
    scores = query @ repeated(keys).transpose(-1, -2) / DIM**0.5
    scores = scores.masked_fill(~visible, float("-inf"))
    return softmax(scores, -1) @ repeated(values)


def query_scaled(query, keys, values, visible, extras):
    scores = (query * SCALE) @ repeated(keys).transpose(-1, -2)
    scores = torch.where(visible, scores, LOW)
    return softmax(scores, -1) @ repeated(values)


def capped(query, keys, values, visible, extras):
    """Gemma 2."""
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = torch.tanh(scores / 5.0) * 5.0
    scores = scores + torch.where(visible, 0.0, LOW)
    return torch.matmul(softmax(scores, dim=-1), repeated(values))


def biased(query, keys, values, visible, extras):
    """A position bias, then a causal mask."""
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = scores + extras.view(1, 4, 1, 1) * 0.05 * torch.arange(keys.shape[2])
    scores = scores + torch.where(visible, 0.0, LOW)
    return torch.matmul(softmax(scores, dim=-1), repeated(values))


def biased_and_filled(query, keys, values, visible, extras):
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = scores.masked_fill(~visible, float("-inf"))
    scores = scores + extras.view(1, 4, 1, 1) * 0.05 * torch.arange(keys.shape[2])
    return torch.matmul(softmax(scores, dim=-1), repeated(values))


def filled_twice(query, keys, values, visible, extras):
    """A causal mask, and every fourth key left out."""
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = torch.where(visible, scores, LOW)
    some = (torch.arange(keys.shape[2]) % 4 == 3)[None, None, None]
    scores = scores.masked_fill(some, LOW)
    return torch.matmul(softmax(scores, dim=-1), repeated(values))


def with_sinks(query, keys, values, visible, extras):
    """gpt-oss."""
    scores = torch.matmul(query, repeated(keys).transpose(2, 3)) * SCALE
    scores = scores + torch.where(visible, 0.0, LOW)
    sinks = extras.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined = torch.cat([scores, sinks], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    weights = softmax(combined, dim=-1, dtype=combined.dtype)[..., :-1]
    return torch.matmul(weights, repeated(values))


def einsum(query, keys, values, visible, extras):
    scores = torch.einsum("bhqd,bhkd->bhqk", query, repeated(keys)) * SCALE
    scores = scores.masked_fill(visible.logical_not(), LOW)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), repeated(values))


def baddbmm(query, keys, values, visible, extras):
    """Bloom."""
    batch, heads, count, dim = query.shape
    bias = (extras.view(1, 4, 1, 1) * 0.05 * torch.arange(keys.shape[2])).expand(
        batch, 4, 1, keys.shape[2]
    )
    flat = (t.reshape(batch * heads, -1, dim) for t in (query, repeated(keys), repeated(values)))
    query, keys, values = flat
    scores = torch.baddbmm(
        bias.reshape(batch * heads, 1, -1), query, keys.transpose(1, 2), beta=1.0, alpha=SCALE
    )
    scores = scores.view(batch, heads, count, -1) + torch.where(visible, 0.0, LOW)
    weights = softmax(scores, dim=-1, dtype=torch.float32).view(batch * heads, count, -1)
    return torch.bmm(weights, values).view(batch, heads, count, dim)


FORMS = [gqa, scaled, additive, alibi, eager, divided, query_scaled, capped, with_sinks]
FORMS += [biased, biased_and_filled, filled_twice]
LATER = [einsum, baddbmm]  # found, and reported as not rewritten yet


def cached(form):
    def run(x, keys, values, place, extras):
        query, key, value = split(x)
        slots = torch.arange(key.shape[2]) + place
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        visible = torch.arange(keys.shape[2])[None] <= slots[:, None]
        return form(query, keys, values, visible, extras)

    return run


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_form(form):
    config = CONFIGS["8"]
    function = cached(form)
    run = torch.compile(function, backend=hqmq, options={"config": config})
    keys, values = (torch.zeros(BATCH, HEADS, ROOM, DIM) for _ in range(2))
    past, start = Past(config, slots=ROOM), 0
    extras = torch.tensor([1.0, -0.5, 2.0, 0.25])
    with torch.no_grad():
        for count in (37, 1, 1, 5, 20, 1):
            x = 2 * torch.randn(BATCH, count, 8 * DIM)
            query, key, value = split(x)
            actual = run(x, keys, values, torch.tensor(start), extras)
            seen = past.write(key, value, start)
            slots = torch.arange(count) + start
            visible = torch.arange(ROOM)[None] <= slots[:, None]
            assert error(actual, form(query, *seen, visible, extras)) <= TYPICAL
            start += count
        report = hqmq_compile.explain(function, x, keys, values, torch.tensor(start), extras)
    assert keys.is_packed and values.is_packed, str(report)
    assert keys.packed.packed_slots == past.stored[0].packed > 0


@pytest.mark.parametrize("form", LATER, ids=lambda form: form.__name__)
def test_form_that_is_not_rewritten(form):
    """The cache is packed, attention reads it dense, and the report says why."""
    function = cached(form)
    config = HQMQConfig(window=ROOM)  # loses nothing; `test_readers.py` compares what is lost
    run = torch.compile(function, backend=hqmq, options={"config": config})
    mine, theirs = ([torch.zeros(BATCH, HEADS, ROOM, DIM) for _ in range(2)] for _ in range(2))
    extras = torch.tensor([1.0, -0.5, 2.0, 0.25])
    with torch.no_grad():
        for place, count in ((0, 37), (37, 1)):
            x = torch.randn(BATCH, count, 8 * DIM)
            actual = run(x, *mine, torch.tensor(place), extras)
            expected = function(x, *theirs, torch.tensor(place), extras)
            assert error(actual, expected) <= TYPICAL
        report = hqmq_compile.explain(function, x, *mine, torch.tensor(38), extras)
    (attention,) = report.attentions
    assert attention.rewritten and f"{form.__name__} attention" in attention.dense
    assert mine[0].is_packed and report.complete


@pytest.mark.parametrize(
    "batch, heads, query_heads, dim",
    [
        (1, 1, 4, 16),  # multi-query
        (2, 4, 4, 16),  # multi-head
        (1, 3, 9, 64),  # SmolLM2
        (1, 1, 2, 80),
        (1, 1, 2, 96),
        (2, 1, 1, 128),
        (1, 1, 2, 192),
        (1, 1, 2, 256),
        (1, 2, 2, 4),  # one chunk
        (3, 1, 1, 12),
    ],
)
def test_shape(monkeypatch, batch, heads, query_heads, dim):
    sizes = {"BATCH": batch, "HEADS": heads, "QUERY_HEADS": query_heads, "DIM": dim}
    for name, size in sizes.items():
        monkeypatch.setattr(hand_written, name, size)
    for style in ("cat", "index_copy"):
        loop = Loop(style, CONFIGS["16"])
        assert max(loop(37), loop(1), loop(11), loop(1)) <= TYPICAL
        loop.check_stored()


def test_values_narrower_than_keys():
    """As in DeepSeek before it is compressed: head dimensions 24 and 16."""
    config = CONFIGS["16"]

    def function(query, key, value, keys, values, place):
        slots = torch.arange(key.shape[2]) + place
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        visible = torch.arange(keys.shape[2])[None] <= slots[:, None]
        return scaled_dot_product_attention(query, keys, values, attn_mask=visible)

    run = torch.compile(function, backend=hqmq, options={"config": config})
    keys, values = torch.zeros(1, 2, ROOM, 24), torch.zeros(1, 2, ROOM, 16)
    past, start = Past(config, slots=ROOM), 0
    with torch.no_grad():
        for count in (37, 1, 1):
            query, key = torch.randn(1, 2, count, 24), torch.randn(1, 2, count, 24)
            value = torch.randn(1, 2, count, 16)
            actual = run(query, key, value, keys, values, torch.tensor(start))
            seen = past.write(key, value, start)
            visible = torch.arange(ROOM)[None] <= (torch.arange(count) + start)[:, None]
            expected = scaled_dot_product_attention(query, *seen, attn_mask=visible)
            assert error(actual, expected) <= TYPICAL
            start += count
    assert keys.is_packed and values.is_packed
