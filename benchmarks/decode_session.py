"""One decoding session of a whole model: a compiled forward, a filled cache, and what its steps take.

For `benchmarks/end_to_end.py`, whose docstring says how caches are filled.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch

from hqmq_compile.cache.adopt import adopt, swap_out
from hqmq_compile.config import HQMQConfig

from . import gpu, kv_data, shapes
from .common import Session


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    backend: str
    kind: str = "static"
    mode: str = "reduce-overhead"
    split_kv: bool = False


SPLIT_KV = Contender("bf16 split-KV", "inductor", split_kv=True)
HQMQ = Contender("hqmq", "hqmq")
INDUCTOR = Contender("inductor", "inductor")
CONTENDERS = (
    SPLIT_KV,
    HQMQ,
    INDUCTOR,
    Contender("hqmq, default mode", "hqmq", mode="default"),
    Contender("inductor, default mode", "inductor", mode="default"),
    Contender("hqmq, DynamicCache", "hqmq", "dynamic", "default"),
    Contender("inductor, DynamicCache", "inductor", "dynamic", "default"),
)


def open_session(model: Any, contender: Contender, length: int) -> Session:
    """A session of `model` compiled as `contender` says, with an empty cache."""
    session = Session(model, None, contender.kind, length)
    if contender.split_kv:
        from . import bf16_split_kv

        session.model.set_attn_implementation(bf16_split_kv.register())
    backend = contender.backend
    if backend == "hqmq":  # the function, so that a checkout need not be installed
        from hqmq_compile.backend import hqmq as backend
    session.model.forward = torch.compile(
        session.model.forward, backend=backend, mode=contender.mode
    )
    return session


def fill(
    session: Session, batch: int, context: int, config: HQMQConfig | None, packed: bool = True
) -> None:
    """Random keys and values in `context` slots of every layer, packed at once if there is a config.

    Not `packed`: plain tensors, of what packed ones hold, so that logits can be compared.
    """
    model, cache = session.model, session.cache
    layers, heads, dim = shapes.dims(model.config)
    heads //= model.tp_size or 1
    options = {"device": model.device, "dtype": model.dtype}
    generator = torch.Generator(model.device).manual_seed(0)
    growing = session.kind == "dynamic"
    for index in range(layers):
        if growing:
            pair = [torch.empty(batch, heads, context, dim, **options) for _ in range(2)]
            kv_data.fill_keys_(pair[0], generator)
            kv_data.fill_values_(pair[1], generator)
            cache.update(*pair, index)
            del pair
            layer = cache.layers[index]
        else:
            one = torch.zeros(batch, heads, 1, dim, **options)
            cache.update(
                one, one, index
            )  # the cache makes its tensors when it sees the first token
            layer = cache.layers[index]
            kv_data.fill_keys_(layer.keys[:, :, :context], generator)
            kv_data.fill_values_(layer.values[:, :, :context], generator)
            layer.cumulative_length.fill_(context)
        for role, tensor in (("key", layer.keys), ("value", layer.values)) if config else ():
            spec = config.spec(role, dim, model.dtype, index)
            written = None if growing else context
            adopt(tensor, spec, written, growing=growing, write=kv_data.write)
            if not packed:
                swap_out(tensor)


def size_of(session: Session) -> int:
    """Bytes of the caches."""
    return sum(t.stored_bytes if hasattr(t, "is_packed") else t.nbytes for t in session.tensors())


@dataclasses.dataclass
class Result:
    step: float  # milliseconds, median
    rate: float  # tokens a second, all steps
    peak: int
    resident: int
    cache: int
    notes: str
    logits: torch.Tensor


def measure(
    session: Session,
    batch: int,
    steps: int,
    warmup: int,
    timed_steps: Callable[[gpu.Call, int], gpu.Steps] | None = None,
) -> Result:
    """Decode `warmup` tokens, which compiles, and then `steps` tokens."""
    from torch._dynamo.utils import counters

    counters.clear()
    logits = session(torch.full((batch, 1), 7, device=session.model.device))
    first = logits.float().cpu()

    def step() -> None:
        nonlocal logits
        token = logits[:, -1:].argmax(-1)
        torch.compiler.cudagraph_mark_step_begin()
        logits = session(token)

    for _ in range(warmup - 1):
        step()
    graphs = counters["stats"]["unique_graphs"]
    timed = (timed_steps or gpu.timed_steps)(step, steps)
    notes = [f"{counters['stats']['unique_graphs']} graphs"]
    if counters["stats"]["unique_graphs"] != graphs:
        notes.append("COMPILED WHILE MEASURED")
    if skips := counters["inductor"]["cudagraph_skips"]:
        notes.append(f"{skips} CUDA graph skips")
    return Result(
        statistics.median(timed.milliseconds),
        batch * steps / timed.seconds,
        timed.peak,
        timed.resident,
        size_of(session),
        ", ".join(notes),
        first,
    )


def run_contender(
    model: Any, contender: Contender, context: int, batch: int, arguments: argparse.Namespace
) -> Result:
    """A session from an empty cache to the result; nothing of it stays allocated."""
    torch._dynamo.reset()
    gpu.free()
    slots = -(-(context + arguments.steps + arguments.warmup) // 64) * 64
    session = open_session(model, contender, slots)
    config, packed = HQMQConfig.preset(arguments.preset), contender.backend == "hqmq"
    try:
        with torch.no_grad():
            fill(session, batch, context, config, packed)
            result = measure(session, batch, arguments.steps, arguments.warmup)
        if packed:
            dense = sum(not getattr(t, "is_packed", False) for t in session.tensors())
            result.notes += f", {dense} CACHES NOT PACKED" if dense else ", all packed"
        return result
    finally:
        session.cache = None
        del session
        torch._dynamo.reset()
        gpu.free()
