"""Find every attention of a normalised graph and bring it to one form (`graph_types.Attention`).

SDPA is one node. Eager attention is walked from its softmax: up through casts, sinks, mask,
softcap and scale to the matmul of query and transposed key, down through casts and dropout to the
matmul with the values. A softmax without both matmuls (a MoE router) is none. What is recognised
as an attention but has a form that cannot be rewritten is returned with its `reason`.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from . import nodes
from .attention_form import Unsupported, check, scale_of, set_key_value
from .eager_attention import SOFTMAX, from_softmax
from .graph_types import Attention
from .nodes import arg, aten

SDPA = aten.scaled_dot_product_attention.default


def find_attention(graph: Graph) -> list[Attention]:
    """All attentions of `graph` in program order, those with a `reason` set included.

    Args:
        graph: a graph made by `normalize`. A `logical_not` of a mask may be added, nothing else.
    """
    found = []
    live = nodes.live_nodes(graph)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        attention = None
        if node.target is SDPA:
            attention = _from_sdpa(node)
        elif node.target in SOFTMAX:
            attention = from_softmax(node, live)
        elif "flex_attention" in str(node.target) and node.target is not operator.getitem:
            attention = _from_flex(node)
        if attention is not None:
            attention.source = nodes.source_line(attention.node)
            attention.module = nodes.module_path(attention.node)
            found.append(attention)
    order = {node: place for place, node in enumerate(graph.nodes)}
    for attention in found:
        attention.nodes = sorted(set(attention.nodes), key=order.__getitem__)
    return sorted(found, key=lambda attention: order[attention.node])


def _from_sdpa(node: Node) -> Attention:
    attention = Attention(node, "sdpa", nodes=[node])
    try:
        if arg(node, "dropout_p") != 0:
            raise Unsupported("dropout in attention")
        attention.query, key, value = (arg(node, name) for name in ("query", "key", "value"))
        attention.scale = scale_of(arg(node, "scale"))
        attention.causal = bool(arg(node, "is_causal"))
        attention.mask = arg(node, "attn_mask")
        set_key_value(attention, key, value, gqa=bool(arg(node, "enable_gqa")))
        check(attention)
    except Unsupported as error:
        attention.reason = str(error)
    return attention


def _from_flex(node: Node) -> Attention:
    query, key, value = (a if isinstance(a, Node) else None for a in node.args[:3])
    return Attention(
        node,
        "flex",
        query,
        key,
        value,
        nodes=[node],
        reason="flex_attention is not rewritten yet",
    )
