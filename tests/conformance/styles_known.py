"""The styles of `tests/hand_written.py`, which existed before the suite, in its terms."""

from __future__ import annotations

import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from tests import hand_written as old
from tests.conformance.styles import Style, slots_of, visible
from tests.hand_written import BATCH, DIM, HEADS, ROOM, WINDOW, attend


class Concatenated(Style):
    """DynamicCache of transformers."""

    kind = "growing"
    function = staticmethod(old.concatenated)

    def __init__(self) -> None:
        self.keys, self.values = (torch.zeros(BATCH, HEADS, 0, DIM) for _ in range(2))

    def drive(self, run, inputs, position):
        out, self.keys, self.values = run(inputs[0], self.keys, self.values)
        return out


class NanoGPT(Style):
    """nanoGPT with a cache: a tuple that is None at first."""

    kind, attention = "growing", "eager"
    function = staticmethod(old.nano)

    def __init__(self) -> None:
        self.past = None

    @property
    def caches(self):
        return [self.past]

    def drive(self, run, inputs, position):
        out, self.past = run(inputs[0], self.past)
        return out


class Sliding(Concatenated):
    """DynamicSlidingWindowLayer of transformers."""

    kind = "sliding window"
    function = staticmethod(old.sliding)

    def drive(self, run, inputs, position):
        out, self.keys, self.values = run(inputs[0], self.keys, self.values, position)
        return out

    def expected(self, queries, seen, position):
        stop = position + queries[0].shape[2]
        keys, values = (t[:, :, :stop] for t in seen[0])
        return attend(queries[0], keys, values, position, window=WINDOW)


class Rolling(Sliding):
    """StaticSlidingWindowLayer of transformers itself: it fills up, then rolls."""

    function = staticmethod(old.rolling)

    def __init__(self) -> None:
        self.layer = StaticSlidingWindowLayer(ROOM, WINDOW)

    @property
    def caches(self):
        return [(self.layer.keys, self.layer.values)]

    def drive(self, run, inputs, position):
        return run(inputs[0], self.layer, position)


class InPlace(Style):
    """StaticCache of transformers: `index_copy_`."""

    kind = "in place, by position"
    function = staticmethod(old.index_copied)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, torch.tensor(position))


class Sliced(Style):
    """A slice at an int position; attention reads the filled part."""

    kind = "in place, a slice"
    function = staticmethod(old.sliced)

    def drive(self, run, inputs, position):
        return run(inputs[0], self.keys, self.values, position)


class GptFast(Style):
    """Buffers of a module, `index_put_` at `input_pos`."""

    kind = "buffers"

    def __init__(self) -> None:
        self.model = old.GptFast()

    @property
    def target(self):
        return self.model

    @property
    def caches(self):
        return [(self.model.k_cache, self.model.v_cache)]

    def drive(self, run, inputs, position):
        return run(inputs[0], slots_of(inputs[0], position))


class TorchTune(GptFast):
    """Buffers that know their position, and advance it."""

    def __init__(self) -> None:
        self.model = old.TorchTune()

    def drive(self, run, inputs, position):
        self.model.cache_pos.copy_(torch.arange(ROOM) + position)
        mask = visible(slots_of(inputs[0], position), ROOM)
        return run(inputs[0], mask.expand(BATCH, -1, -1))
