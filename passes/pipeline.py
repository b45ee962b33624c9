"""The passes in their order, with the time each took and what it found.

normalize        pre-dispatch ATen of a copy of the Dynamo graph
find_attention   every attention, in canonical form
layouts          caches stored in another layout get a view [B, H, L, D] a part
find_caches      every KV cache: its kind, its write, its readers
read_dense       caches of attentions that cannot read packed bits: packed all the same
med3x            the chunk-norm median as a reduction of the graph (called by rewrite, per cache)
rewrite          attention + writes become one `hqmq::write_attend`
cleanup          dead masks, views, casts
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule

from ..config import HQMQConfig
from .cleanup import cleanup
from .find_attention import find_attention
from .find_caches import find_caches
from .graph_types import Match
from .layouts import one_layout, refuse_incomplete
from .normalize import PlaceholderInfo, normalize
from .read_dense import read_dense
from .rewrite import Rewritten, layer_of, rewrite
from .slots import start_evaluator

log = logging.getLogger("hqmq.passes")


@dataclasses.dataclass(eq=False)
class Result:
    """What the pipeline made of one graph.

    Attributes:
        original: the normalised graph, not rewritten: what runs when a cache cannot be adopted.
        infos: one per input of the Dynamo graph.
        matches: every attention, and every tensor that looks like a cache; `reason` says why one was
            left alone.
        rewritten: None when nothing matched.
        starts: per binding, a function from the arguments to the first slot written, or None.
        seconds: time of each pass.
    """

    original: GraphModule
    infos: list[PlaceholderInfo]
    matches: list[Match]
    rewritten: Rewritten | None
    starts: list[Callable[[list[Any]], int] | None]
    seconds: dict[str, float]


def run(gm: GraphModule, config: HQMQConfig, *, analyze_only: bool = False) -> Result:
    """Run all passes on a copy of the Dynamo graph `gm`."""
    seconds: dict[str, float] = {}

    def timed(name: str, function, *args):
        begin = time.perf_counter()
        result = function(*args)
        seconds[name] = time.perf_counter() - begin
        log.debug("%s: %.1f ms", name, 1e3 * seconds[name])
        return result

    traced, infos = timed("normalize", normalize, gm)
    attentions = timed("find_attention", find_attention, traced.graph)
    attentions = timed("layouts", one_layout, traced.graph, attentions)
    matches = timed("find_caches", find_caches, traced.graph, attentions)
    matches = timed("read_dense", read_dense, traced.graph, matches)
    _apply_policy(matches, config)
    refuse_incomplete(matches)
    found = sum(m.reason is None for m in matches)
    log.debug("matched %d of %d", found, len(matches))
    if not found or analyze_only:
        return Result(traced, infos, matches, None, [], seconds)
    original = _copy(traced)
    by_name = {node.name: node for node in original.graph.nodes}
    log.debug("before the rewrite:\n%s", traced.graph)
    rewritten = timed("rewrite", rewrite, traced, infos, matches, config)
    timed("cleanup", cleanup, rewritten.module)
    log.debug("after the rewrite:\n%s", rewritten.module.graph)
    starts = [
        start_evaluator(original, b.start if isinstance(b.start, int) else by_name[b.start.name])
        for b in rewritten.bindings
    ]
    return Result(original, infos, matches, rewritten, starts, seconds)


def _copy(module: GraphModule) -> GraphModule:
    graph, env = Graph(), {}
    output = graph.graph_copy(module.graph, env)
    graph.output(output)
    for old, new in env.items():
        new.meta = copy.copy(old.meta)
    return GraphModule(module, graph)


def _apply_policy(matches: list[Match], config: HQMQConfig) -> None:
    """What the config, or the state of the art here, leaves out."""
    for order, match in enumerate(matches):
        if match.reason is not None or not match.writes:
            continue
        layer = layer_of(match, order)
        if layer in config.layers and config.layers[layer] is None:
            match.reason = f"layer {layer} is excluded by config.layers"
            continue
        for write in match.writes:
            value = write.tokens.meta["val"]
            try:
                config.spec("key", value.shape[-1], value.dtype, layer)
            except ValueError as error:
                match.reason = str(error)
