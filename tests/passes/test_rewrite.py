"""What the rewrite makes of a graph: ops before and after, inputs, outputs, numbers."""

from __future__ import annotations

import collections

import pytest
import torch
from torch.fx import GraphModule

from hqmq_compile import HQMQConfig
from hqmq_compile.passes import pipeline

aten = torch.ops.aten
HEADS, DIM, SLOTS = 2, 16, 48
WRITE_ATTEND = torch.ops.hqmq.write_attend.default


class Attention(torch.nn.Module):
    """One layer; `update` says how its caches take the new keys and values."""

    def __init__(self, update) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(32, 3 * HEADS * DIM)
        self.update = update

    def forward(self, x, keys, values, positions):
        q, k, v = self.proj(x).view(*x.shape[:2], 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        keys, values, mask = self.update(keys, values, k, v, positions)
        out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, mask)
        return out.transpose(1, 2).flatten(2), keys, values


def in_place(keys, values, k, v, positions):
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    return keys, values, torch.arange(SLOTS)[None, :] <= positions[:, None]


def growing(keys, values, k, v, positions):
    return torch.cat([keys, k], 2), torch.cat([values, v], 2), None


def capture(update, n=3, length=SLOTS, config=None, **options) -> pipeline.Result:
    results = []

    def backend(gm: GraphModule, example_inputs):
        results.append(pipeline.run(gm, config or HQMQConfig(block=16, window=16), **options))
        return gm.forward

    torch._dynamo.reset()
    keys, values = torch.randn(1, HEADS, length, DIM), torch.randn(1, HEADS, length, DIM)
    with torch.no_grad():
        torch.compile(Attention(update), backend=backend)(
            torch.randn(1, n, 32), keys, values, torch.arange(length - n, length)
        )
    (result,) = results
    return result


def ops(module: GraphModule) -> collections.Counter:
    return collections.Counter(str(n.target) for n in module.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("update", [in_place, growing])
def test_one_fused_op_takes_the_place_of_attention_and_writes(update):
    result = capture(update)
    before, after = ops(result.original), ops(result.rewritten.module)
    assert before["aten.scaled_dot_product_attention.default"] == 1
    assert after["hqmq.write_attend.default"] == 1
    gone = ("scaled_dot_product", "index_copy", "cat")
    assert not [name for name in after if any(g in name for g in gone)]
    assert before["aten.linear.default"] == after["aten.linear.default"] == 1


@pytest.mark.parametrize("update", [in_place, growing])
def test_caches_become_buffers(update):
    rewritten = capture(update).rewritten
    names = [n.name for n in rewritten.module.graph.find_nodes(op="placeholder")]
    assert len([n for n in names if n.endswith(("_codes", "_state"))]) == 4
    assert not {"l_keys_", "l_values_"} & set(names)
    assert len(names) == len(rewritten.kept_args) + len(rewritten.extra_inputs)
    # Written in place, the caches are no outputs of the graph; grown, they are, and are dropped.
    assert rewritten.kept_outputs == ([0] if update is in_place else [0, None, None])
    sources = [n._dynamo_source for n in rewritten.module.graph.find_nodes(op="placeholder")[-16:]]
    assert len({str(s.name) for s in sources}) == 16
    for node in rewritten.module.graph.find_nodes(op="placeholder")[-16:]:
        assert node.meta["tensor_dict"]["_dynamo_static_input_type"] == "unguarded"


def test_static_shapes_stay_static_and_growing_share_one_symbol():
    assert capture(in_place).rewritten.blocks == []
    grown = capture(growing).rewritten
    (blocks,) = grown.blocks
    assert isinstance(blocks, torch.SymInt)
    assert all(b.blocks is blocks for b in grown.bindings)


def test_the_original_graph_is_kept_intact():
    result = capture(in_place)
    keys, values = torch.randn(1, HEADS, SLOTS, DIM), torch.randn(1, HEADS, SLOTS, DIM)
    module = Attention(in_place)
    x, positions = torch.randn(1, 3, 32), torch.tensor([4, 5, 6])
    named = {"x": x, "keys": keys, "values": values, "positions": positions}
    named |= {"weight": module.proj.weight, "bias": module.proj.bias}
    args = [
        next(v for k, v in named.items() if k in info.source.rsplit("[", 1)[-1])
        for info in result.infos
    ]
    with torch.no_grad():
        want = module(x, keys.clone(), values.clone(), positions)
        got = result.original(*args)
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(keys, want[1])


def test_positions_are_known_before_the_call():
    result = capture(in_place)
    args = [torch.tensor([7, 8, 9]) for _ in result.infos]
    assert [start(args) for start in result.starts] == [7, 7]


@pytest.mark.parametrize(
    ("config", "medians"),
    [
        (HQMQConfig(block=16, window=16), 0),
        (HQMQConfig(block=16, window=0), 1),
        (HQMQConfig.preset("paper", block=16), 2),
        (HQMQConfig(block=16, window=0, med3x=None), 0),
    ],
    ids=["window", "immediate", "paper", "off"],
)
def test_med3x_median_is_a_reduction_of_the_graph(config, medians):
    module = capture(in_place, config=config).rewritten.module
    assert ops(module)["aten.median.dim"] == medians
    (node,) = module.graph.find_nodes(op="call_function", target=WRITE_ATTEND)
    names = [a.name for a in WRITE_ATTEND._schema.arguments]
    given = [node.args[names.index(f"{role}_median")] is not None for role in ("key", "value")]
    assert sum(given) == medians


def test_median_node_equals_the_codec():
    from hqmq_compile.codec import med3x as codec

    config = HQMQConfig.preset("paper", block=16)
    module = capture(in_place, config=config).rewritten.module
    medians = module.graph.find_nodes(op="call_function", target=aten.median.dim)
    assert len(medians) == 2
    tokens = torch.randn(2, HEADS, 5, DIM)
    norms = codec.chunk_norms(tokens)
    pooled = norms.transpose(0, 1).reshape(HEADS, -1).median(-1).values
    torch.testing.assert_close(codec.median(norms, "batch").flatten(), pooled)


def test_excluded_layers_are_left_alone_with_a_reason():
    result = capture(in_place, config=HQMQConfig(layers={0: None}))
    assert result.rewritten is None
    assert "excluded by config.layers" in result.matches[0].reason


def test_analysis_alone_rewrites_nothing():
    result = capture(in_place, analyze_only=True)
    assert result.rewritten is None
    assert result.matches[0].reason is None
    passes = {"normalize", "find_attention", "layouts", "find_caches", "read_dense"}
    assert set(result.seconds) == passes


def test_two_configs_make_two_graphs():
    """Inductor's caches see the config: it is an argument of the op."""
    texts = []
    for config in (HQMQConfig(block=16, window=16), HQMQConfig(block=16, window=32)):
        module = capture(in_place, config=config).rewritten.module
        (node,) = module.graph.find_nodes(op="call_function", target=WRITE_ATTEND)
        texts.append([a for a in node.args if isinstance(a, str)])
    assert texts[0] != texts[1]
