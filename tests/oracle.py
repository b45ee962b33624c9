"""What attention must see when caches are packed: a reference for whole models, in a few lines.

An `OracleCache` goes into the *eager* model in place of its cache. It keeps every token dense, and
replaces by `codec.fake_quantize` what the compiled model would have packed by now. It shares the codec
with the product and nothing else: no buffers, no ring, no packed reading, no ops.

The rules (`design.md`, "Slots, blocks, window"):

* Windowed (`window > 0`). Tokens enter as they came. With L the high-water mark, the blocks below
  `block * floor((L - window) / block)` are packed, each on its own and once.
* Immediate (`window == 0`). A token is packed when it is written, against the mean of the first write.
* The first `sink_tokens` slots always read as they came.
* A call of n > window tokens with `prefill="exact"` attends to the past as it was before the call and
  to its own tokens as they came; every other call to what is stored after its write.
* Writing at a slot below the packed ones rewinds: everything is packed first, then the tokens of that
  slot's block that precede it become unpacked again, with the values they have.

Ties. Two models compute the same keys up to 1e-6, and once in some ten thousand chunks that decides
between two codewords, or how a mean is rounded: then logits differ by more than 1e-3 and nobody is wrong.
So an oracle may have a *witness*, the cache of the compiled model after the same call. Where the two
disagree on a token, the oracle takes the witness's value if, and only if, the codec gives exactly that
value for some input within `NOISE` of the oracle's own; `ties` counts these tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from hqmq_compile import HQMQConfig
from hqmq_compile.codec.codec import fake_quantize, first_mean
from hqmq_compile.codec.spec import CacheSpec

NOISE = 4e-6  # relative, of keys and values between two ways to compute them in float32
DRAWS = 24
Witness = Callable[[int, int], Tensor | None]  # first and last slot to `[B, H, n, D]`, or None


class Stored:
    """One cache tensor by absolute slot: `values` `[B, H, slots, D]` float32, as they read now.

    Args:
        spec: of the cache; None where the config leaves the layer alone.
        slots: room; slots never written read as zero.
        witness: decides ties.
    """

    def __init__(
        self,
        spec: CacheSpec | None,
        batch: int,
        heads: int,
        slots: int,
        dim: int,
        witness: Witness | None = None,
    ):
        self.spec, self.witness = spec, witness
        self.ties = 0
        self.values = torch.zeros(batch, heads, slots, dim)
        self.length = 0  # one past the newest slot
        self.packed = 0  # windowed: slots below are packed
        self.mean: Tensor | None = None

    def write(self, tokens: Tensor, slot: int) -> None:
        """Write `tokens` `[B, H, n, D]` at slots slot..slot+n-1."""
        spec, tokens = self.spec, tokens.float()
        stop = slot + tokens.shape[2]
        if stop > self.values.shape[2]:
            raise IndexError(f"the oracle has {self.values.shape[2]} slots, not {stop}")
        if spec is not None and spec.window == 0:
            self.values[:, :, slot:stop] = self._decided(self._each(tokens), tokens, slot)
            sinks = min(max(spec.sink_tokens - slot, 0), tokens.shape[2])
            self.values[:, :, slot : slot + sinks] = tokens[:, :, :sinks]
            self.length = self.packed = max(self.length, stop)
            return
        if spec is not None and slot < self.packed:
            self._pack(-(-self.length // spec.block))
            self.packed, self.length = slot // spec.block * spec.block, slot
            self._round(self.packed, slot)
        if slot > self.length:
            self._round(self.length, slot)
        self.values[:, :, slot:stop] = tokens
        self.length = max(self.length, stop)
        if spec is not None:
            self._pack((self.length - spec.window) // spec.block)

    def _decided(self, pack: Callable[[Tensor], Tensor], x: Tensor, first: int) -> Tensor:
        """`pack(x)` for the tokens `x` at slots from `first` on, with ties decided by the witness."""
        own = pack(x)
        theirs = self.witness and self.witness(first, first + x.shape[2])
        if theirs is None:
            return own

        def far(other: Tensor) -> Tensor:
            return (other - theirs).abs().amax(-1) > 1e-6 * own.abs().amax()

        open_ = far(own)
        open_[:, :, : max(self.spec.sink_tokens - first, 0)] = False  # they read as they came
        for seed in range(DRAWS if open_.any() else 0):
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
            tie = open_ & ~far(pack(x * (1 + NOISE * noise)))
            own = torch.where(tie.unsqueeze(-1), theirs, own)
            self.ties += int(tie.sum())
            open_ &= ~tie
        return own

    def _each(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """Packs every token on its own (its block has room for all its outliers)."""
        spec = self.spec
        batch, heads, count, dim = tokens.shape
        mean = median = None
        if spec.center == "first":
            if self.length == 0:
                self.mean = first_mean(tokens)
            mean = self.mean.repeat_interleave(count, 0)
        if spec.med3x and spec.med3x_scope == "batch":  # of this write, for each head
            centred = tokens if self.mean is None else tokens - self.mean.float()
            norms = centred.unflatten(-1, (-1, 4)).norm(dim=-1)
            median = norms.transpose(0, 1).flatten(1).median(-1).values

        def pack(x: Tensor) -> Tensor:
            alone = x.transpose(1, 2).reshape(batch * count, heads, 1, dim)
            out = fake_quantize(spec, alone, mean=mean, median=median)
            return out.view(batch, count, heads, dim).transpose(1, 2)

        return pack

    def _pack(self, blocks: int) -> None:
        """Pack all blocks before block number `blocks` that are not packed yet."""
        spec = self.spec
        for first in range(self.packed, blocks * spec.block, spec.block):
            block = self.values[:, :, first : first + spec.block]
            exact = block[:, :, : max(spec.sink_tokens - first, 0)].clone()
            block.copy_(self._decided(lambda x: fake_quantize(spec, x), block, first))
            block[:, :, : exact.shape[2]] = exact
            self.packed = first + spec.block

    def _round(self, first: int, stop: int) -> None:
        """Slots that become unpacked again are kept in the dtype of the cache."""
        if self.spec is not None:
            part = self.values[:, :, first:stop]
            part.copy_(part.to(self.spec.torch_dtype))

    def crop(self, stop: int) -> None:
        """Forget slots from `stop` on."""
        self.values[:, :, stop:] = 0
        self.length = min(self.length, stop)
        if self.spec is not None and stop < self.packed:
            self.packed = stop // self.spec.block * self.spec.block
            if self.spec.window == 0:
                self.packed = stop

    def map_batch(self, function) -> None:
        """Apply `function` to everything that has a batch dimension."""
        self.values = function(self.values)
        if self.mean is not None:
            self.mean = function(self.mean)


class Past:
    """Keys and values of one attention.

    Args:
        config: as given to the backend.
        layer: number of the attention in the model.
        slots: room for tokens.
    """

    def __init__(self, config: HQMQConfig, layer: int = 0, slots: int = 512):
        self.config, self.layer, self.slots = config, layer, slots
        self.stored: list[Stored] = []  # keys, values
        self.witnesses: tuple[Witness | None, Witness | None] = (None, None)

    def write(self, keys: Tensor, values: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        """Write tokens at slots from `slot` on.

        Returns what attention sees in this call, `[B, H, slots, D]` keys and values by absolute slot;
        what it does not see must be masked or cut off by the caller.
        """
        if not self.stored:
            roles = zip(("key", "value"), (keys, values), self.witnesses, strict=True)
            for role, x, witness in roles:
                batch, heads, _, dim = x.shape
                spec = self.config.spec(role, dim, x.dtype, self.layer)
                self.stored.append(Stored(spec, batch, heads, self.slots, dim, witness))
        count = keys.shape[2]
        exact = self.config.prefill == "exact" and count > self.config.window
        seen = []
        for stored, tokens in zip(self.stored, (keys, values), strict=True):
            before = stored.values.clone()
            stored.write(tokens, slot)
            if exact:
                before[:, :, slot : slot + count] = tokens.float()
            seen.append((before if exact else stored.values.clone()).to(tokens.dtype))
        return seen[0], seen[1]


class OracleLayer(DynamicLayer):
    """A transformers cache layer over a `Past`.

    Args:
        past: where the tokens are kept.
        room: slots of the static cache that this layer stands for; 0 for a growing cache. It decides
            how many empty slots the model sees, masked, behind the tokens.
        window: of sliding attention, or 0.
    """

    def __init__(self, past: Past, room: int = 0, window: int = 0):
        super().__init__()
        self.past, self.room = past, room
        self.is_compileable = bool(room)  # the masks of transformers depend on it
        self.sliding_window = min(window, room) if room and window else window
        self.is_sliding = bool(window)
        self.position = 0  # slot of the next token

    def update(self, key_states, value_states, *args, **kwargs):
        count = key_states.shape[2]
        length, first = self.get_mask_sizes(count)
        keys, values = self.past.write(key_states, value_states, self.position)
        self.position += count
        self.is_initialized = True
        return keys[:, :, first : first + length], values[:, :, first : first + length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        stop = self.position + query_length
        if not self.sliding_window:
            return self.room or stop, 0
        first = max(self.position - self.sliding_window + 1, 0)
        if self.room and stop <= self.sliding_window:
            return self.sliding_window, 0
        return stop - first, first

    def get_seq_length(self) -> int:
        return self.position

    def crop(self, tokens_to_remove: int) -> None:
        self.position -= abs(tokens_to_remove)
        if not self.room:  # a static cache forgets nothing, it only goes back
            for stored in self.past.stored:
                stored.crop(self.position)

    def _map_batch(self, function) -> None:
        for stored in self.past.stored:
            stored.map_batch(function)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_batch(lambda t: t.index_select(0, beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda t: t[indices])


class OracleCache(Cache):
    """The cache to give to an eager model.

    Args:
        model_config: of the model, for its number of layers and its sliding windows.
        config: as given to the backend.
        room: `max_cache_len` of the static cache that this one stands for; 0 for a `DynamicCache`.
    """

    def __init__(self, model_config, config: HQMQConfig, room: int = 0):
        layers = []
        for number, like in enumerate(DynamicCache(config=model_config).layers):
            window = like.sliding_window if like.is_sliding else 0
            layers.append(OracleLayer(Past(config, number, max(room, 512)), room, window))
        super().__init__(layers=layers)

    def rewind(self, position: int) -> None:
        """The next token goes to slot `position`; nothing is forgotten."""
        for layer in self.layers:
            layer.position = position

    def watch(self, cache: Cache) -> None:
        """Let `cache`, of a compiled model that is called first, decide ties."""
        for number, layer in enumerate(self.layers):
            layer.past.witnesses = tuple(
                _witness(cache, number, name) for name in ("keys", "values")
            )

    @property
    def ties(self) -> int:
        """Tokens (of a layer, head and role) that the witness decided."""
        return sum(stored.ties for layer in self.layers for stored in layer.past.stored)

    @property
    def packed_slots(self) -> list[int]:
        """Packed slots of every layer's keys."""
        return [layer.past.stored[0].packed for layer in self.layers]


def _witness(cache: Cache, number: int, name: str) -> Witness:
    def read(first: int, stop: int) -> Tensor | None:
        tensor = getattr(cache.layers[number], name)
        packed = getattr(tensor, "packed", None)
        if packed is None:
            return None
        start = packed.buffers.state[0].item()
        if first < start or stop - start > tensor.shape[2]:
            return None
        return tensor.dequantize()[:, :, first - start : stop - start].float()

    return read
