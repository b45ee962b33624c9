"""A model over two devices (`device_map`): each cache is packed on the device of its layer.

Fake tensors know devices that this machine lacks; `tests/kernels/test_launch.py` runs on two GPUs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hqmq_compile import HQMQConfig
from hqmq_compile.passes import pipeline

DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1)]


def layer(x, weight, keys, values, positions):
    query, key, value = F.linear(x, weight).view(1, 1, 6, 16).transpose(1, 2).split(2, 1)
    keys.index_copy_(2, positions, key)
    values.index_copy_(2, positions, value)
    out = F.scaled_dot_product_attention(query, keys, values)
    return out.transpose(1, 2).flatten(2)


def model(x, w0, k0, v0, p0, w1, k1, v1, p1):
    x = layer(x, w0, k0, v0, p0)
    return layer(x.to("cuda:1"), w1, k1, v1, p1)


def grown(x, w0, k0, v0, w1, k1, v1):
    results = []
    for weight, keys, values, device in ((w0, k0, v0, "cuda:0"), (w1, k1, v1, "cuda:1")):
        x = x.to(device)
        query, key, value = F.linear(x, weight).view(1, 1, 6, 16).transpose(1, 2).split(2, 1)
        keys, values = torch.cat((keys, key), -2), torch.cat((values, value), -2)
        x = F.scaled_dot_product_attention(query, keys, values).transpose(1, 2).flatten(2)
        results += [keys, values]
    return x, *results


def analysed(function, static: bool):
    gm = symbolic_trace(function)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    with mode:
        inputs = [torch.empty(1, 1, 32, device=DEVICES[0])]
        for device in DEVICES:
            inputs.append(torch.empty(96, 32, device=device))
            inputs += [torch.empty(1, 2, 64, 16, device=device) for _ in range(2)]
            if static:
                inputs.append(torch.empty(1, dtype=torch.int64, device=device))
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["example_value"] = value
    with tracing(TracingContext(mode)):  # as in a backend
        return pipeline.run(gm, HQMQConfig()).rewritten


def check(rewritten) -> None:
    expected = [DEVICES[0], DEVICES[0], DEVICES[1], DEVICES[1]]
    assert [binding.device for binding in rewritten.bindings] == expected
    buffers = [t for t in rewritten.extra_inputs if isinstance(t, torch.Tensor)]
    assert [t.device for t in buffers] == [d for d in expected for _ in range(len(buffers) // 4)]
    ops = rewritten.module.graph.find_nodes(
        op="call_function", target=torch.ops.hqmq.write_attend.default
    )
    assert len(ops) == 2
    for node, device in zip(ops, DEVICES, strict=True):
        tensors = [n.meta["val"] for n in node.all_input_nodes]
        assert {t.device for t in tensors if isinstance(t, torch.Tensor)} == {device}


def test_static_caches():
    check(analysed(model, static=True))


def test_growing_caches():
    check(analysed(grown, static=False))
