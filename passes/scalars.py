"""Sizes as nodes: an int stays an int, a SymInt becomes a sum of the graph's SymInt inputs."""

from __future__ import annotations

import operator

import sympy
import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv

from .graph_types import Scalar
from .nodes import aten, shape

FOLDS = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
    sympy.Max: torch.sym_max,
    sympy.Min: torch.sym_min,
}


class Scalars:
    """Makes nodes for sizes, right behind the placeholders, so that they may be used anywhere.

    They depend on SymInt placeholders only (on a `sym_size` of another input where Dynamo passed no
    SymInt), hence outlive the cache inputs that the rewriter takes away.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.known: dict[sympy.Expr, Node] = {}
        self.placeholders = graph.find_nodes(op="placeholder")
        self.last: Node | None = self.placeholders[-1] if self.placeholders else None
        for node in self.placeholders:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt):
                self.known.setdefault(value.node.expr, node)

    def make(self, value: int | torch.SymInt) -> Scalar | None:
        """`value` as an int or a node; None when it depends on data that the inputs do not hold."""
        if isinstance(value, int):
            return value
        expr = value.node.expr
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if free_unbacked_symbols(value):
            return self._existing(expr)
        return self._build(expr, value.node.shape_env)

    def _existing(self, expr: sympy.Expr) -> Node | None:
        for node in self.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.SymInt) and value.node.expr == expr:
                return node
        return None

    def _build(self, expr: sympy.Expr, env: object) -> Scalar | None:
        if isinstance(expr, sympy.Integer):
            return int(expr)
        if expr in self.known:
            return self.known[expr]
        if isinstance(expr, sympy.Symbol):
            return self._size_of_input(expr)
        fold = next((op for kind, op in FOLDS.items() if isinstance(expr, kind)), None)
        parts = [self._build(part, env) for part in expr.args] if fold else [None]
        if any(part is None for part in parts):
            return self._existing(expr)
        result = parts[0]
        for part in parts[1:]:
            result = self._call(fold, (result, part))
        self.known[expr] = result
        return result

    def _size_of_input(self, symbol: sympy.Symbol) -> Node | None:
        for node in self.placeholders:
            for dim, size in enumerate(shape(node)):
                if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                    self.known[symbol] = self._call(aten.sym_size.int, (node, dim))
                    return self.known[symbol]
        return None

    def _call(self, target: object, args: tuple) -> Node:
        with self.graph.inserting_after(self.last):
            node = self.graph.call_function(target, args)
        self.last = node
        values = [a.meta["val"] if isinstance(a, Node) else a for a in args]
        node.meta["val"] = (
            values[0].shape[values[1]] if target is aten.sym_size.int else target(*values)
        )
        return node
