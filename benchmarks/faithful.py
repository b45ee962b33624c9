"""A whole text through a model in one pass, while every token sees the cache that it would have seen.

Decoding attends, at each step, to what is stored by then: old tokens as they read back, the recent
window and the sinks as they came. What a token's stored form is depends on the tokens of its own block
only, so one forward pass can compute all of it: each layer quantises its keys and values once, and each
query sees, of every older token, the form that was stored at its time. The keys of a layer come from
hidden states that saw quantised keys below, as in decoding.

The rules are those of the product (`design.md`; `tests/oracle.py` states them one call at a time):
of L tokens, the first `block * floor((L - window) / block)` are packed; a call longer than the window
sees its own tokens as they came, unless the config says `prefill="stored"`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hqmq_compile import HQMQConfig
from hqmq_compile.codec.accounting import bits_per_element
from hqmq_compile.codec.codec import decode_blocks, encode_blocks, first_mean, is_outlier
from hqmq_compile.codec.med3x import chunk_norms
from hqmq_compile.codec.packing import unpack_words
from hqmq_compile.codec.spec import CacheSpec

PERIOD = 128  # context lengths over which stored bits are averaged: a window fills and empties
IMPLEMENTATION = "hqmq_faithful"
QUERIES = 256  # of one attention call
Calls = Sequence[tuple[int, int]]  # first and last slot of every call of the model


def calls_of(tokens: int, prefill: int, chunk: int = 1) -> list[tuple[int, int]]:
    """A first call of `prefill` tokens, then `chunk` tokens a call."""
    starts = [0, *range(prefill, tokens, chunk)] if prefill else list(range(0, tokens, chunk))
    return list(zip(starts, [*starts[1:], tokens], strict=True))


@dataclasses.dataclass
class Codec:
    """How the keys, or the values, are kept. As it stands: in 16 bits.

    Args:
        window: newest tokens kept as they came, at least this many.
        block: tokens packed together.
        sinks: first tokens kept as they came.
        exact_prefill: a call longer than the window sees its own tokens as they came.
    """

    window: int = 0
    block: int = 1
    sinks: int = 0
    exact_prefill: bool = True

    def read_back(self, x: Tensor, layer: int, calls: Calls) -> Tensor:
        """What packed tokens `[B, H, n, D]` float32 read as; n is a multiple of the block."""
        return x

    def packed_bits(self, dim: int) -> float:
        """Stored bits an element of packed tokens."""
        return 16.0

    def packed(self, length: int) -> int:
        """How many of `length` tokens are packed."""
        return max(0, length - self.window) // self.block * self.block

    def bits(self, dim: int, length: int, layer: int = 0) -> float:
        """Stored bits an element of a 16-bit cache that holds `length` tokens."""
        packed = self.packed(length)
        wide = length - packed + min(self.sinks, length)  # sinks are stored twice
        return (packed * self.packed_bits(dim) + 16 * wide) / length


@dataclasses.dataclass
class HQMQ(Codec):
    """One role of an `HQMQConfig`; counts the outliers that the codec met."""

    config: HQMQConfig = dataclasses.field(default_factory=HQMQConfig)
    role: str = "key"

    def __post_init__(self) -> None:
        resolved = self.config.resolved()
        self.window, self.sinks = resolved.window, resolved.sink_tokens
        self.block = resolved.block if resolved.window else 1
        self.exact_prefill = resolved.prefill == "exact"
        self.chunks = self.outliers = self.capped = 0

    def spec(self, dim: int, dtype: str, layer: int) -> CacheSpec | None:
        return self.config.spec(self.role, dim, dtype, layer)

    def bits(self, dim: int, length: int, layer: int = 0) -> float:
        spec = self.spec(dim, "bfloat16", layer)
        return 16.0 if spec is None else bits_per_element(spec, length).total

    def read_back(self, x: Tensor, layer: int, calls: Calls) -> Tensor:
        spec = self.spec(x.shape[-1], "float32", layer)
        if spec is None:
            return x
        mean = median = None
        if not spec.window:  # every token on its own, its block's pool has room for its outliers
            spec = spec.replace(block=1, pool=1.0)
            if spec.center == "first":
                mean = first_mean(x[:, :, calls[0][0] : calls[0][1]])
            if spec.med3x and spec.med3x_scope == "batch":
                median = _medians(x if mean is None else x - mean.float(), calls)
        blocks = x.unflatten(-2, (-1, spec.block))
        coded = encode_blocks(spec, blocks, mean=mean, median=median)
        if spec.med3x:
            filled = coded.scales[..., 0] != 0
            found = is_outlier(spec, unpack_words(coded.codes, spec), filled)
            self.chunks += found.numel()
            self.outliers += int(found.sum())
            self.capped += int(coded.capped)
        means = coded.means if mean is None else mean
        return decode_blocks(spec, *coded[:4], means).flatten(2, 3)


def _medians(x: Tensor, calls: Calls) -> Tensor:
    # The median chunk norm of each call and head, for each of its tokens: [1, H, n, 1, 1].
    norms = chunk_norms(x).transpose(0, 1)  # [H, B, n, C]
    out = norms.new_empty(norms.shape[0], norms.shape[2])
    stop = norms.shape[2]
    single = torch.tensor([first for first, last in calls if last == first + 1 and last <= stop])
    if len(single):
        steps = norms.index_select(2, single).transpose(1, 2).flatten(2)
        out[:, single] = steps.median(-1).values
    for first, last in calls:
        if last > first + 1 and first < stop:
            part = norms[:, :, first : min(last, stop)]
            out[:, first:last] = part.flatten(1).median(-1, keepdim=True).values
    return out[None, :, :, None, None]


@dataclasses.dataclass
class Method:
    """How a cache is kept: a codec for the keys and one for the values."""

    key: Codec
    value: Codec

    @classmethod
    def of(cls, config: HQMQConfig) -> Method:
        return cls(HQMQ(config=config, role="key"), HQMQ(config=config, role="value"))

    def bits(self, dim: int, context: int, layers: int = 1) -> tuple[float, float]:
        """Stored bits an element of keys and of values, averaged over lengths around `context`."""
        lengths = range(max(1, context - PERIOD // 2), context + PERIOD // 2)
        per_role = [
            [codec.bits(dim, n, layer) for n in lengths for layer in range(layers)]
            for codec in (self.key, self.value)
        ]
        return tuple(sum(bits) / len(bits) for bits in per_role)  # type: ignore[return-value]

    def bits_at(self, dim: int, length: int, layers: int = 1) -> float:
        """The same of keys and values together at exactly `length` tokens."""
        each = [c.bits(dim, length, n) for c in (self.key, self.value) for n in range(layers)]
        return sum(each) / len(each)


def packed_by_query(codec: Codec, calls: Calls) -> Tensor:
    """How many tokens each query sees packed, `[T]` int64."""
    counts = []
    for first, last in calls:
        exact = codec.exact_prefill and last - first > codec.window
        counts += [codec.packed(first if exact else last)] * (last - first)
    return torch.tensor(counts)


class _Pass:
    """One forward pass: quantises the keys and values of each layer, and attends to the mixture."""

    def __init__(self, method: Method, calls: Calls) -> None:
        self.codecs = (method.key, method.value)
        self.calls = calls
        self.packed = [packed_by_query(codec, calls) for codec in self.codecs]

    def stored(self, number: int, x: Tensor, layer: int) -> Tensor:
        """`[B, H, T, D]`: packed tokens as they read back, sinks and the rest as they came."""
        codec = self.codecs[number]
        count = int(self.packed[number].max())
        if not count:
            return x
        back = codec.read_back(x[:, :, :count].float(), layer, self.calls).to(x.dtype)
        out = torch.cat((back, x[:, :, count:]), 2)
        out[:, :, : codec.sinks] = x[:, :, : codec.sinks]
        return out

    def attend(self, query, key, value, layer: int, scale: float | None, sliding: int | None):
        tokens = query.shape[2]
        if tokens != len(self.packed[0]):
            raise ValueError(f"{tokens} tokens, but the calls have {len(self.packed[0])}")
        groups = query.shape[1] // key.shape[1]
        forms = []  # keys and values: as stored, as they came
        for number, x in enumerate((key, value)):
            stored = self.stored(number, x, layer)
            forms.append([t.repeat_interleave(groups, 1) for t in (stored, x)])
        slots = torch.arange(tokens)
        out = torch.empty_like(query)
        for first in range(0, tokens, QUERIES):
            queries = slots[first : first + QUERIES, None]
            visible = slots <= queries
            if sliding:
                visible &= slots > queries - sliding
            packed = [slots < counts[first : first + QUERIES, None] for counts in self.packed]
            keys, values, masks = [], [], []
            for k, v in ((0, 0), (0, 1), (1, 0), (1, 1)):  # 0: packed
                mask = visible & (packed[0] != bool(k)) & (packed[1] != bool(v))
                seen = mask.any(0).nonzero()
                if not len(seen):
                    continue
                part = slice(int(seen[0]), int(seen[-1]) + 1)
                keys.append(forms[0][k][:, :, part])
                values.append(forms[1][v][:, :, part])
                masks.append(mask[:, part])
            out[:, :, first : first + QUERIES] = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, first : first + QUERIES],
                torch.cat(keys, 2),
                torch.cat(values, 2),
                torch.cat(masks, 1),
                scale=scale,
            )
        return out


_current: list[_Pass] = []


def _attention(module: Any, query, key, value, attention_mask, scaling=None, **kwargs):
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"attention with {name}: use the route 'product'")
    sliding = kwargs.get("sliding_window")
    out = _current[-1].attend(query, key, value, module.layer_idx, scaling, sliding)
    return out.transpose(1, 2).contiguous(), None


@contextlib.contextmanager
def through(model: Any, method: Method, calls: Calls) -> Iterator[None]:
    """While open, `model(ids, use_cache=False)` is decoding in `calls` with the caches of `method`."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, lambda *args, **kwargs: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    _current.append(_Pass(method, calls))
    try:
        yield
    finally:
        _current.pop()
        model.set_attn_implementation(before)
