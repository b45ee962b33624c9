"""Caches written by hand, as strangers write them: plain torch, and nothing of hqmq.

Each style is one attention (or a few) with its cache. `function` is what is compiled; `drive` calls it as
a user's loop does, and keeps what it gets back; `expected` says what must come out, given the keys and
values `[B, H, L, D]` that attention may see. The older styles of `tests/hand_written.py` stand in
`styles_known.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.hand_written import BATCH, DIM, HEADS, QUERY_HEADS, ROOM, attend, split

Pair = tuple[Tensor, Tensor]


class Style:
    """One attention and its cache.

    By default a cache `[B, H, ROOM, D]` for keys and one for values; subclasses change what they
    need.

    Attributes:
        layers: pairs of keys and values; `function` takes so many inputs.
        attentions: that read them.
        attention: how they are written down.
        kind: of cache, for the table.
        dtype: of the cache.
        calls: number of tokens of each call.
        origin: slot of the first token.
    """

    layers: ClassVar[int] = 1
    attentions: ClassVar[int] = 1
    attention: ClassVar[str] = "sdpa"
    kind: ClassVar[str] = "out of place"
    dtype: ClassVar[torch.dtype] = torch.float32
    calls: ClassVar[tuple[int, ...]] = (37, 1, 1, 1, 11, 1, 1)
    origin: ClassVar[int] = 0

    def __init__(self) -> None:
        shape = (BATCH, HEADS, ROOM, DIM)
        self.keys, self.values = (torch.zeros(shape, dtype=self.dtype) for _ in range(2))

    @property
    def target(self) -> Callable:
        """What is compiled."""
        return self.function

    def drive(self, run: Callable, inputs: Sequence[Tensor], position: int) -> Tensor:
        """One call of `run`, which is `target` or compiled from it; `inputs` has one `x` a layer."""
        raise NotImplementedError

    @property
    def caches(self) -> list[Pair]:
        """Keys and values of each layer, where the user finds them."""
        return [(self.keys, self.values)]

    def writes(self, position: int) -> bool:
        """Whether the call at `position` writes the cache."""
        return True

    def cached(self, key: Tensor, value: Tensor) -> Pair:
        """What the cache keeps of the keys and values of an input."""
        return key.to(self.dtype), value.to(self.dtype)

    def expected(self, queries: list[Tensor], seen: list[Pair], position: int) -> Tensor:
        """What `drive` returns for these queries `[B, Hq, n, D]`."""
        stop = position + queries[0].shape[2]
        outs = [
            attend(q, k[:, :, :stop].to(q.dtype), v[:, :, :stop].to(q.dtype), position)
            for q, (k, v) in zip(queries, seen, strict=True)
        ]
        return torch.stack(outs).sum(0)


def slots_of(x: Tensor, position: int) -> Tensor:
    return torch.arange(position, position + x.shape[1])


def visible(slots: Tensor, length: int) -> Tensor:
    """Causal mask `[n, length]`."""
    return torch.arange(length)[None] <= slots[:, None]


def masked(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    mask = visible(slots, keys.shape[2])
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


# -- out of place: the cache that comes out is another tensor than the one that went in ----------
class _Functional(Style):
    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, slots)
        return out


class IndexCopied(_Functional):
    """`cache = cache.index_copy(2, slots, new)`."""

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        keys, values = keys.index_copy(2, slots, key), values.index_copy(2, slots, value)
        return masked(query, keys, values, slots), keys, values


class Scattered(_Functional):
    """`cache = cache.scatter(2, index, new)`, as ports from JAX have it."""

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        index = slots[None, None, :, None].expand_as(key)
        keys, values = keys.scatter(2, index, key), values.scatter(2, index, value)
        return masked(query, keys, values, slots), keys, values


class Where(_Functional):
    """`where(slot == position, new, cache)` in steps; a prompt goes token by token."""

    calls = (1, 1, 1, 1, *(1 for _ in range(30)))

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        here = (torch.arange(keys.shape[2]) == slots)[None, None, :, None]
        keys, values = torch.where(here, key, keys), torch.where(here, value, values)
        return masked(query, keys, values, slots), keys, values


class SliceScattered(Style):
    """`torch.slice_scatter` at an int position."""

    @staticmethod
    def function(x, keys, values, start: int):
        query, key, value = split(x)
        stop = start + key.shape[2]
        keys = torch.slice_scatter(keys, key, 2, start, stop)
        values = torch.slice_scatter(values, value, 2, start, stop)
        slots = torch.arange(start, stop)
        return masked(query, keys, values, slots), keys, values

    def drive(self, run, inputs, position):
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, position)
        return out


# -- parts of a larger tensor --------------------------------------------------------------------
class _Slab(Style):
    kind = "slab"

    def __init__(self) -> None:
        self.cache = torch.zeros(2, BATCH, HEADS, ROOM, DIM)

    @property
    def caches(self):
        return [(self.cache, self.cache)]

    def drive(self, run, inputs, position):
        return run(inputs[0], self.cache, slots_of(inputs[0], position))


class KeysAndValuesInOne(_Slab):
    """`cache[0]` are the keys and `cache[1]` the values of one `[2, B, H, L, D]`."""

    @staticmethod
    def function(x, cache, slots):
        query, key, value = split(x)
        cache[0][:, :, slots] = key
        cache[1][:, :, slots] = value
        return masked(query, cache[0], cache[1], slots)


class WrittenTogether(_Slab):
    """Keys and values stacked and written by one assignment."""

    @staticmethod
    def function(x, cache, slots):
        query, key, value = split(x)
        cache[:, :, :, slots] = torch.stack((key, value))
        keys, values = cache.unbind(0)
        return masked(query, keys, values, slots)


class AllLayersInOne(Style):
    """`[layers, B, H, L, D]`, a layer of it at a time."""

    layers, attentions, kind = 2, 2, "slab"

    def __init__(self) -> None:
        shape = (2, BATCH, HEADS, ROOM, DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    @property
    def caches(self):
        return [(self.keys, self.values)] * 2

    @staticmethod
    def function(xs, keys, values, slots):
        out = 0
        for layer, x in enumerate(xs):
            query, key, value = split(x)
            keys[layer].index_copy_(2, slots, key)
            values[layer].index_copy_(2, slots, value)
            out = out + masked(query, keys[layer], values[layer], slots)
        return out

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        return run(tuple(inputs), self.keys, self.values, slots)


# -- other layouts -------------------------------------------------------------------------------
class SlotsBeforeHeads(Style):
    """Meta's Llama: `[B, L, H, D]`, written by slice, transposed for attention."""

    kind = "[B, L, H, D]"

    def __init__(self) -> None:
        self.keys, self.values = (torch.zeros(BATCH, ROOM, HEADS, DIM) for _ in range(2))

    @staticmethod
    def function(x, cache_k, cache_v, start: int):
        query, key, value = split(x)
        batch, count = x.shape[:2]
        stop = start + count
        cache_k[:batch, start:stop] = key.transpose(1, 2)
        cache_v[:batch, start:stop] = value.transpose(1, 2)
        keys = cache_k[:batch, :stop].transpose(1, 2)
        values = cache_v[:batch, :stop].transpose(1, 2)
        return masked(query, keys, values, torch.arange(start, stop))

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, position)


class SlotsBeforeHeadsIndexed(SlotsBeforeHeads):
    """`[B, L, H, D]` at tensor positions, all slots read."""

    @staticmethod
    def function(x, cache_k, cache_v, slots):
        query, key, value = split(x)
        cache_k.index_copy_(1, slots, key.transpose(1, 2))
        cache_v.index_copy_(1, slots, value.transpose(1, 2))
        return masked(query, cache_k.transpose(1, 2), cache_v.transpose(1, 2), slots)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, slots_of(inputs[0], position))


class SlotsBeforeHeadsEinsum(SlotsBeforeHeadsIndexed):
    """`[B, L, H, D]` that grows, and attention by einsum."""

    attention, kind = "einsum", "[B, L, H, D]"

    def __init__(self) -> None:
        self.keys, self.values = (torch.zeros(BATCH, 0, HEADS, DIM) for _ in range(2))

    @staticmethod
    def function(x, past_k, past_v, slots):
        query, key, value = split(x)
        keys = torch.cat((past_k, key.transpose(1, 2)), dim=1)
        values = torch.cat((past_v, value.transpose(1, 2)), dim=1)
        groups = QUERY_HEADS // HEADS
        keys_all, values_all = (t.repeat_interleave(groups, dim=2) for t in (keys, values))
        scores = torch.einsum("bhqd,bkhd->bhqk", query, keys_all) / DIM**0.5
        scores = scores.masked_fill(~visible(slots, keys.shape[1]), float("-inf"))
        return torch.einsum("bhqk,bkhd->bhqd", scores.softmax(-1), values_all), keys, values

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, slots)
        return out


class KeysTransposed(Style):
    """Keys `[B, H, D, L]`, ready for the product, and growing along the last dim."""

    attention, kind = "eager", "[B, H, D, L]"

    def __init__(self) -> None:
        self.keys = torch.zeros(BATCH, HEADS, DIM, 0)
        self.values = torch.zeros(BATCH, HEADS, 0, DIM)

    @staticmethod
    def function(x, past_k, past_v, slots):
        query, key, value = split(x)
        keys = torch.cat((past_k, key.transpose(2, 3)), dim=3)
        values = torch.cat((past_v, value), dim=2)
        groups = QUERY_HEADS // HEADS
        scores = query @ keys.repeat_interleave(groups, 1) * DIM**-0.5
        scores = scores.masked_fill(~visible(slots, keys.shape[3]), float("-inf"))
        return scores.softmax(-1) @ values.repeat_interleave(groups, 1), keys, values

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, slots)
        return out
