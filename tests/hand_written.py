"""One attention with its cache, in the ways in which people write it, and what it must return.

Keys and values come from the test and not from a model: they are the same, bit by bit, for the compiled
function and for the oracle. So what is stored is compared exactly, and no codeword can flip.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.cache_utils import StaticSlidingWindowLayer

from hqmq_compile import HQMQConfig
from hqmq_compile.backend import hqmq
from tests.compare import error
from tests.oracle import Past

ROOM = 128
WINDOW = 24  # of sliding attention
BATCH, HEADS, QUERY_HEADS, DIM = 2, 2, 4, 16


def attend(query, keys, values, position, first=0, window=ROOM) -> Tensor:
    """Causal attention of tokens at slots position.. to the `window` newest of slots first.. ."""
    slots = torch.arange(query.shape[2]) + position
    seen = torch.arange(keys.shape[2]) + first
    mask = (seen[None] <= slots[:, None]) & (seen[None] > slots[:, None] - window)
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


def split(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[B, heads, n, D]` out of `[B, n, all heads * D]`, as a model has them."""
    sizes = [QUERY_HEADS * DIM, HEADS * DIM, HEADS * DIM]
    parts = x.split(sizes, dim=-1)
    return tuple(part.unflatten(-1, (-1, DIM)).transpose(1, 2) for part in parts)


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The inverse of `split`."""
    return torch.cat([part.transpose(1, 2).flatten(2) for part in (query, key, value)], dim=-1)


# -- growing: the caller keeps what it gets back ------------------------------------------------
def concatenated(x, keys, values):
    """transformers' DynamicCache."""
    query, key, value = split(x)
    keys, values = torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)
    return attend(query, keys, values, keys.shape[2] - key.shape[2]), keys, values


def nano(x, past):
    """nanoGPT with a cache: a tuple that is None at first, eager attention, a triangle as mask."""
    query, key, value = split(x)
    if past is not None:
        key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
    present = (key, value)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-2, -1)) * (1.0 / query.shape[-1] ** 0.5)
    total, count = key.shape[2], query.shape[2]
    bias = torch.ones(total, total, dtype=torch.bool).tril()
    scores = scores.masked_fill(~bias[total - count : total], float("-inf"))
    return torch.softmax(scores, dim=-1) @ value, present


def sliding(x, keys, values, position: int):
    """transformers' DynamicSlidingWindowLayer: WINDOW - 1 tokens are kept."""
    query, key, value = split(x)
    first = position - keys.shape[2]
    keys, values = torch.cat([keys, key], dim=-2), torch.cat([values, value], dim=-2)
    out = attend(query, keys, values, position, first, WINDOW)
    return out, keys[:, :, -WINDOW + 1 :, :], values[:, :, -WINDOW + 1 :, :]


def rolling(x, layer: StaticSlidingWindowLayer, position: int):
    """transformers' StaticSlidingWindowLayer itself: it fills up, then rolls."""
    query, key, value = split(x)
    _, first = layer.get_mask_sizes(key.shape[2])
    keys, values = layer.update(key, value)
    return attend(query, keys, values, position, first, WINDOW)


# -- buffers, by position -----------------------------------------------------------------------
def index_copied(x, keys, values, position):
    """transformers' StaticCache."""
    query, key, value = split(x)
    slots = torch.arange(key.shape[2]) + position
    keys.index_copy_(2, slots, key)
    values.index_copy_(2, slots, value)
    return attend(query, keys, values, position)


def sliced(x, keys, values, start: int):
    """A slice at an int position; attention reads the filled part."""
    query, key, value = split(x)
    stop = start + key.shape[2]
    keys[:, :, start:stop] = key
    values[:, :, start:stop] = value
    return attend(query, keys[:, :, :stop], values[:, :, :stop], start)


class GptFast(nn.Module):
    """gpt-fast: buffers of a module, `index_put_` at `input_pos`, rows of a mask buffer."""

    def __init__(self):
        super().__init__()
        shape = (BATCH, HEADS, ROOM, DIM)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))
        self.register_buffer("causal_mask", torch.ones(ROOM, ROOM, dtype=torch.bool).tril())

    def forward(self, x, input_pos):
        query, key, value = split(x)
        mask = self.causal_mask[None, None, input_pos]
        self.k_cache[:, :, input_pos] = key
        self.v_cache[:, :, input_pos] = value
        groups = query.shape[1] // key.shape[1]
        keys = self.k_cache.repeat_interleave(groups, dim=1)
        values = self.v_cache.repeat_interleave(groups, dim=1)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask, dropout_p=0.0)


class TorchTune(nn.Module):
    """torchtune: the buffers know their position, and advance it."""

    def __init__(self):
        super().__init__()
        shape = (BATCH, HEADS, ROOM, DIM)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_pos", torch.arange(ROOM), persistent=False)

    def forward(self, x, mask):
        query, key, value = split(x)
        count = key.shape[2]
        k_out, v_out = self.k_cache, self.v_cache
        k_out[:, :, self.cache_pos[:count]] = key
        v_out[:, :, self.cache_pos[:count]] = value
        self.cache_pos.add_(count)
        shape = (BATCH, HEADS, QUERY_HEADS // HEADS, ROOM, DIM)
        keys = k_out.unsqueeze(2).expand(shape).flatten(1, 2)
        values = v_out.unsqueeze(2).expand(shape).flatten(1, 2)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask[:, None])


class Loop:
    """A user's loop around one compiled attention, with the oracle beside it.

    Args:
        style: a key of `STYLES`.
        config: of hqmq, for both.
        compiled: of another loop of the same style and config, to spare a compilation.
        dtype: of everything.
    """

    def __init__(
        self,
        style: str,
        config: HQMQConfig,
        compiled: Callable | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.style, self.config, self.dtype = style, config, dtype
        self.target = {"gpt-fast": GptFast, "torchtune": TorchTune}.get(style)
        self.target = STYLES[style] if self.target is None else self.target()
        options = {"config": config}
        self.compiled = compiled or torch.compile(self.target, backend=hqmq, options=options)
        self.past = Past(config, slots=ROOM)
        self.generator = torch.Generator().manual_seed(0)
        shape = (BATCH, HEADS, 0 if style in GROWING else ROOM, DIM)
        self.keys, self.values = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
        self.layer = StaticSlidingWindowLayer(ROOM, WINDOW)
        self.tuple = None
        self.length = 0
        # Channels far from zero, as keys have them, and now and then a chunk that is an outlier.
        self.offset = 2 * torch.randn(HEADS, 1, DIM, generator=self.generator)

    def tokens(self, heads: int, count: int, offset=0.0) -> Tensor:
        x = torch.randn(BATCH, heads, count, DIM, generator=self.generator)
        wild = torch.rand(BATCH, heads, count, DIM // 4, generator=self.generator) < 0.04
        return (x * (1 + 7 * wild.repeat_interleave(4, -1)) + offset).to(self.dtype)

    @torch.no_grad()
    def __call__(self, count: int, position: int | None = None) -> float:
        """Write `count` tokens at `position` (None: behind the last); relative error of the output."""
        position = self.length if position is None else position
        query = self.tokens(QUERY_HEADS, count)
        key, value = self.tokens(HEADS, count, self.offset), self.tokens(HEADS, count)
        actual = self.run(fused(query, key, value), position)
        keys, values = self.past.write(key, value, position)
        self.length = stop = position + count
        window = WINDOW if self.style in SLIDING else ROOM
        seen = (keys[:, :, :stop], values[:, :, :stop])
        expected = attend(query, *seen, position, window=window)
        return error(actual, expected)

    def run(self, x, position: int) -> Tensor:
        if self.style == "cat":
            out, self.keys, self.values = self.compiled(x, self.keys, self.values)
            return out
        if self.style == "sliding":
            out, self.keys, self.values = self.compiled(x, self.keys, self.values, position)
            return out
        if self.style == "rolling":
            return self.compiled(x, self.layer, position)
        if self.style == "tuple":
            out, self.tuple = self.compiled(x, self.tuple)
            return out
        if self.style == "index_copy":
            place = torch.tensor(position)
            return self.compiled(x, self.keys, self.values, place)
        if self.style == "slice":
            return self.compiled(x, self.keys, self.values, position)
        slots = torch.arange(position, position + x.shape[1])
        if self.style == "gpt-fast":
            return self.compiled(x, slots)
        self.target.cache_pos.copy_(torch.arange(ROOM) + position)
        mask = torch.arange(ROOM)[None] <= slots[:, None]
        return self.compiled(x, mask.expand(BATCH, -1, -1))

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Keys and values where the user finds them."""
        if self.style == "tuple":
            return self.tuple
        if self.style == "rolling":
            return self.layer.keys, self.layer.values
        if self.style in ("gpt-fast", "torchtune"):
            return self.target.k_cache, self.target.v_cache
        return self.keys, self.values

    def check_stored(self) -> None:
        """What is stored is what the oracle stores, exactly; and something is packed."""
        for tensor, stored in zip(self.caches, self.past.stored, strict=True):
            assert tensor.is_packed
            first = int(tensor.packed.buffers.state[0])
            assert tensor.packed.packed_slots == max(stored.packed - first, 0)
            assert stored.packed > 0
            actual = tensor.dequantize()
            expected = stored.values[:, :, first : first + actual.shape[2]].to(self.dtype)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


STYLES: dict[str, Callable] = {
    "cat": concatenated,
    "tuple": nano,
    "sliding": sliding,
    "rolling": rolling,
    "index_copy": index_copied,
    "slice": sliced,
    "gpt-fast": GptFast.forward,
    "torchtune": TorchTune.forward,
}
GROWING = ("cat", "tuple", "sliding")
SLIDING = ("sliding", "rolling")
