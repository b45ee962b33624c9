"""The head a rank begins with is found from the DTensor weights alone."""

from __future__ import annotations

import types

import pytest
import torch
from torch.fx import Graph, Node

from hqmq_compile import HQMQConfig
from hqmq_compile.passes.global_heads import shard_of

aten = torch.ops.aten


class Mesh:
    """A device mesh as one of its ranks sees it."""

    def __init__(self, sizes: tuple[int, ...], coordinate: tuple[int, ...]):
        self.sizes, self.coordinate = sizes, coordinate

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self):
        return list(self.coordinate)


def shard(dim: int):
    return types.SimpleNamespace(dim=dim)


REPLICATE = types.SimpleNamespace()


class Distributed(torch.Tensor):
    """Stands for a DTensor, which needs a process group."""

    @staticmethod
    def of(shape, mesh: Mesh, *placements) -> Distributed:
        result = torch.Tensor._make_wrapper_subclass(Distributed, shape)
        result.device_mesh, result.placements = mesh, placements
        return result

    def __tensor_flatten__(self):
        return [], None

    @staticmethod
    def __tensor_unflatten__(inner, meta, size, stride):
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Made:
    """A graph with nodes whose `meta["val"]` is given."""

    def __init__(self):
        self.graph = Graph()

    def input(self, value) -> Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = value
        return node

    def __call__(self, target, *args, value=None) -> Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args)
        node.meta["val"] = torch.empty(1) if value is None else value
        return node

    def keys(self, weight: Distributed, hidden: Node | None = None) -> Node:
        """Keys as a model computes them: projection, view, transpose, a rotation by plain tensors."""
        hidden = hidden or self.input(torch.empty(1, 3, 32))
        linear = self(aten.linear.default, hidden, self("to_local", self.input(weight)))
        keys = self(aten.transpose.int, self(aten.view.default, linear, [1, 3, -1, 16]), 1, 2)
        return self(aten.mul.Tensor, keys, self(aten.cos.default, self.input(torch.empty(3, 16))))


@pytest.mark.parametrize(
    "sizes, coordinate, placements, expected",
    [
        ((4,), (3,), [shard(0)], 3),
        ((4,), (3,), [shard(-2)], 3),
        ((4,), (3,), [REPLICATE], 0),
        ((4,), (3,), [shard(1)], 0),  # a row-parallel projection: every rank has all heads
        ((2, 2), (1, 0), [shard(0), REPLICATE], 1),  # two ranks hold the same head
        ((2, 2), (1, 1), [shard(0), REPLICATE], 1),
        ((2, 3), (1, 2), [shard(0), shard(0)], 5),
        ((2, 3), (1, 2), [REPLICATE, shard(0)], 2),  # data parallel, then tensor parallel
    ],
)
def test_rows_of_the_weight_decide(sizes, coordinate, placements, expected):
    made = Made()
    weight = Distributed.of((64, 32), Mesh(sizes, coordinate), *placements)
    assert shard_of(made.keys(weight)) == expected


def test_earlier_layers_do_not_count():
    """Their weights are sharded, too: only the projection of these keys is asked."""
    made, mesh = Made(), Mesh((2,), (1,))
    before = made(aten.linear.default, made.input(torch.empty(1, 3, 32)),
                  made("to_local", made.input(Distributed.of((64, 32), mesh, shard(0)))))  # fmt: skip
    whole = made.input(torch.empty(32, 32))
    keys = made(aten.linear.default, before, whole)
    assert shard_of(keys) == 0
    assert shard_of(made.keys(Distributed.of((64, 32), mesh, REPLICATE), before)) == 0


def test_norms_of_keys_do_not_count():
    made, mesh = Made(), Mesh((2,), (1,))
    keys = made.keys(Distributed.of((64, 32), mesh, shard(0)))
    norm = made("to_local", made.input(Distributed.of((16,), mesh, REPLICATE)))
    assert shard_of(made(aten.mul.Tensor, keys, norm)) == 1


def test_activations_that_were_dtensors():
    made, mesh = Made(), Mesh((2,), (1,))
    for dim, expected in ((2, 1), (1, 0)):
        made_so = made("linear", value=Distributed.of((1, 3, 64), mesh, shard(dim)))
        keys = made(aten.view.default, made("to_local", made_so), [1, 3, -1, 16])
        assert shard_of(keys) == expected


def test_plain_weights():
    made = Made()
    assert shard_of(made(aten.linear.default, *map(made.input, torch.empty(2, 32, 32)))) == 0


def test_only_random_codebooks_know_their_head():
    """So that universal ones share tables, kernels and compiled graphs between ranks."""
    config = HQMQConfig(key={"codebook": "haar"})
    assert config.spec("key", 64, "float32", 0, 6).first_head == 6
    assert config.spec("value", 64, "float32", 0, 6).first_head == 0
