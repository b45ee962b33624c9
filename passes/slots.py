"""Where a call will write, computed ahead of the call: needed once, to adopt a half-filled cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

SMALL = 1 << 20  # elements: larger inputs are not index arithmetic


def start_evaluator(traced: GraphModule, start: Node | int) -> Callable[[list[Any]], int] | None:
    """A function from the graph's arguments to the first slot that the call writes.

    `start` is an int, a scalar node, or a 1-D node of positions. The nodes it is computed from are
    copied into a graph of their own, which runs on copies of its inputs, so that a position counter
    that the model updates in place is not advanced. None if `start` depends on more than integers.
    """
    if isinstance(start, int):
        return lambda args: start
    needed, stack = set(), [start]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack.extend(node.all_input_nodes)
    graph, env, used = Graph(), {}, []
    for index, node in enumerate(traced.graph.find_nodes(op="placeholder")):
        if node in needed:
            if not _is_index(node.meta.get("val")):
                return None
            used.append(index)
    for node in traced.graph.nodes:
        if node in needed:
            env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(env[start])
    module = GraphModule(traced, graph)

    def evaluate(args: list[Any]) -> int:
        inputs = [a.clone() if isinstance(a, torch.Tensor) else a for a in (args[i] for i in used)]
        with torch.no_grad():
            result = module(*inputs)
        return int(result.flatten()[0]) if isinstance(result, torch.Tensor) else int(result)

    return evaluate


def _is_index(value: Any) -> bool:
    if isinstance(value, (int, torch.SymInt)):
        return True
    return (
        isinstance(value, torch.Tensor)
        and not value.is_floating_point()
        and all(isinstance(s, int) for s in value.shape)
        and value.numel() <= SMALL
    )
