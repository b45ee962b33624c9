"""Which KV heads of the model a graph holds, when the heads are spread over ranks.

Tensor parallelism divides the projections by rows, so a rank computes and caches some of the heads. A
graph shows local heads only; what says which ones they are is the weight they come from, a DTensor.
Random codebooks (`codebook="haar"`) belong to a head of the model: `CacheSpec.first_head` keeps them
the same on any number of ranks, also where several ranks hold the same head. Weights that a program has
cut itself, without DTensors, do not show their place: their heads are counted from 0 on every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .normalize import is_subclass

aten = torch.ops.aten
WEIGHT = {  # place of the weight among the arguments of a projection
    aten.linear.default: 1,
    aten.matmul.default: 1,
    aten.mm.default: 1,
    aten.bmm.default: 1,
    aten.addmm.default: 2,
}


def shard_of(node: Node) -> int:
    """Place of this rank among those that hold different heads of `node`, `[B, H, n, D]`; 0 if one does.

    Follows `node` back to its projection, and from there the weight, never what is projected.
    """
    for found in _walk(node, through_projections=False):
        value, place = found.meta.get("val"), WEIGHT.get(found.target)
        if place is not None:
            for weight in _walk(found.args[place], through_projections=True):
                if is_subclass(weight.meta.get("val")):
                    return _place(weight.meta["val"], 0)  # heads are rows of a weight
        elif is_subclass(value) and found.op != "placeholder":  # not the weight of a norm
            return _place(value, value.dim() - 1)
    return 0


def _walk(node: Node, *, through_projections: bool) -> Iterator[Node]:
    """`node` and what it is made from, nearest first."""
    queue, seen = deque([node]), {node}
    while queue:
        node = queue.popleft()
        yield node
        if through_projections or node.target not in WEIGHT:
            sources = [source for source in node.all_input_nodes if source not in seen]
            queue.extend(sources)
            seen.update(sources)


def _place(tensor: Any, dim: int) -> int:
    """Place of this rank along the mesh dims that divide `dim` of a DTensor."""
    mesh = getattr(tensor, "device_mesh", None)
    coordinate = mesh.get_coordinate() if mesh is not None else None
    place = 0
    for i, placement in enumerate(tensor.placements if coordinate else ()):
        if getattr(placement, "dim", None) in (dim, dim - tensor.dim()):
            place = place * mesh.size(i) + coordinate[i]
    return place
