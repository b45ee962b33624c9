"""What SDPA and eager attention share on their way to the canonical form: heads, shapes, checks."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from . import nodes, views
from .graph_types import Attention
from .nodes import may_equal, rank, same, same_shape, shape
from .views import constant

CHUNK = 4  # head dims are coded in chunks of four


class Unsupported(Exception):
    """An attention, but not one that can be rewritten; carries the reason."""


def is_regroup(node: Node) -> bool:
    """A view between `[B, H, n, T]` and `[B * H, n, T]`."""
    if node.target not in views.RESHAPES or not nodes.is_tensor(node.args[0]):
        return False
    ranks = {rank(node), rank(node.args[0])}
    return ranks <= {3, 4} and same_shape(shape(node)[-2:], shape(node.args[0])[-2:])


def four_dims(node: Node, path: list[Node], role: str) -> Node:
    """`[B, H, ., .]` behind a tensor that may be grouped as `[B * H, ., .]`."""
    if rank(node) == 4:
        return node
    inner = views.strip_noops(node, path)
    if is_regroup(inner) and rank(inner.args[0]) == 4:
        path.append(inner)
        return inner.args[0]
    raise Unsupported(f"{role} is not [B, H, T, D]")


def set_key_value(attention: Attention, key: Node, value: Node, gqa: bool) -> None:
    key = four_dims(key, attention.key_path, "key")
    value = four_dims(value, attention.value_path, "value")
    if rank(attention.query) != 4:
        raise Unsupported("query is not [B, H, n, D]")
    attention.key, key_groups = views.strip_expansion(key, attention.key_path)
    attention.value, value_groups = views.strip_expansion(value, attention.value_path)
    if key_groups != value_groups:
        raise Unsupported("keys and values are repeated differently")
    attention.groups = key_groups
    heads, kv_heads = shape(attention.query)[1], shape(key)[1]
    if gqa and not same(heads, kv_heads):
        if not isinstance(heads, int) or not isinstance(kv_heads, int) or heads % kv_heads:
            raise Unsupported("query heads are not a multiple of KV heads")
        attention.groups *= heads // kv_heads
    elif isinstance(heads, int) and same(kv_heads, 1) and same(shape(value)[1], 1):
        attention.groups *= heads  # a single KV head is broadcast


def scale_of(scale: Any) -> float | None:
    if scale is None or isinstance(scale, (int, float)):
        return scale
    number = constant(scale)
    if number is None:
        raise Unsupported("scale is not a constant")
    return number


def check(attention: Attention) -> None:
    """Shapes and dtypes that the fused op takes."""
    query, key, value = attention.query, attention.key, attention.value
    if rank(key) != 4 or rank(value) != 4:
        raise Unsupported("key or value is not [B, H, T, D]")
    head_dim, value_dim = shape(query)[3], shape(value)[3]
    if not (isinstance(head_dim, int) and isinstance(value_dim, int)):
        raise Unsupported("head dim is dynamic")
    if head_dim % CHUNK or value_dim % CHUNK:
        raise Unsupported(f"head dim {head_dim} is not a multiple of {CHUNK}")
    batch, heads, tokens = shape(query)[:3]
    if not same(shape(key)[1] * attention.groups, heads) or not same(shape(key)[3], head_dim):
        raise Unsupported("query and key heads do not fit")
    if not all(may_equal(x, y) for x, y in zip(shape(key)[:3], shape(value)[:3], strict=True)):
        raise Unsupported("keys and values have different shapes")
    if not same(shape(key)[0], batch):
        raise Unsupported("key batch is not query batch")
    mask = attention.mask
    if mask is None:
        return
    if not nodes.is_tensor(mask):
        raise Unsupported("mask is not a tensor")
    full = (batch, heads, tokens, shape(key)[2])
    sizes = shape(mask)
    if len(sizes) > 4 or not all(
        same(size, 1) or may_equal(size, whole)
        for size, whole in zip(sizes, full[4 - len(sizes) :], strict=True)
    ):
        raise Unsupported(f"mask of shape {list(sizes)} does not fit [B, H, n, T]")
