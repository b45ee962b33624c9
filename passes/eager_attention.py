"""Eager attention, walked from its softmax up to the logits' and down to the values' product."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch.fx import Node

from . import nodes, views
from .attention_form import Unsupported, check, four_dims, is_regroup, set_key_value
from .graph_types import Attention
from .nodes import arg, aten, rank, same, same_shape, shape
from .views import constant

SOFTMAX = {aten.softmax.int, aten._softmax.default, aten._safe_softmax.default}
MATMUL = {aten.matmul.default, aten.bmm.default}
PRODUCTS = MATMUL | {aten.baddbmm.default, aten.einsum.default}
ADD = {aten.add.Tensor, aten.add_.Tensor}
SUB = {aten.sub.Tensor, aten.sub_.Tensor}
MUL = {aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar}
DIV = {aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar}
MASKED_FILL = {
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
}
WHERE = {aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf}
TANH = {aten.tanh.default, aten.tanh_.default}
MASKED = -1e4  # a fill at least as low as this excludes a key


def from_softmax(softmax: Node, live: set[Node]) -> Attention | None:
    """The eager attention around a softmax, or None when there are no two products around it."""
    up, down = _product_above(softmax), _product_below(softmax)
    if up is None or down is None:
        return None
    attention = Attention(down, "eager", nodes=[up, softmax, down])
    try:
        if arg(softmax, "dim") not in (-1, rank(softmax) - 1):
            raise Unsupported("softmax is not over the last dim")
        for product in (up, down):
            if product.target not in MATMUL:
                attention.form = nodes.op_name(product).removeprefix("aten.")
                raise Unsupported(f"{attention.form} attention is not rewritten yet")
        column = _walk_up(attention, softmax)
        value = _walk_down(attention, softmax, column)
        key = _transposed(attention, attention.nodes[0].args[1])
        attention.query = four_dims(attention.nodes[0].args[0], attention.nodes, "query")
        set_key_value(attention, key, value, gqa=False)
        if attention.scale is None:
            attention.scale = 1.0
        check(attention)
        _check_private(attention, live)
    except Unsupported as error:
        attention.reason = str(error)
    return attention


def _product_above(softmax: Node) -> Node | None:
    """The product that made the logits, reached through nodes of the same shape."""
    todo, seen = [softmax.args[0]], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            return node
        if not nodes.is_tensor(node):
            continue
        inputs = node.args[0] if node.target is aten.cat.default else node.all_input_nodes
        todo.extend(i for i in reversed(inputs) if nodes.is_tensor(i) and _similar(i, node))
    return None


def _similar(a: Node, b: Node) -> bool:
    """Logits before and after one step: equal queries, and equal keys up to one sink column."""
    x, y = shape(a), shape(b)
    if len(x) < 3 or len(y) < 3 or not same(x[-2], y[-2]):
        return False
    return same(x[-1], y[-1]) or same(x[-1] + 1, y[-1])


def _product_below(softmax: Node) -> Node | None:
    """The product of the weights (as left factor) with the values."""
    todo, seen = [softmax], set()
    while todo:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.op != "call_function":
                continue
            if user.target in MATMUL and user.args[0] is node:
                return user
            if user.target is aten.einsum.default:
                return user
            if nodes.is_tensor(user) and user.target not in PRODUCTS and _similar(user, node):
                todo.append(user)
    return None


def _walk_up(attention: Attention, softmax: Node) -> bool:
    """From softmax to the product of query and key; fills mask, softcap, sinks, scale and nodes.

    `attention.nodes` then starts with the product. Returns whether a sink column was appended.
    """
    node, walked = softmax.args[0], [softmax]
    has_sinks = False
    while True:
        if not isinstance(node, Node):
            raise Unsupported("logits are not a tensor")
        target = node.target
        walked.append(node)
        if target in MATMUL:
            break
        if views.is_noop(node) or views.is_cast(node) or is_regroup(node):
            node = node.args[0]
        elif target in SUB and _is_row_max(node.args[1], node.args[0], walked):
            node = node.args[0]  # softmax does not change when the row's maximum is taken off
        elif target is aten.cat.default and not has_sinks and attention.mask is None:
            node, attention.sinks = _sinks(node, walked)
            has_sinks = True
        elif target in ADD and _has_product(node.args[0]) != _has_product(node.args[1]):
            if arg(node, "alpha") != 1:
                raise Unsupported("mask added with a factor")
            left = _has_product(node.args[0])
            node = _take_mask(attention, node.args[1 if left else 0], node.args[0 if left else 1])
        elif target in MASKED_FILL:
            _check_fill(node.args[2])
            node = _take_mask(attention, _inverted(node, node.args[1]), node.args[0])
        elif target in WHERE:
            node = _where(attention, node)
        elif target in MUL | DIV:
            node = _scaling(attention, node, walked)
        else:
            raise Unsupported(f"{nodes.where(node)} between logits and softmax")
    attention.nodes = walked[::-1]
    return has_sinks


def _has_product(node: Any) -> bool:
    """Whether logits lie behind `node` (rather than a mask)."""
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if not isinstance(node, Node) or node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            return True
        todo.extend(i for i in node.all_input_nodes if nodes.is_tensor(i) and _similar(i, node))
    return False


def _take_mask(attention: Attention, mask: Any, logits: Any) -> Node:
    if attention.softcap is not None or attention.scale is not None:
        raise Unsupported("logits are scaled after the mask")
    if not isinstance(mask, Node):
        raise Unsupported("mask is not a tensor")
    attention.mask = mask if attention.mask is None else _both(attention.mask, mask)
    return logits


def _both(later: Node, earlier: Node) -> Node:
    """One mask for two, such as a position bias and a causal mask; bool ones mean True = attend.

    It stands behind the one that comes last in the graph, and so in front of the logits that take it.
    """
    if any(rank(m) == 3 for m in (later, earlier)):  # of logits that are folded, or not
        raise Unsupported("two masks, one of three dims")
    order = {node: i for i, node in enumerate(later.graph.nodes)}
    last = max(later, earlier, key=order.__getitem__)
    hidden = [m for m in (later, earlier) if nodes.value_of(m).dtype == torch.bool]
    if len(hidden) == 2:
        return nodes.emit(last.graph, aten.logical_and.default, (later, earlier), after=last)
    if not hidden:
        return nodes.emit(last.graph, aten.add.Tensor, (earlier, later), after=last)
    added = later if hidden[0] is earlier else earlier
    inverted = nodes.emit(last.graph, aten.logical_not.default, (hidden[0],), after=last)
    return nodes.emit(
        last.graph, aten.masked_fill.Scalar, (added, inverted, -math.inf), after=inverted
    )


def _check_fill(fill: Any) -> None:
    number = constant(fill)
    if number is None or not number <= MASKED:
        raise Unsupported(f"masked logits are filled with {fill}")


def _where(attention: Attention, node: Node) -> Node:
    """`where(mask, logits, -inf)` or `where(mask, -inf, logits)`."""
    condition, yes, no = node.args[:3]
    if _has_product(yes) and not _has_product(no):
        _check_fill(no)
        return _take_mask(attention, condition, yes)
    _check_fill(yes)
    return _take_mask(attention, _inverted(node, condition), no)


def _inverted(node: Node, mask: Any) -> Any:
    """A mask with True = attend, in front of `node`, from one with True = do not."""
    if not nodes.is_tensor(mask):
        return mask
    with node.graph.inserting_before(node):
        inverted = node.graph.call_function(aten.logical_not.default, (mask,))
    value = nodes.value_of(mask)
    with value.fake_mode:
        inverted.meta = {**mask.meta, "val": torch.logical_not(value)}
    return inverted


def _scaling(attention: Attention, node: Node, walked: list[Node]) -> Node:
    """A factor on the logits, or the outer factor of `cap * tanh(logits / cap)`."""
    inner, factor = node.args[:2]
    if constant(inner) is not None:
        inner, factor = factor, inner
    number = constant(factor)
    if number is None or (inner is not node.args[0] and node.target in DIV):
        raise Unsupported(f"logits scaled by a tensor ({nodes.where(node)})")
    factor = 1 / number if node.target in DIV else number
    below = inner
    skipped = []
    while views.is_noop(below) or views.is_cast(below):
        skipped.append(below)
        below = below.args[0]
    if below.target in TANH:
        if attention.softcap is not None or attention.scale is not None:
            raise Unsupported("logits are scaled after the softcap")
        walked.extend([*skipped, below])
        attention.softcap = factor
        # cap * tanh(x) caps the logits cap * x; the division below takes the cap out again.
        attention.scale = factor
        return below.args[0]
    attention.scale = factor * (1.0 if attention.scale is None else attention.scale)
    return inner


def _is_row_max(node: Any, logits: Node, walked: list[Node]) -> bool:
    if not isinstance(node, Node):
        return False
    nodes = [node]
    if node.target is operator.getitem and node.args[1] == 0:
        node = node.args[0]
        nodes.append(node)
    if node.target not in (aten.max.dim, aten.amax.default) or node.args[0] is not logits:
        return False
    dim = node.args[1][0] if isinstance(node.args[1], (list, tuple)) else node.args[1]
    if dim not in (-1, rank(logits) - 1) or not arg(node, "keepdim"):
        return False
    walked.extend(nodes)
    return True


def _sinks(cat: Node, walked: list[Node]) -> tuple[Node, Node]:
    """Logits and `[Hq]` sinks of `cat([logits, sinks], -1)`."""
    parts = cat.args[0]
    if len(parts) != 2 or arg(cat, "dim") not in (-1, rank(cat) - 1):
        raise Unsupported(f"{nodes.where(cat)} between logits and softmax")
    logits, column = parts
    heads = shape(cat)[1]
    if rank(cat) != 4 or not same(shape(column)[-1], 1):
        raise Unsupported("logits concatenated with something that is no sink column")
    node = column
    while rank(node) != 1:
        known = views.RESHAPES | views.EXPANDS | views.CASTS | views.COPIES
        if node.target not in known or not nodes.is_tensor(node.args[0]):
            raise Unsupported("sinks are not one number per head")
        walked.append(node)
        # One number per head all the way: the only dim besides broadcast ones is the heads'.
        if rank(node) == 4 and not same(shape(node)[1], heads):
            raise Unsupported("sinks are not one number per head")
        node = node.args[0]
    if not same(shape(node)[0], heads):
        raise Unsupported("sinks are not one number per head")
    return logits, node


def _walk_down(attention: Attention, softmax: Node, column: bool) -> Node:
    """From softmax to the product with the values; returns the values' node."""
    node = softmax
    while True:
        users = [u for u in node.users if u.target not in nodes.SIZE_OPS]
        step = next((u for u in users if u.target in MATMUL and u.args[0] is node), None)
        if step is not None:
            break
        step = next((u for u in users if _reaches(u, attention.node)), None)
        if step is None:
            raise Unsupported("weights do not reach the values")
        if step.target in (aten.dropout.default, aten.native_dropout.default):
            if not views.is_noop(step):
                raise Unsupported("dropout in attention")
        elif column and _drops_last(step, node):
            column = False
        elif not (views.is_noop(step) or views.is_cast(step) or is_regroup(step)):
            raise Unsupported(f"{nodes.where(step)} between softmax and values")
        attention.nodes.append(step)
        node = step
    if column:
        raise Unsupported("the sinks' column is not dropped")
    attention.nodes.append(step)
    value = step.args[1]
    if rank(step) == 3:  # bmm over batch * heads: the 4-D result is the view behind it
        batch, heads = shape(softmax)[:2] if rank(softmax) == 4 else (None, None)
        views_behind = [u for u in step.users if u.target in views.RESHAPES and rank(u) == 4]
        if len(views_behind) != 1 or len(step.users) != 1:
            raise Unsupported("the result of bmm is not viewed as [B, H, n, D]")
        step = views_behind[0]
        if batch is not None and not same_shape(shape(step)[:2], (batch, heads)):
            raise Unsupported("the result of bmm is not viewed as [B, H, n, D]")
        attention.nodes.append(step)
    attention.node = step
    return value


def _reaches(node: Node, goal: Node) -> bool:
    todo, seen = [node], set()
    while todo:
        node = todo.pop()
        if node is goal:
            return True
        if node not in seen:
            seen.add(node)
            todo.extend(u for u in node.users if len(seen) < 16)
    return False


def _drops_last(node: Node, before: Node) -> bool:
    """`before[..., :-1]`."""
    return (
        node.target is aten.slice.Tensor
        and arg(node, "dim") in (-1, rank(before) - 1)
        and arg(node, "start") in (0, None)
        and same(shape(node)[-1] + 1, shape(before)[-1])
    )


def _transposed(attention: Attention, node: Node) -> Node:
    """The key `[.., T, D]` behind the right factor `[.., D, T]` of the logits."""
    path = attention.key_path
    total = None
    while True:
        if views.is_noop(node):
            path.append(node)
            node = node.args[0]
            continue
        if _is_scaled(node):
            node = _take_scale(attention, node)
            continue
        inner = views.permutation(node)
        if inner is None and rank(node) == 4:
            return _turned(attention, node, total or (0, 1, 2, 3))
        if inner is None:
            raise Unsupported(f"key is not a transposed tensor ({nodes.where(node)})")
        total = inner if total is None else tuple(inner[i] for i in total)
        path.append(node)
        node = node.args[0]
        dims = len(total)
        if total == (*range(dims - 2), dims - 1, dims - 2):
            break
    while _is_scaled(node):
        node = _take_scale(attention, node)
    return node


def _turned(attention: Attention, node: Node, total: tuple[int, ...]) -> Node:
    """`[B, H, T, D]` of a tensor in another layout, which `total` turned into `[B, H, D, T]`."""
    order = [*total[:2], total[3], total[2]]
    key = nodes.emit(node.graph, aten.permute.default, (node, order), before=attention.nodes[0])
    attention.key_path.extend([node, key])
    return key


def _is_scaled(node: Node) -> bool:
    return node.target in MUL | DIV and constant(node.args[1]) is not None


def _take_scale(attention: Attention, key: Node) -> Node:
    """A factor on the keys is a factor on the logits."""
    factor = constant(key.args[1])
    factor = 1 / factor if key.target in DIV else factor
    attention.scale = factor * (1.0 if attention.scale is None else attention.scale)
    attention.key_path.append(key)
    return key.args[0]


def _check_private(attention: Attention, live: set[Node]) -> None:
    """Nothing outside of the attention may read its logits or weights."""
    inside = set(attention.nodes)
    computed = {next(node for node in attention.nodes if node.target in MATMUL)}
    grown = True
    while grown:
        more = {n for n in inside - computed if any(i in computed for i in n.all_input_nodes)}
        grown = bool(more)
        computed |= more
    for node in computed - {attention.node}:
        for user in node.users:
            if user in live and user not in inside and user.target not in nodes.SIZE_OPS:
                raise Unsupported(f"attention weights are read by {nodes.where(user)}")
