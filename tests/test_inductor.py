"""A few sessions under inductor itself; the other tests run the rewritten graphs uncompiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.compare import TYPICAL, Pair
from tests.configs import CONFIGS
from tests.hand_layouts import LayoutLoop
from tests.hand_written import Loop

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.slow]


@pytest.mark.parametrize(
    "name, kind, which, second, graphs",
    [
        ("llama", "static", "8", 11, 3),  # prefill, step, second prompt
        ("llama", "dynamic", "haar", 11, 4),  # the length is a symbol from the second step on
        ("gemma3", "static", "16", 1, 3),  # the window rolls, once it is full
    ],
)
def test_session(name, kind, which, second, graphs):
    counters.clear()
    settings = {"num_hidden_layers": 1} if kind == "dynamic" else {}
    pair = Pair(name, kind, CONFIGS[which], **settings)
    errors = pair.calls_of(37, 1, 1, 1, second, 1, 1)
    pair.check_packed()
    pair.reset()
    errors += pair.calls_of(37, 1, 1)
    assert max(errors) <= TYPICAL, errors
    assert counters["stats"]["unique_graphs"] <= graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes(mode):
    loop = Loop("gpt-fast", CONFIGS["16"])
    backend = torch._dynamo.lookup_backend("hqmq")
    target = loop.target

    def configured(gm, inputs, **kwargs):
        return backend(gm, inputs, mode=mode, options={"config": CONFIGS["16"]})

    loop.compiled = torch.compile(target, backend=configured)
    assert max(loop(37), loop(1), loop(1)) <= TYPICAL
    loop.check_stored()


@pytest.mark.parametrize("style", ["cat", "slice"])
def test_no_copy_of_the_cache(style):
    """Inductor updates the packed buffers in place: their memory is the same after each step."""
    loop = Loop(style, CONFIGS["16"])
    assert max(loop(37), loop(1), loop(1)) <= TYPICAL
    before = [b.data_ptr() for t in loop.caches for b in t.packed.buffers]
    assert max(loop(1), loop(1)) <= TYPICAL
    assert [b.data_ptr() for t in loop.caches for b in t.packed.buffers] == before


@pytest.mark.parametrize("style", ["llama", "grown", "stacked", "flash-attn"])
def test_other_layouts(style):
    """The parts of one tensor go in as buffers of their own, and are updated in place."""
    loop = LayoutLoop(style, CONFIGS["16"])
    assert max(loop(37), loop(1), loop(1)) <= TYPICAL

    def addresses():
        parts = [part for t in loop.target.tensors() for part in t.packed.parts]
        return [b.data_ptr() for part in parts for b in part.buffers]

    before = addresses()
    assert max(loop(1), loop(1)) <= TYPICAL
    assert addresses() == before
    loop.check_stored()
