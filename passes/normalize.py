"""First pass: pre-dispatch ATen of a copy of the Dynamo graph.

At this level each attention and each cache update has one spelling per kind (SDPA is one node,
masks and group expansion are still visible, writes are still in place), and inductor compiles the
result as it would the original. Nothing is functionalised, so program order is meaning.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch._guards
import torch.fx.traceback
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten

PLACEHOLDER_META = ("tensor_dict", "steal_arg")
MODULE_FIELDS = ("_param_name_to_source", "_source_to_user_stacks")


@dataclasses.dataclass(frozen=True)
class PlaceholderInfo:
    """What is known of one graph input, in calling order.

    Attributes:
        index: place in the argument list.
        name: name of the placeholder in the Dynamo graph.
        source: Dynamo source, such as `L['kwargs']['cache'].layers[0].keys`, or "".
        value: what the input is traced as: a plain fake tensor, a SymInt, or a constant.
        packed: the example is an HQMQTensor (a wrapper subclass with `_is_hqmq = True`).
    """

    index: int
    name: str
    source: str
    value: Any
    packed: bool


def normalize(
    gm: GraphModule, fake_inputs: Sequence[Any] | None = None
) -> tuple[GraphModule, list[PlaceholderInfo]]:
    """Trace `gm` to pre-dispatch ATen, under no_grad, without touching it or its fake tensors.

    Args:
        gm: the graph as Dynamo hands it to a backend; it is not modified.
        fake_inputs: one example per placeholder (fake tensors of one mode, SymInts, constants);
            None takes them from the placeholders' `example_value`.

    Returns:
        The traced module (same inputs, same flat tuple of outputs) and a PlaceholderInfo per input.
        Every node keeps `stack_trace` and `nn_module_stack`; `meta["val"]` holds fake values; the
        placeholders also keep `_dynamo_source`, `tensor_dict`, and a `meta["hqmq_source"]` string.

    Raises:
        ValueError: the number of examples and placeholders differ.
        NotImplementedError: the graph vmaps inside (as `create_block_mask` does).
        Exception: whatever tracing raises for ops it cannot trace; the caller then compiles `gm`.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if fake_inputs is None:
        fake_inputs = [node.meta.get("example_value") for node in placeholders]
    if len(fake_inputs) != len(placeholders):
        raise ValueError(f"{len(placeholders)} placeholders but {len(fake_inputs)} examples")

    mode = _fake_mode(fake_inputs)
    infos, values = [], []
    with mode or contextlib.nullcontext(), torch.no_grad():
        for index, (node, example) in enumerate(zip(placeholders, fake_inputs, strict=True)):
            packed = is_packed(example)
            value = _plain_fake(example) if isinstance(example, FakeTensor) or packed else example
            infos.append(PlaceholderInfo(index, node.name, source_name(node), value, packed))
            values.append(value)

    # tracing(None): the ambient tracing context is Dynamo's, whose fake mode would be mixed in.
    with (
        torch._guards.tracing(None),
        mode or contextlib.nullcontext(),
        torch.no_grad(),
        torch.fx.traceback.preserve_node_meta(),
    ):
        traced = make_fx(_Tracer(gm).run, pre_dispatch=True)(*values)

    _copy_metadata(gm, traced, infos)
    _inline_constants(traced)
    _drop_detach(traced.graph)
    traced.graph.lint()
    traced.recompile()
    return traced, infos


class _Tracer(Interpreter):
    """Runs the Dynamo graph; floats that `dynamic=True` made inputs are specialised by a guard.

    What touches a wrapper subclass (a DTensor, a quantized weight) or an opaque object (its device
    mesh) stays the call that Dynamo wrote: torch unwraps subclasses below this level. So collectives
    of DTensors are left to inductor, and only plain tensors become ATen.
    """

    def run_node(self, n: Node) -> Any:
        self.node = n
        value = n.meta.get("example_value")
        if n.op == "call_method" and n.target == "item" and isinstance(value, torch.SymFloat):
            return float(value)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if self._is_opaque(args, kwargs):
            return self._as_it_is(target, args, kwargs)
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if self._is_opaque(args, kwargs):
            return self._as_it_is(target, args, kwargs)
        return super().call_method(target, args, kwargs)

    def _is_opaque(self, args: tuple, kwargs: dict) -> bool:
        values = tree_leaves((args, kwargs, self.node.meta.get("example_value")))
        return any(isinstance(v, FakeScriptObject) or is_subclass(v) for v in values)

    def _as_it_is(self, target: Any, args: tuple, kwargs: dict) -> Any:
        tracer = get_proxy_mode().tracer
        args, kwargs = tree_map(tracer.unwrap_proxy, (args, kwargs))
        proxy = tracer.create_proxy(self.node.op, target, args, kwargs)
        with disable_proxy_modes_tracing():
            result = tree_map(
                lambda v: _plain_fake(v) if isinstance(v, FakeTensor) else v,
                self.node.meta.get("example_value"),
            )
            return track_tensor_tree(result, proxy, constant=None, tracer=tracer)


def is_subclass(value: Any) -> bool:
    """Whether `value` is a wrapper subclass whose inside torch unwraps below pre-dispatch ATen."""
    return isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value)


def is_packed(value: Any) -> bool:
    """Whether `value` is an HQMQTensor (or a fake of one), told without importing the class."""
    return isinstance(value, torch.Tensor) and getattr(value, "_is_hqmq", False)


def source_name(node: Node) -> str:
    """Dynamo source of a placeholder as a string (`name` is a method before torch 2.12), or ""."""
    source = getattr(node, "_dynamo_source", None)
    if source is None:
        source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name
    return name if isinstance(name, str) else name()


def _fake_mode(values: Sequence[Any]) -> FakeTensorMode | None:
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        if is_packed(value):
            inner = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
            found = _fake_mode(inner)
            if found is not None:
                return found
    return None


def _plain_fake(value: torch.Tensor) -> torch.Tensor:
    """A fresh fake tensor of the same metadata: mutations in the graph stay in the graph."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def _copy_metadata(gm: GraphModule, traced: GraphModule, infos: list[PlaceholderInfo]) -> None:
    """Carry over what AOT autograd reads of a Dynamo graph: sources, static inputs, its id."""
    traced.meta.update(gm.meta)
    for field in MODULE_FIELDS:
        if hasattr(gm, field):
            setattr(traced, field, dict(getattr(gm, field)))
    olds = gm.graph.find_nodes(op="placeholder")
    news = traced.graph.find_nodes(op="placeholder")
    for old, new, info in zip(olds, news, infos, strict=True):
        for key in PLACEHOLDER_META:
            if key in old.meta:
                new.meta[key] = copy.copy(old.meta[key])
        new.meta.setdefault("val", info.value)
        new.meta["hqmq_source"] = info.source
        new.meta["hqmq_packed"] = info.packed
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        elif old.meta.get("grapharg") is not None:
            new._dynamo_source = old.meta["grapharg"].source


def _inline_constants(traced: GraphModule) -> None:
    """Turn lifted constants into nodes: AOT autograd knows no source for `_tensor_constant0`.

    Empty and uniform tensors (`torch.tensor([-1])`, the empty past of a cache) become `empty` and
    `full`; others stay attributes and get a source of their own.
    """
    graph = traced.graph
    for node in graph.find_nodes(op="get_attr"):
        value = getattr(traced, node.target, None) if "." not in node.target else None
        if not isinstance(value, torch.Tensor):
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise NotImplementedError("the graph traces through a torch.func transform")
        real = getattr(value, "constant", None) if isinstance(value, FakeTensor) else value
        fill = _uniform_value(value, real)
        if fill is None:
            if hasattr(traced, "_param_name_to_source"):
                from torch._dynamo.source import LocalSource

                traced._param_name_to_source.setdefault(
                    node.target, LocalSource(f"__hqmq{node.target}")
                )
            continue
        # A fresh tensor each call, so the copy that `lift_fresh_copy` makes is not needed.
        kwargs = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        with graph.inserting_before(node):
            if value.numel() == 0:
                new = graph.call_function(aten.empty.memory_format, (list(value.shape),), kwargs)
            else:
                new = graph.call_function(aten.full.default, (list(value.shape), fill), kwargs)
        new.meta = dict(node.meta)
        for user in list(node.users):
            if user.target is aten.lift_fresh_copy.default:
                new.meta = dict(user.meta)
                user.replace_all_uses_with(new)
                graph.erase_node(user)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if not graph.find_nodes(op="get_attr", target=node.target):
            delattr(traced, node.target)


def _uniform_value(value: torch.Tensor, real: torch.Tensor | None) -> int | float | bool | None:
    """The one number that a constant consists of, 0 for an empty one, None for any other."""
    if value.numel() == 0:
        return 0
    if real is None or isinstance(real, FakeTensor) or real.is_complex():
        return None
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        first = real.flatten()[0]
        return first.item() if bool((real == first).all()) else None


def _drop_detach(graph: torch.fx.Graph) -> None:
    """Remove `detach_`: without grad it is the identity, but counts as a mutation."""
    for node in graph.find_nodes(op="call_function", target=aten.detach_.default):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def output_args(graph: torch.fx.Graph) -> tuple[Any, ...]:
    """The flat tuple of outputs of a normalised graph."""
    (output,) = graph.find_nodes(op="output")
    outputs = output.args[0]
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def is_getitem(node: Node) -> bool:
    """Whether `node` picks one result of an op with several."""
    return node.op == "call_function" and node.target is operator.getitem
