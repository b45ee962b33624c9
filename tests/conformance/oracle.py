"""The oracle of `tests/oracle.py`, for caches of which some are packed and some are not.

Whether a cache is packed is the product's decision, which the report has to explain; that its numbers
are right either way is what is tested. So each `FollowedPast` looks, in every call, at what the compiled
model did with its cache: packed, the rules of `tests/oracle.py` hold; unpacked, tokens stay as they are,
those that were packed before with the values that they had when they were unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer, StaticLayer

from hqmq_compile import HQMQConfig, HQMQTensor
from tests.oracle import OracleLayer, Past, _witness


class FollowedPast(Past):
    """Keys and values of one attention, each packed when `tensors()` are.

    Args:
        config, layer, slots: as for `Past`.
        tensors: the compiled model's keys and values, after the call that it just made.
    """

    def __init__(
        self, config: HQMQConfig, layer: int, slots: int, tensors: Callable[[], Sequence[Any]]
    ) -> None:
        super().__init__(config, layer, slots)
        self.tensors = tensors
        self.specs: list = []

    def write(self, keys: Tensor, values: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        if not self.stored:
            nothing = keys[:, :, :0], values[:, :, :0]
            super().write(*nothing, 0)
            self.specs = [stored.spec for stored in self.stored]
        self.follow()
        return super().write(keys, values, slot)

    def follow(self) -> None:
        """Pack or unpack as the compiled model did."""
        for stored, spec, tensor in zip(self.stored, self.specs, self.tensors(), strict=True):
            # Also while it is dense because eager code took a view of it: the content is the same.
            packed = isinstance(tensor, HQMQTensor)
            if packed and stored.spec is None:
                stored.spec = spec
                if spec is not None:
                    stored._pack((stored.length - spec.window) // spec.block)
            elif not packed:
                stored.spec, stored.packed = None, 0


class FollowedLayer(OracleLayer):
    """An `OracleLayer` whose tokens can be read without a write, as cross-attention does."""

    @property
    def keys(self) -> Tensor | None:
        return self._read(0)

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        pass  # the base class clears it

    @property
    def values(self) -> Tensor | None:
        return self._read(1)

    @values.setter
    def values(self, value: Tensor | None) -> None:
        pass

    def _read(self, role: int) -> Tensor | None:
        if not self.past.stored:
            return None
        self.past.follow()
        return self.past.stored[role].values[:, :, : self.position]


class FollowedHybridLayer(LinearAttentionLayer, FollowedLayer):
    """Attention and a recurrent state in one layer (Falcon-H1)."""

    is_compileable = False  # no property, as it is in one of the bases: `OracleLayer` sets it

    def __init__(self, past: Past, room: int, window: int) -> None:
        LinearAttentionLayer.__init__(self)
        FollowedLayer.__init__(self, past, room, window)


class FollowedCache(Cache):
    """The eager twin of `cache`, which belongs to a compiled model that is called first."""

    def __init__(self, cache: Cache, config: HQMQConfig, room: int) -> None:
        layers = []
        for number, like in enumerate(cache.layers):
            if not isinstance(like, (DynamicLayer, StaticLayer)):
                layers.append(type(like)())
                continue
            past = FollowedPast(config, number, max(room, 256), _tensors_of(cache, number))
            past.witnesses = tuple(_witness(cache, number, name) for name in ("keys", "values"))
            window = 0
            if like.is_sliding:  # a static one is as long as its window
                window = getattr(like, "sliding_window", None) or like.max_cache_len
            hybrid = isinstance(like, LinearAttentionLayer)
            layer = FollowedHybridLayer if hybrid else FollowedLayer
            layers.append(layer(past, room if isinstance(like, StaticLayer) else 0, window))
        super().__init__(layers=layers)

    @property
    def pasts(self) -> list[FollowedPast]:
        return [layer.past for layer in self.layers if isinstance(layer, FollowedLayer)]


def followed(cache: Cache, config: HQMQConfig, room: int) -> Cache:
    """The twin of any cache of transformers."""
    if isinstance(cache, EncoderDecoderCache):
        mine, cross = cache.self_attention_cache, cache.cross_attention_cache
        length = getattr(cross.layers[0], "max_cache_len", 0) if cross.layers else 0
        return EncoderDecoderCache(
            FollowedCache(mine, config, room), FollowedCache(cross, config, length)
        )
    return FollowedCache(cache, config, room)


def pasts(cache: Cache) -> list[FollowedPast]:
    """All pasts of a twin."""
    if isinstance(cache, EncoderDecoderCache):
        return cache.self_attention_cache.pasts + cache.cross_attention_cache.pasts
    return cache.pasts


def _tensors_of(cache: Cache, number: int) -> Callable[[], Sequence[Any]]:
    return lambda: (cache.layers[number].keys, cache.layers[number].values)
