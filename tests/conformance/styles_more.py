"""More caches written by hand: paged, shifted, cast, shared, cross-attention, latents, lists."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tests.conformance.styles import Style, masked, slots_of, visible
from tests.hand_written import BATCH, DIM, HEADS, QUERY_HEADS, ROOM, WINDOW, split

PAGE = 16
SOURCE = 37


class Paged(Style):
    """A pool of pages, written through a block table and gathered through it."""

    kind = "paged"

    def __init__(self) -> None:
        pages = ROOM // PAGE
        shape = (BATCH * pages, PAGE, HEADS, DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        order = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(0))
        self.table = order.view(BATCH, pages)

    @staticmethod
    def function(x, pool_k, pool_v, table, slots):
        query, key, value = split(x)
        page, place = table[:, slots // PAGE], (slots % PAGE).expand(x.shape[0], -1)
        pool_k[page, place] = key.transpose(1, 2)
        pool_v[page, place] = value.transpose(1, 2)
        keys = pool_k[table].flatten(1, 2).transpose(1, 2)
        values = pool_v[table].flatten(1, 2).transpose(1, 2)
        return masked(query, keys, values, slots)

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        return run(inputs[0], self.keys, self.values, self.table, slots)


class Shifted(Style):
    """A window of fixed length: `cache.copy_(cat((cache[:, :, n:], new)))`, empty slots in front."""

    kind, origin = "shifted window", WINDOW
    calls = (5, 1, 1, 9, 1, 1, 13, *(1 for _ in range(12)))

    def __init__(self) -> None:
        shape = (BATCH, HEADS, WINDOW, DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        count = key.shape[2]
        keys.copy_(torch.cat((keys[:, :, count:], key), dim=2))
        values.copy_(torch.cat((values[:, :, count:], value), dim=2))
        held = torch.arange(WINDOW) + slots[-1] + 1 - WINDOW
        mask = (held[None] <= slots[:, None]) & (held[None] >= 0)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, slots_of(inputs[0], position))

    def expected(self, queries, seen, position):
        first = position + queries[0].shape[2]
        keys, values = (t[:, :, first : first + WINDOW] for t in seen[0])
        slots = torch.arange(queries[0].shape[2]) + position + WINDOW
        held = torch.arange(WINDOW) + first
        mask = (held[None] <= slots[:, None]) & (held[None] >= WINDOW)
        return scaled_dot_product_attention(
            queries[0], keys, values, attn_mask=mask, enable_gqa=True
        )


class CastOnRead(Style):
    """A float16 cache under a float32 model."""

    kind, dtype = "cast on read", torch.float16

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        keys.index_copy_(2, slots, key.to(keys.dtype))
        values.index_copy_(2, slots, value.to(values.dtype))
        return masked(query, keys.to(query.dtype), values.to(query.dtype), slots)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, slots_of(inputs[0], position))


class Shared(Style):
    """Two attentions read what one layer wrote, as in Gemma 3n and in YOCO."""

    kind, attentions = "shared", 2

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        out = masked(query, keys, values, slots)
        return out + masked(query.flip(1), keys, values, slots)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, slots_of(inputs[0], position))

    def expected(self, queries, seen, position):
        query = queries[0]
        both = [super(Shared, self).expected([q], seen, position) for q in (query, query.flip(1))]
        return both[0] + both[1]


class SharedGrowing(Shared):
    """The same with a cache that grows."""

    def __init__(self) -> None:
        self.keys, self.values = (torch.zeros(BATCH, HEADS, 0, DIM) for _ in range(2))

    @staticmethod
    def function(x, keys, values, slots):
        query, key, value = split(x)
        keys, values = torch.cat((keys, key), 2), torch.cat((values, value), 2)
        out = masked(query, keys, values, slots)
        return out + masked(query.flip(1), keys, values, slots), keys, values

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, slots)
        return out


class CrossAttention(Style):
    """Keys and values of a source, written by the first call and only read by the others."""

    kind = "cross-attention"
    calls = (SOURCE, 1, 1, 5, 1)

    def __init__(self) -> None:
        shape = (BATCH, HEADS, SOURCE, DIM)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.is_written = False

    @staticmethod
    def function(x, keys, values, is_written: bool):
        query, key, value = split(x)
        if not is_written:
            keys.copy_(key)
            values.copy_(value)
        return scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    def drive(self, run, inputs, position):
        out = run(inputs[0], self.keys, self.values, self.is_written)
        self.is_written = True
        return out

    def writes(self, position):
        return position == 0

    def expected(self, queries, seen, position):
        keys, values = (t[:, :, :SOURCE] for t in seen[0])
        return scaled_dot_product_attention(queries[0], keys, values, enable_gqa=True)


class Latent(Style):
    """DeepSeek: a latent and a rotated key are cached; keys and values are projected from it."""

    kind = "latent (MLA)"
    RANK = HEADS * DIM

    def __init__(self) -> None:
        self.keys = torch.zeros(BATCH, 1, 0, self.RANK)
        self.values = torch.zeros(BATCH, 1, 0, DIM)
        generator = torch.Generator().manual_seed(0)
        shape = (QUERY_HEADS * 2 * DIM, self.RANK)
        self.up = torch.randn(shape, generator=generator) * self.RANK**-0.5

    @staticmethod
    def function(x, latents, rotated, up, slots):
        query, key, value = split(x)
        latents = torch.cat((latents, key.transpose(1, 2).flatten(2)[:, None]), dim=2)
        rotated = torch.cat((rotated, value[:, :1]), dim=2)
        return Latent.attend(query, latents, rotated, up, slots), latents, rotated

    @staticmethod
    def attend(query, latents, rotated, up, slots):
        both = nn.functional.linear(latents[:, 0], up)
        both = both.unflatten(-1, (QUERY_HEADS, 2 * DIM)).transpose(1, 2)
        keys, values = both.split(DIM, dim=-1)
        keys = torch.cat((keys, rotated.expand(-1, QUERY_HEADS, -1, -1)), dim=-1)
        query = torch.cat((query, query.flip(1)), dim=-1)
        mask = visible(slots, keys.shape[2])
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

    def drive(self, run, inputs, position):
        slots = slots_of(inputs[0], position)
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, self.up, slots)
        return out

    def cached(self, key, value):
        return key.transpose(1, 2).flatten(2)[:, None], value[:, :1]

    def expected(self, queries, seen, position):
        slots = torch.arange(queries[0].shape[2]) + position
        stop = position + queries[0].shape[2]
        latents, rotated = (t[:, :, :stop] for t in seen[0])
        return self.attend(queries[0], latents, rotated, self.up, slots)


class _Cache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shape = (BATCH, HEADS, ROOM, DIM)
        self.register_buffer("k", torch.zeros(shape), persistent=False)
        self.register_buffer("v", torch.zeros(shape), persistent=False)

    def update(self, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self.k.index_copy_(2, slots, key)
        self.v.index_copy_(2, slots, value)
        return self.k, self.v


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cache = _Cache()

    def forward(self, x, slots):
        query, key, value = split(x)
        return masked(query, *self.cache.update(slots, key, value), slots)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(), _Block()])

    def forward(self, xs, slots):
        return sum(layer(x, slots) for layer, x in zip(self.layers, xs, strict=True))


class ModuleList(Style):
    """Caches as modules of their own in a list of layers."""

    kind, layers, attentions = "buffers", 2, 2

    def __init__(self) -> None:
        self.model = _Model()

    @property
    def target(self):
        return self.model

    @property
    def caches(self):
        return [(layer.cache.k, layer.cache.v) for layer in self.model.layers]

    def drive(self, run, inputs, position):
        return run(tuple(inputs), slots_of(inputs[0], position))


class TupleOfTuples(Style):
    """`past_key_values` of old: a tuple of (keys, values), grown by every call."""

    kind, attention, layers, attentions = "growing", "eager", 2, 2

    def __init__(self) -> None:
        self.past = None

    @property
    def caches(self):
        return list(self.past)

    @staticmethod
    def function(xs, past, slots):
        presents, out = [], 0
        for layer, x in enumerate(xs):
            query, key, value = split(x)
            if past is not None:
                key = torch.cat((past[layer][0], key), dim=-2)
                value = torch.cat((past[layer][1], value), dim=-2)
            presents.append((key, value))
            scores = query @ key.repeat_interleave(2, 1).transpose(-1, -2)
            scores = scores / DIM**0.5 + torch.where(visible(slots, key.shape[2]), 0.0, -1e9)
            out = out + scores.softmax(-1) @ value.repeat_interleave(2, 1)
        return out, tuple(presents)

    def drive(self, run, inputs, position):
        out, self.past = run(tuple(inputs), self.past, slots_of(inputs[0], position))
        return out


class KeysBesideValues(Style):
    """FlashAttention's layout of both in one: `[B, L, 2, H, D]`."""

    kind = "slab"

    def __init__(self) -> None:
        self.cache = torch.zeros(BATCH, ROOM, 2, HEADS, DIM)

    @property
    def caches(self):
        return [(self.cache, self.cache)]

    @staticmethod
    def function(x, cache, start: int):
        query, key, value = split(x)
        stop = start + x.shape[1]
        cache[:, start:stop] = torch.stack((key.transpose(1, 2), value.transpose(1, 2)), dim=2)
        keys, values = cache[:, :stop].unbind(2)
        slots = torch.arange(start, stop)
        return masked(query, keys.transpose(1, 2), values.transpose(1, 2), slots)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.cache, position)
