"""Who reads a cache: several attentions, attentions unlike ours, other nodes, nobody.

Stored is the same whoever reads; and every reader sees what the oracle sees, in the same call.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import hqmq_compile
from hqmq_compile import HQMQConfig, HQMQTensor
from hqmq_compile.backend import hqmq
from tests import hand_written
from tests.compare import TYPICAL, cheap, error
from tests.configs import CONFIGS
from tests.hand_written import DIM, HEADS, QUERY_HEADS, SLIDING, WINDOW, Loop, attend, fused, split

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]


# -- readers: (query, keys, values, position, first slot, window) -> [B, Hq, n, D] ----------------
def logits(query, keys, position, first, window):
    slots = torch.arange(query.shape[2]) + position
    seen = torch.arange(keys.shape[2]) + first
    mask = (seen[None] <= slots[:, None]) & (seen[None] > slots[:, None] - window)
    groups = query.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(groups, dim=1)
    scores = query @ keys.transpose(-1, -2) / keys.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -1e9), groups


def twice(query, keys, values, *place):
    return attend(query, keys, values, *place) - attend(2 * query, keys, values, *place)


def thrice(query, keys, values, *place):
    query = attend(query, keys, values, *place)
    query = query + attend(query, keys, values, *place)
    return query + attend(query, keys, values, *place)


def weights_returned(query, keys, values, *place):
    """The weights have another reader."""
    scores, groups = logits(query, keys, *place)
    weights = scores.softmax(-1)
    return weights @ values.repeat_interleave(groups, dim=1) + weights.amax(-1, keepdim=True)


def summed(query, keys, values, *place):
    """The cache has another reader."""
    return attend(query, keys, values, *place) + keys[:, :, :1].sum()


def cast(query, keys, values, *place):
    return attend(query.double(), keys.double(), values.double(), *place).to(query.dtype)


def batched(query, keys, values, *place):
    """Alibi as Bloom has it: `baddbmm`, over heads and batch in one dim."""
    _, groups = logits(query, keys, *place)
    hidden, _ = logits(torch.zeros_like(query), keys, *place)
    keys, values = (t.repeat_interleave(groups, dim=1).flatten(0, 1) for t in (keys, values))
    alibi = 0.01 * torch.arange(keys.shape[1], dtype=query.dtype)
    alibi = alibi.expand(keys.shape[0], 1, -1)
    scores = torch.baddbmm(alibi, query.flatten(0, 1), keys.transpose(1, 2), alpha=0.25)
    weights = (scores + hidden.flatten(0, 1)).softmax(-1)
    return (weights @ values).view(query.shape)


def einsum(query, keys, values, *place):
    hidden, groups = logits(torch.zeros_like(query), keys, *place)
    grouped = query.unflatten(1, (keys.shape[1], groups))
    scores = torch.einsum("bhgqd,bhkd->bhgqk", grouped, keys) + hidden.unflatten(1, (-1, groups))
    return torch.einsum("bhgqk,bhkd->bhgqd", scores.softmax(-1), values).flatten(1, 2)


PACKED = {"twice": twice, "thrice": thrice}
DENSE = {f.__name__: f for f in (weights_returned, summed, cast, batched, einsum)}
READERS = PACKED | DENSE


class ReaderLoop(Loop):
    """`Loop` with another reader than attention, for both sides."""

    def __init__(self, style: str, reader, config: HQMQConfig, monkeypatch):
        monkeypatch.setattr(hand_written, "attend", reader_of(reader))
        self.reader = reader
        super().__init__(style, config)

    @torch.no_grad()
    def __call__(self, count: int) -> float:
        position = self.length
        query = self.tokens(QUERY_HEADS, count)
        key, value = self.tokens(HEADS, count, self.offset), self.tokens(HEADS, count)
        actual = self.run(fused(query, key, value), position)
        keys, values = self.past.write(key, value, position)
        self.length = stop = position + count
        first, window = 0, hand_written.ROOM
        if self.style in SLIDING:
            first, window = max(position - WINDOW + 1, 0), WINDOW
        seen = keys[:, :, first:stop], values[:, :, first:stop]
        return error(actual, self.reader(query, *seen, position, first, window))


def reader_of(reader):
    return lambda q, k, v, position, first=0, window=hand_written.ROOM: reader(
        q, k, v, position, first, window
    )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("style", ["cat", "index_copy", "sliding"])
@pytest.mark.parametrize("which", ["16", "immediate", "stored"])
def test_every_reader(which, style, reader, monkeypatch):
    loop = ReaderLoop(style, READERS[reader], CONFIGS[which], monkeypatch)
    errors = [loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)]
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)
    loop.check_stored()


@pytest.mark.parametrize("reader", READERS)
def test_a_window_longer_than_the_text_loses_nothing(reader, monkeypatch):
    loop = ReaderLoop("index_copy", READERS[reader], HQMQConfig(window=512), monkeypatch)
    generator, dense = loop.generator, [torch.zeros_like(t) for t in (loop.keys, loop.values)]
    for count in (20, 1, 5):
        query, key, value = (
            torch.randn(2, heads, count, DIM, generator=generator)
            for heads in (QUERY_HEADS, HEADS, HEADS)
        )
        x = fused(query, key, value)
        with torch.no_grad():
            actual = loop.run(x, loop.length)
            expected = hand_written.index_copied(x, *dense, torch.tensor(loop.length))
        loop.length += count
        assert error(actual, expected) < 1e-6


@pytest.mark.parametrize("reader", DENSE)
def test_reported_with_the_reason(reader, monkeypatch):
    loop = ReaderLoop("index_copy", DENSE[reader], CONFIGS["16"], monkeypatch)
    x = fused(*(loop.tokens(heads, 1) for heads in (QUERY_HEADS, HEADS, HEADS)))
    report = hqmq_compile.explain(loop.target, x, loop.keys, loop.values, torch.tensor(0))
    assert report.complete and all(a.rewritten and a.dense for a in report.attentions)
    expected = {
        "weights_returned": "attention weights are read",
        "summed": "read by aten.sum",
        "cast": "cast from float32 to float64",
        "batched": "baddbmm attention",
        "einsum": "einsum attention",
    }[reader]
    assert expected in report.attentions[0].dense and expected in str(report)


# -- caches that a graph only reads -----------------------------------------------------------------
class CrossAttention(torch.nn.Module):
    """Keys and values of an encoder: kept at the first call, read in the later ones."""

    def __init__(self):
        super().__init__()
        self.keys = self.values = None

    def forward(self, query, encoded=None):
        if encoded is not None:
            _, self.keys, self.values = split(encoded)
            self.keys, self.values = self.keys.contiguous(), self.values.contiguous()
        return scaled_dot_product_attention(query, self.keys, self.values, enable_gqa=True)


@pytest.mark.parametrize("which", ["16", "immediate"])
def test_cross_attention(which):
    from tests.oracle import Past

    module, past = CrossAttention(), Past(CONFIGS[which], slots=64)
    compiled = torch.compile(module, backend=hqmq, options={"config": CONFIGS[which]})
    encoded = torch.randn(2, 61, (QUERY_HEADS + 2 * HEADS) * DIM)
    with torch.no_grad():
        _, key, value = split(encoded)
        keys, values = past.write(key, value, 0)
        for step in range(4):
            query = torch.randn(2, QUERY_HEADS, 1, DIM)
            actual = compiled(query, encoded) if step == 0 else compiled(query)
            seen = (key, value) if step == 0 else (past.stored[0].values, past.stored[1].values)
            expected = scaled_dot_product_attention(
                query, *(t[:, :, :61] for t in seen), enable_gqa=True
            )
            assert error(actual, expected) <= TYPICAL, step
    assert isinstance(module.keys, HQMQTensor) and module.keys.is_packed
    assert module.keys.packed.packed_slots > 0
    (attention,) = hqmq_compile.explain(module, query).attentions
    assert attention.rewritten and attention.cache == "read only"


def test_an_argument_is_not_taken_for_a_cache():
    """Attention over what the caller passes in, and may use for anything."""

    def plain(query, keys, values):
        return scaled_dot_product_attention(query, keys, values)

    compiled = torch.compile(plain, backend=hqmq)
    tensors = [torch.randn(1, 2, 100, 16) for _ in range(3)]
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tensors), plain(*tensors))
    assert not any(isinstance(t, HQMQTensor) for t in tensors)


def test_written_in_one_graph_and_attended_in_another():
    """The break between update and attention: the second graph reads what the first one packed."""

    def step(x, keys, values):
        query, key, value = split(x)
        keys, values = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
        torch._dynamo.graph_break()
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True), keys, values

    loop = Loop("cat", CONFIGS["16"])
    loop.compiled = torch.compile(step, backend=hqmq, options={"config": CONFIGS["16"]})
    cache = HolderOfKeys(loop, step)
    errors = [cache(count) for count in (37, 1, 1, 1)]
    assert max(errors) <= TYPICAL, errors
    assert isinstance(cache.keys, HQMQTensor) and cache.keys.is_packed


class HolderOfKeys:
    """Attributes called keys and values, as transformers' cache layers have them."""

    def __init__(self, loop: Loop, step):
        self.loop, self.step = loop, step
        self.keys, self.values = loop.keys, loop.values

        def call(holder, x):
            out, holder.keys, holder.values = step(x, holder.keys, holder.values)
            return out

        self.compiled = torch.compile(call, backend=hqmq, options={"config": loop.config})

    @torch.no_grad()
    def __call__(self, count: int) -> float:
        loop = self.loop
        query = loop.tokens(QUERY_HEADS, count)
        key, value = loop.tokens(HEADS, count, loop.offset), loop.tokens(HEADS, count)
        actual = self.compiled(self, fused(query, key, value))
        loop.past.write(key, value, loop.length)
        loop.length += count
        # Attention is in another graph: it sees what is stored, also of the tokens of this call.
        keys, values = (stored.values[:, :, : loop.length] for stored in loop.past.stored)
        return error(actual, scaled_dot_product_attention(query, keys, values, enable_gqa=True))
