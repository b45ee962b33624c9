"""Caches in other layouts than `[B, H, L, D]`, in the ways in which people store them.

As in `hand_written.py`, one attention with its cache and the oracle beside it. Each style keeps its own
tensors; `views` are its keys and values as `[B, H, L, D]`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from tests.hand_written import BATCH, DIM, HEADS, QUERY_HEADS, ROOM, Loop, attend, split

GROUPS = QUERY_HEADS // HEADS


def by_slot(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, n, heads, D]`."""
    return tuple(part.transpose(1, 2) for part in split(x))


class Style(nn.Module):
    """One attention with caches of a layout."""

    def args(self, x: Tensor, position: int) -> tuple:
        """Arguments of a call that writes at `position`."""
        return x, position

    def tensors(self) -> list[Tensor]:
        """The tensors that the user keeps."""
        return list(self.buffers())

    def views(self, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Llama(Style):
    """Meta's llama: `[B, L, H, D]`, a slice at an int position, repeated heads, eager attention."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cache_k", torch.zeros(BATCH, ROOM, HEADS, DIM))
        self.register_buffer("cache_v", torch.zeros(BATCH, ROOM, HEADS, DIM))

    def forward(self, x, start_pos: int):
        query, key, value = by_slot(x)
        bsz, seqlen = key.shape[:2]
        self.cache_k[:bsz, start_pos : start_pos + seqlen] = key
        self.cache_v[:bsz, start_pos : start_pos + seqlen] = value
        keys, values = (
            cache[:bsz, : start_pos + seqlen][:, :, :, None, :]
            .expand(bsz, start_pos + seqlen, HEADS, GROUPS, DIM)
            .reshape(bsz, start_pos + seqlen, QUERY_HEADS, DIM)
            .transpose(1, 2)
            for cache in (self.cache_k, self.cache_v)
        )
        mask = torch.full((seqlen, seqlen), float("-inf")).triu(diagonal=1)
        mask = torch.hstack([torch.zeros((seqlen, start_pos)), mask])
        scores = query.transpose(1, 2) @ keys.transpose(2, 3) / DIM**0.5
        return torch.softmax((scores + mask).float(), dim=-1).type_as(query) @ values

    def views(self, tensors):
        return tuple(t.transpose(1, 2) for t in tensors)


class Positions(Llama):
    """`[B, L, H, D]`, written at tensor positions with `index_copy_`, read whole by SDPA."""

    def forward(self, x, slots):
        query, key, value = by_slot(x)
        self.cache_k.index_copy_(1, slots, key)
        self.cache_v.index_copy_(1, slots, value)
        keys = self.cache_k.repeat_interleave(GROUPS, dim=2).transpose(1, 2)
        values = self.cache_v.repeat_interleave(GROUPS, dim=2).transpose(1, 2)
        mask = torch.arange(ROOM) <= slots[:, None]
        return scaled_dot_product_attention(query.transpose(1, 2), keys, values, attn_mask=mask)

    def args(self, x, position):
        return x, torch.arange(position, position + x.shape[1])


class SlotMajor(Positions):
    """`[L, B, H, D]`, as fairseq and Megatron have it, an indexed assignment."""

    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("cache_k", torch.zeros(ROOM, BATCH, HEADS, DIM))
        self.register_buffer("cache_v", torch.zeros(ROOM, BATCH, HEADS, DIM))

    def forward(self, x, slots):
        query, key, value = by_slot(x)
        self.cache_k[slots] = key.transpose(0, 1)
        self.cache_v[slots] = value.transpose(0, 1)
        keys, values = self.cache_k.permute(1, 2, 0, 3), self.cache_v.permute(1, 2, 0, 3)
        mask = torch.arange(ROOM) <= slots[:, None]
        query = query.transpose(1, 2)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def views(self, tensors):
        return tuple(t.permute(1, 2, 0, 3) for t in tensors)


class GrownBySlot(Style):
    """`[B, L, H, D]` that grows, a tuple that is None at first."""

    past = None

    def forward(self, x, past):
        query, key, value = by_slot(x)
        if past is not None:
            key, value = torch.cat([past[0], key], dim=1), torch.cat([past[1], value], dim=1)
        present = (key, value)
        keys, values = key.transpose(1, 2), value.transpose(1, 2)
        return attend(query.transpose(1, 2), keys, values, key.shape[1] - x.shape[1]), present

    def args(self, x, position):
        return x, self.past

    def tensors(self):
        return list(self.past)

    def views(self, tensors):
        return tuple(t.transpose(1, 2) for t in tensors)


# -- slabs -----------------------------------------------------------------------------------------
class Slab(Style):
    """Keys and values in one buffer `[2, B, H, L, D]`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kv", torch.zeros(2, BATCH, HEADS, ROOM, DIM))

    def forward(self, x, start: int):
        query, key, value = split(x)
        stop = start + key.shape[2]
        self.kv[0, :, :, start:stop] = key
        self.kv[1][:, :, start:stop] = value
        return attend(query, self.kv[0, :, :, :stop], self.kv[1, :, :, :stop], start)

    def views(self, tensors):
        return tensors[0][0], tensors[0][1]


class Stacked(Style):
    """All layers in one buffer `[layers, 2, B, H, L, D]`, at tensor positions. Layers are alike here."""

    layers = 3

    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(self.layers, 2, BATCH, HEADS, ROOM, DIM))

    def forward(self, x, slots):
        query, key, value = split(x)
        mask = torch.arange(ROOM) <= slots[:, None]
        total = 0
        for layer in range(self.layers):
            keys, values = self.cache[layer].unbind(0)
            keys[:, :, slots] = key
            values.index_copy_(2, slots, value)
            keys, values = (t.repeat_interleave(GROUPS, 1) for t in (keys, values))
            total = total + scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        return total / self.layers

    def args(self, x, position):
        return x, torch.arange(position, position + x.shape[1])

    def views(self, tensors):
        (cache,) = tensors
        assert torch.equal(cache[0], cache[-1])
        return cache[1, 0], cache[1, 1]


class TwoStacks(Stacked):
    """`[layers, B, H, L, D]` of keys, and one of values."""

    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("keys", torch.zeros(self.layers, BATCH, HEADS, ROOM, DIM))
        self.register_buffer("values", torch.zeros(self.layers, BATCH, HEADS, ROOM, DIM))

    def forward(self, x, start: int):
        query, key, value = split(x)
        total = 0
        for layer in range(self.layers):
            keys, values = self.keys[layer], self.values[layer]
            stop = start + key.shape[2]
            keys[:, :, start:stop], values[:, :, start:stop] = key, value
            total = total + attend(query, keys[:, :, :stop], values[:, :, :stop], start)
        return total / self.layers

    def args(self, x, position):
        return x, position

    def views(self, tensors):
        return tensors[0][2], tensors[1][0]


class FlashAttention(Style):
    """flash-attn's inference cache: `[B, L, 2, H, D]`, keys and values written at once."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kv_cache", torch.zeros(BATCH, ROOM, 2, HEADS, DIM))

    def forward(self, x, start: int):
        query, key, value = by_slot(x)
        kv = torch.stack([key, value], dim=2)
        stop = start + kv.shape[1]
        self.kv_cache[: kv.shape[0], start:stop, ...] = kv
        keys, values = self.kv_cache[: kv.shape[0], :stop].unbind(dim=2)
        return attend(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), start)

    def views(self, tensors):
        return tuple(t.transpose(1, 2) for t in tensors[0].unbind(2))


LAYOUTS: dict[str, Callable] = {
    "llama": Llama,
    "positions": Positions,
    "slot-major": SlotMajor,
    "grown": GrownBySlot,
    "slab": Slab,
    "stacked": Stacked,
    "two stacks": TwoStacks,
    "flash-attn": FlashAttention,
}


class LayoutLoop(Loop):
    """As `Loop`, of a style of `LAYOUTS`."""

    def __init__(
        self, style: str, config: HQMQConfig, dtype: torch.dtype = torch.float32, **options
    ):
        super().__init__("slice", config, compiled=lambda: None, dtype=dtype)
        self.target = LAYOUTS[style]().to(dtype)
        backend = {"backend": hqmq, "options": {"config": config}}
        self.compiled = torch.compile(self.target, **backend, **options)

    def run(self, x: Tensor, position: int) -> Tensor:
        out = self.compiled(*self.target.args(x, position))
        if isinstance(out, tuple):
            out, self.target.past = out
        return out

    def check_stored(self) -> None:
        """Everything is packed, and what is stored is what the oracle stores, exactly."""
        tensors = self.target.tensors()
        for tensor in tensors:
            assert tensor.is_packed
            for part in tensor.packed.parts:
                assert part.packed_slots == self.past.stored[0].packed > 0
        views = self.target.views([t.dequantize() for t in tensors])
        for actual, stored in zip(views, self.past.stored, strict=True):
            expected = stored.values[:, :, : actual.shape[2]].to(self.dtype)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
