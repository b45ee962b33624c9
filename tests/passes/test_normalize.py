"""The normalised graph means what the Dynamo graph meant, and touches nothing of it."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor

from hqmq_compile.passes.normalize import normalize

aten = torch.ops.aten


class Block(torch.nn.Module):
    """A little of all that is hard to trace: state, constants, dynamic sizes, an index."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(4, 8))

    def forward(self, x, n):
        y = self.linear(x).relu()
        index = torch.tensor([-1])
        weights = torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None]
        self.state[index] = y[-1:]
        self.state.mul_(0.5)
        return y + n, self.state * weights, torch.cat([torch.tensor([]), y])


def capture(module, *args):
    seen = []

    def backend(gm, example_inputs):
        seen.append((gm, *normalize(gm)))
        return gm.forward

    with torch.no_grad():
        torch.compile(module, backend=backend, fullgraph=True)(*args)
    return seen[-1]


def test_unmatched_graph_compiles_under_inductor_to_the_same_numbers():
    """Both lifted constants, a mutated buffer and a dynamic size survive AOT autograd's checks."""
    seen = []

    def backend(gm, example_inputs):
        traced, _ = normalize(gm)
        seen.append(traced)
        return compile_fx(traced, example_inputs)

    reference, module = Block().eval(), Block().eval()
    reference.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    with torch.no_grad():
        for size in (4, 5, 6):
            x = torch.randn(size, 8)
            torch.testing.assert_close(compiled(x, 3.0), reference(x, 3.0))
            torch.testing.assert_close(module.state, reference.state)
    assert len(seen) == 2  # the second one with a symbolic size


def test_placeholders_keep_order_sources_and_metadata():
    gm, traced, infos = capture(Block().eval(), torch.randn(4, 8), 3.0)
    olds = gm.graph.find_nodes(op="placeholder")
    news = traced.graph.find_nodes(op="placeholder")
    assert [i.name for i in infos] == [n.name for n in olds]
    assert any(i.source.endswith("._buffers['state']") for i in infos)
    for index, (old, new, info) in enumerate(zip(olds, news, infos, strict=True)):
        assert info.index == index and not info.packed
        assert new._dynamo_source == old._dynamo_source
        assert new.meta["hqmq_source"] == info.source
        assert new.meta.get("tensor_dict") == old.meta.get("tensor_dict")
    assert traced._param_name_to_source.keys() >= gm._param_name_to_source.keys()
    assert traced.meta.get("dynamo_compile_id") == gm.meta.get("dynamo_compile_id")


def test_every_node_knows_its_source_line():
    _, traced, _ = capture(Block().eval(), torch.randn(4, 8), 3.0)
    calls = traced.graph.find_nodes(op="call_function", target=aten.relu.default)
    assert calls and "test_normalize.py" in calls[0].meta["stack_trace"]
    assert all(n.meta.get("stack_trace") for n in traced.graph.nodes if n.op == "call_function")


def test_uniform_constants_become_nodes_and_others_get_a_source():
    _, traced, _ = capture(Block().eval(), torch.randn(4, 8), 3.0)
    (full,) = traced.graph.find_nodes(op="call_function", target=aten.full.default)
    assert full.args == ([1], -1)
    assert traced.graph.find_nodes(op="call_function", target=aten.empty.memory_format)
    (constant,) = traced.graph.find_nodes(op="get_attr")
    assert constant.target in traced._param_name_to_source


def test_the_dynamo_graph_and_its_fakes_are_untouched():
    before = []

    def backend(gm, example_inputs):
        fakes = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
        versions = [f._version for f in fakes if isinstance(f, torch.Tensor)]
        text = gm.graph.python_code("self").src
        traced, infos = normalize(gm)
        assert versions == [f._version for f in fakes if isinstance(f, torch.Tensor)]
        assert text == gm.graph.python_code("self").src
        for fake, info in zip(fakes, infos, strict=True):
            if isinstance(fake, FakeTensor):
                assert info.value is not fake
                assert info.value.fake_mode is fake.fake_mode
                assert info.value.stride() == fake.stride()
        before.append(traced)
        return gm.forward

    def mutate(x):
        x.transpose_(0, 1)
        return x.mul_(2)

    with torch.no_grad():
        torch.compile(mutate, backend=backend)(torch.randn(2, 3))
    assert before


def test_no_guards_are_added_by_normalising_a_symbolic_graph():
    counts = []

    def backend(gm, example_inputs):
        env = next(
            n.meta["example_value"].node.shape_env
            for n in gm.graph.find_nodes(op="placeholder")
            if isinstance(n.meta["example_value"], torch.SymInt)
        )
        counts.append(len(env.guards))
        normalize(gm)
        counts.append(len(env.guards))
        return gm.forward

    def grow(past, new):
        return torch.cat([past, new], -2)

    past = torch.randn(1, 2, 5, 8)
    torch._dynamo.mark_dynamic(past, 2)
    with torch.no_grad():
        torch.compile(grow, backend=backend)(past, torch.randn(1, 2, 1, 8))
    assert counts[0] == counts[1]


class Packed(torch.Tensor):
    """A stand-in for HQMQTensor: a wrapper subclass whose inner tensor has another shape."""

    _is_hqmq = True

    @staticmethod
    def __new__(cls, inner, shape):
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.float32, device=inner.device
        )

    def __init__(self, inner, shape):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Packed(inner["inner"], outer_size)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        dense = torch.utils._pytree.tree_map_only(
            Packed, lambda p: p.inner.new_zeros(p.shape), args
        )
        return function(*dense, **(kwargs or {}))


@pytest.mark.parametrize("dynamic", [False, True])
def test_packed_inputs_are_traced_as_plain_tensors(dynamic):
    seen = []

    def backend(gm, example_inputs):
        seen.append(normalize(gm))
        return gm.forward

    def grow(past, new):
        return torch.cat([past, new], -2)

    past = Packed(torch.zeros(0), (1, 2, 5, 8))
    if dynamic:
        torch._dynamo.mark_dynamic(past, 2)
    with torch.no_grad():
        torch.compile(grow, backend=backend)(past, torch.randn(1, 2, 1, 8))
    traced, infos = seen[-1]
    (info,) = [i for i in infos if i.packed]
    assert type(info.value) is FakeTensor and info.value.dtype is torch.float32
    assert isinstance(info.value.shape[2], torch.SymInt if dynamic else int)
    (cat,) = traced.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert cat.args[0][0].op == "placeholder"


def test_wrong_number_of_examples_is_an_error():
    gm, _, _ = capture(Block().eval(), torch.randn(4, 8), 3.0)
    with pytest.raises(ValueError, match="placeholders"):
        normalize(gm, [])


def test_inference_mode_and_bfloat16():
    """`generate` runs under no_grad, servers under inference_mode; both are traced alike."""
    seen = []

    def backend(gm, example_inputs):
        traced, _ = normalize(gm)
        seen.append(traced)
        return traced.forward

    module = torch.nn.Linear(4, 4).bfloat16()
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(torch.compile(module, backend=backend)(x), module(x))
    assert len(seen) == 1
