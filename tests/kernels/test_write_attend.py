"""The fused call: write keys and values, attend over them."""

import pytest
import torch

from hqmq_compile import ops  # noqa: F401  registers torch.ops.hqmq
from hqmq_compile.codec.spec import CacheSpec
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import (
    CUDA,
    DEVICES,
    SPECS,
    assert_same_cache,
    copy_to,
    empty,
    immediate,
    random_tokens,
    small,
)

SLOTS = 64
TOLERANCE = {"cpu": 2e-5, "cuda": 2e-3}


def run(
    device, key_spec, value_spec, calls, *, keep=0, exact=True, as_positions=False, growing=True,
    heads=1, group=2, **options,
):  # fmt: skip
    """Calls of `count` tokens each, one after the other, by `ops` in torch and by the kernels."""
    specs = (key_spec, value_spec)
    expected = [empty(s, 1, heads, SLOTS) for s in specs]
    got = [copy_to(b, device) for b in expected]
    options = {"scale": 0.02, "causal": False, "softcap": 0.0, "sinks": None} | options
    sinks = options["sinks"]
    moved = options | {"sinks": sinks if sinks is None else sinks.to(device)}
    past = 0
    for i, count in enumerate(calls):
        key = random_tokens(key_spec, 1, heads, count, i)
        value = random_tokens(value_spec, 1, heads, count, 10 + i)
        query = torch.randn(1, heads * group, count, key_spec.head_dim)
        length = past + count if growing else SLOTS
        # As a model masks: causal, and with a window of `keep`.
        at, slot = torch.arange(length), past + torch.arange(count)[:, None]
        mask = at <= slot
        if keep:
            mask &= at > slot - keep
        mask = mask[None, None]
        positions = torch.arange(past, past + count) if as_positions else None
        start = 0 if as_positions else past
        op = torch.ops.hqmq.write_attend(
            query, key, value, positions, start, keep, 0, *expected[0], *expected[1],
            mask, options["sinks"], 0, length, options["scale"], options["causal"],
            options["softcap"], None, None, exact, str(key_spec), str(value_spec), "torch",
        )  # fmt: skip
        out = launch.write_attend(
            query.to(device), key.to(device), value.to(device),
            None if positions is None else positions.to(device), start, keep, 0,
            *got, 0, length, None, None, exact, *specs, mask=mask.to(device), **moved,
        )  # fmt: skip
        tolerance = TOLERANCE[device]
        torch.testing.assert_close(out.cpu(), op, rtol=tolerance, atol=tolerance)
        past = min(past + count, keep) if keep else past + count
        for spec, a, b in zip(specs, expected, got, strict=True):
            assert_same_cache(spec, a, b, past)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
def test_write_attend_matches_reference(exact, device):
    run(device, small("odd-dim"), small("value"), [40, 1, 3], exact=exact)


@pytest.mark.parametrize("device", DEVICES)
def test_write_attend_static_matches_reference(device):
    options = {"as_positions": True, "growing": False}
    run(device, small("odd-dim"), small("value"), [40, 1, 17], **options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
def test_write_attend_sliding_matches_reference(exact, device):
    run(device, small("value"), small("value"), [30, 1, 20, 1, 40, 1], keep=24, exact=exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exact", [True, False])
def test_write_attend_immediate_matches_reference(exact, device):
    run(device, immediate("odd-dim"), immediate("value"), [20, 1, 3], exact=exact)


@pytest.mark.parametrize("device", DEVICES)
def test_write_attend_immediate_sliding_matches_reference(device):
    spec = immediate("value")
    run(device, spec, spec, [20, 1, 3, 30, 1], keep=24, exact=False)


@pytest.mark.parametrize("device", DEVICES)
def test_write_attend_softcap_and_sinks_matches_reference(device):
    spec = small("value")
    run(device, spec, spec, [30, 1], softcap=5.0, group=1, sinks=torch.tensor([0.5]))


@pytest.mark.parametrize("device", DEVICES)
def test_write_attend_rewinds_matches_reference(device):
    """The same static cache gets prompt A, B, A: A's output comes out twice."""
    key_spec, value_spec = small("odd-dim"), small("value")
    buffers = [copy_to(empty(s, 1, 1, SLOTS), device) for s in (key_spec, value_spec)]
    outs = []
    for seed in (0, 1, 0):
        key, value = (
            random_tokens(key_spec, 1, 1, 50, seed),
            random_tokens(value_spec, 1, 1, 50, seed),
        )
        query = torch.randn(1, 1, 50, 80, generator=torch.Generator().manual_seed(seed))
        for a, b in ((0, 40), (40, 50)):
            positions = torch.arange(a, b, device=device)
            mask = torch.arange(SLOTS)[None, :] <= torch.arange(a, b)[:, None]
            out = launch.write_attend(
                *(t[:, :, a:b].to(device) for t in (query, key, value)), positions, 0, 0, SLOTS,
                *buffers, 0, SLOTS, None, None, True, key_spec, value_spec,
                scale=0.02, mask=mask.to(device),
            )  # fmt: skip
        outs.append(out)
    assert torch.equal(outs[0], outs[2])
    assert not torch.allclose(outs[0], outs[1])


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("window", [64, 0])
def test_write_attend_cuda_graph_replay(window, device):
    """Decode steps across block boundaries: one captured step, replayed with moving positions."""
    slots, prompt, steps = 512, 100, 150
    key_spec = SPECS["key"].replace(dtype="bfloat16", sink_tokens=4, window=window)
    value_spec = CacheSpec("value", 128, secondary=42, radius_bits=3, sink_tokens=4, window=window)
    if not window:
        key_spec = key_spec.replace(center="none", outliers="16bit")
    specs, heads, group = (key_spec, value_spec), 2, 4
    keys, values = (random_tokens(s, 1, heads, prompt + steps).to(device) for s in specs)
    queries = torch.randn(1, heads * group, steps, 128, device=device, dtype=torch.bfloat16)

    def start():
        buffers = [copy_to(empty(s, 1, heads, slots), device) for s in specs]
        for spec, b, tokens in zip(specs, buffers, (keys, values), strict=True):
            launch.write(spec, b, tokens[:, :, :prompt])
        return buffers

    def step(buffers, query, key, value, position, mask):
        return launch.write_attend(
            query, key, value, position, 0, 0, slots, *buffers, 0, slots, None, None, True,
            *specs, scale=0.05, mask=mask,
        )  # fmt: skip

    def inputs(i):
        at = prompt + i
        position = torch.tensor([at], device=device)
        mask = torch.arange(slots, device=device)[None, None, None] <= at
        here = slice(at, at + 1)
        return queries[:, :, i : i + 1], keys[:, :, here], values[:, :, here], position, mask

    eager = start()
    expected = [step(eager, *inputs(i)) for i in range(steps)]

    static = [t.contiguous() for t in inputs(0)]
    warm = start()
    step(warm, *static)
    replayed = start()
    saved = [[t.clone() for t in b] for b in replayed]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(replayed, *static)
    for buffers, copies in zip(replayed, saved, strict=True):
        for t, copy in zip(buffers, copies, strict=True):
            t.copy_(copy)
    for i in range(steps):
        for target, source in zip(static, inputs(i), strict=True):
            target.copy_(source)
        graph.replay()
        torch.testing.assert_close(out, expected[i], rtol=0, atol=0)
    for a, b in zip(eager, replayed, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y)
    assert int(replayed[0].state[1]) == (250 if not window else 128)
