"""The `"hqmq"` backend of `torch.compile`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._inductor.compile_fx import compile_fx
from torch.fx import GraphModule

from . import ops  # noqa: F401  registers the ops
from .config import HQMQConfig
from .explain import GraphReport, record

log = logging.getLogger("hqmq.backend")


def hqmq(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable:
    """Compile a Dynamo graph with every KV cache in it packed, and inductor for the rest.

    Args:
        gm, example_inputs: as Dynamo passes them.
        mode: a mode of `torch.compile` ("reduce-overhead", ...), forwarded to inductor.
        options: `{"config": HQMQConfig}` or `{"preset": name}`, and any option of inductor.

    Raises:
        ValueError: an unknown option; the message lists the known ones.

    Stateless: `generate` deep-copies it. Only inference is rewritten: with grad enabled and an input
    that requires it, the graph goes to inductor unchanged, after one warning.
    """
    config, patches = _parse(mode, options)
    inductor = functools.partial(compile_fx, config_patches=patches or None)
    if torch.is_grad_enabled() and _any_grad(gm, example_inputs):
        _warn_once("hqmq: grad is enabled: caches stay as they are (use torch.no_grad())")
        record(GraphReport.unavailable("grad is enabled"), example_inputs)
        return _plain(gm, example_inputs, inductor, "grad is enabled")
    from .passes import pipeline
    from .runtime import CompiledGraph

    try:
        result = pipeline.run(gm, config)
    except Exception as error:
        problem = f"analysis failed: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        log.warning("hqmq: cannot analyse this graph, compiling it unchanged: %s", problem)
        log.debug("hqmq: traceback", exc_info=True)
        record(GraphReport.unavailable(problem), example_inputs)
        return _plain(gm, example_inputs, inductor, problem)
    report = record(GraphReport.of(result), example_inputs)
    for entry in report.attentions:
        if not entry.rewritten and entry.is_cache:
            _warn_once(f"hqmq: not rewritten: {entry.source or entry.cache}: {entry.reason}")
        elif entry.dense:
            _warn_once(
                f"hqmq: packed, but read dense: {entry.source or entry.cache}: {entry.dense}"
            )
    if result.rewritten is None:
        return _plain(gm, example_inputs, inductor, "no attention with a KV cache")
    rewritten = result.rewritten
    inputs = [example_inputs[i] for i in rewritten.kept_args] + rewritten.extra_inputs
    compiled = inductor(rewritten.module, inputs)
    return CompiledGraph(result, compiled, report, config.kernel.value)


def _parse(mode: str | None, options: dict[str, Any] | None) -> tuple[HQMQConfig, dict[str, Any]]:
    options = dict(options or {})
    config = HQMQConfig.from_options(
        {k: options.pop(k) for k in ("config", "preset") if k in options}
    )
    patches = dict(torch._inductor.list_mode_options(mode)) if mode and mode != "default" else {}
    known = torch._inductor.list_options()
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ValueError(
                f"hqmq: unknown option {key!r}; known are 'config', 'preset', and inductor's own"
                " (torch._inductor.list_options())"
            )
        patches[name] = value
    return config, patches


def _any_grad(gm: GraphModule, example_inputs: Sequence[Any]) -> bool:
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)


def _plain(gm, example_inputs, inductor, reason: str) -> Callable:
    """The graph unchanged; packed caches that it reads are unpacked before it runs.

    One that only asks for a size, as graphs between two graph breaks do, does not read.
    """
    from .passes.normalize import is_packed

    placeholders = gm.graph.find_nodes(op="placeholder")
    if not any(is_packed(n.meta.get("example_value")) for n in placeholders):
        return inductor(gm, example_inputs)
    from .passes.normalize import normalize
    from .runtime import UnmatchedGraph

    traced, infos = normalize(gm)
    traced.graph.eliminate_dead_code()
    kept, inputs = [], []
    for node, info, x in zip(
        traced.graph.find_nodes(op="placeholder"), infos, example_inputs, strict=True
    ):
        if info.packed and not node.users:
            traced.graph.erase_node(node)
        else:
            kept.append(info.index)
            inputs.append(info.value if info.packed else x)
    traced.recompile()
    return UnmatchedGraph(inductor(traced, inputs), kept, reason)


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)
