"""Fourth pass: Med3x as a reduction of the graph.

Med3x keeps a chunk exact when its norm is above `multiplier` times the median chunk norm. Where tokens
are encoded as they are written (`window == 0`), that median is a reduction over the tokens of this
call: it goes into the graph as ordinary ATen nodes, visible, fused by inductor, and feeds the write.

With a window the reduction belongs to the packing, 64 tokens at a time and long after their write,
on keys centred by a block mean that does not exist before: there the op computes it, and this pass
inserts nothing.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from ..cache.buffers import LENGTH, Buffers
from ..codec.spec import CHUNK, CacheSpec

aten = torch.ops.aten


def in_graph(spec: CacheSpec) -> bool:
    """Whether the median of this cache is computed in the graph."""
    return bool(spec.med3x) and spec.window == 0 and not spec.rotate


def insert(graph: Graph, spec: CacheSpec, tokens: Node, buffers: list[Node]) -> Node | None:
    """Insert the median of the chunk norms of `tokens` `[B, H, n, D]` at the insertion point.

    Returns the node, `[B, H, n, 1]` (scope "token") or `[1, H, 1, 1]` (scope "batch"), or None.
    """
    if not in_graph(spec):
        return None
    call = graph.call_function
    values = call(aten.to.dtype, (tokens, torch.float32))
    if spec.center == "first":
        named = Buffers(*buffers)
        # The mean is frozen by the first write: then it is the mean of these very tokens.
        first = call(aten.eq.Scalar, (call(aten.select.int, (named.state, 0, LENGTH)), 0))
        fresh = call(aten.to.dtype, (call(aten.mean.dim, (values, [2], True)), torch.float16))
        mean = call(aten.where.self, (first, fresh, named.means))
        values = call(aten.sub.Tensor, (values, call(aten.to.dtype, (mean, torch.float32))))
    chunks = call(aten.unflatten.int, (values, -1, [spec.chunks, CHUNK]))
    norms = call(aten.linalg_vector_norm.default, (chunks, 2, [-1]))
    if spec.med3x_scope == "token":
        result = call(aten.median.dim, (norms, -1, True))
    else:
        pooled = call(
            aten.reshape.default, (call(aten.transpose.int, (norms, 0, 1)), [_heads(tokens), -1])
        )
        result = call(aten.median.dim, (pooled, -1, True))
    median = call(operator.getitem, (result, 0))
    if spec.med3x_scope != "token":
        median = call(aten.reshape.default, (median, [1, _heads(tokens), 1, 1]))
    return median


def _heads(tokens: Node) -> int:
    return tokens.meta["val"].shape[1]
