"""How many sequences fit: caches really allocated on the device, beside the weights of the model.

The `--fit` part of `benchmarks/end_to_end.py`. For each batch tried, the caches of all layers are
allocated as they are while decoding, and `reserve` bytes more for what a step needs besides.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from hqmq_compile.cache.buffers import allocate, static_blocks
from hqmq_compile.config import HQMQConfig

from . import gpu, kv_data, shapes
from .common import Table
from .decode_session import HQMQ, SPLIT_KV, run_contender

Make = Callable[[int], list[torch.Tensor]]  # the caches of a batch


def dense(config: Any, batch: int, slots: int, device: str) -> list[torch.Tensor]:
    """The 16-bit caches of all layers."""
    layers, heads, dim = shapes.dims(config)
    options = {"dtype": torch.bfloat16, "device": device}
    return [torch.empty(batch, heads, slots, dim, **options) for _ in range(2 * layers)]


def packed(
    config: Any, recipe: HQMQConfig, batch: int, slots: int, device: str
) -> list[torch.Tensor]:
    """The buffers of the packed caches of all layers."""
    layers, heads, dim = shapes.dims(config)
    made: list[torch.Tensor] = []
    for _ in range(layers):
        for spec in kv_data.specs(recipe, dim, torch.bfloat16):
            made += allocate(spec, batch, heads, static_blocks(spec, slots), device)
    return made


def fits(make: Make, batch: int, reserve: int, device: str) -> int:
    """Bytes of what `make(batch)` allocates beside `reserve` bytes, 0 if there is no room."""
    held = []
    try:
        held = [torch.empty(reserve, dtype=torch.uint8, device=device), *make(batch)]
        return sum(t.nbytes for t in held[1:])
    except torch.OutOfMemoryError:
        return 0
    finally:
        held.clear()
        gpu.free()


def largest(make: Make, guess: int, reserve: Callable[[int], int], device: str) -> tuple[int, int]:
    """The largest batch that fits, by bisection up to twice `guess`, and the bytes of its caches."""
    low, high, size = 0, 2 * guess + 2, 0
    while high - low > 1:
        middle = (low + high) // 2
        found = fits(make, middle, reserve(middle), device)
        low, high = (middle, high) if found else (low, middle)
        size = found or size
    return low, size


def fit(arguments: argparse.Namespace, device: str) -> Table:
    """The largest batches of bf16 and packed caches, beside the weights of the first model."""
    (name, context, _), *_ = arguments.cases or [("llama-3-8b", 32768, 1)]
    model = shapes.build(name, arguments.layers, device)
    config, slots = model.config, context + 128
    sequence, kept = shapes.cache_bytes(config, slots), arguments.reserve << 30
    room = torch.cuda.mem_get_info()[1] - torch.cuda.memory_allocated() - kept
    guess = max(1, room // sequence)
    table = Table(
        f"Largest batch at {context // 1024}k, {name}",
        ("cache", "batch", "of bf16's", "GiB", "step"),
    )
    table.notes.append(f"{arguments.reserve} GiB are kept for activations. Promised: 3.3 times.")
    if arguments.verify:
        table.notes.append(
            "For hqmq the bf16 cache of one layer fits, too: it is filled through it."
        )
    recipe = HQMQConfig.preset(arguments.preset)

    def filling(batch: int) -> int:
        return kept + (batch * sequence // config.num_hidden_layers if arguments.verify else 0)

    wide = largest(lambda n: dense(config, n, slots, device), guess, lambda n: kept, device)
    narrow = largest(lambda n: packed(config, recipe, n, slots, device), 4 * guess, filling, device)
    for title, contender, (batch, size) in (
        ("bf16", SPLIT_KV, wide),
        (f"hqmq {arguments.preset}", HQMQ, narrow),
    ):
        step = "not run"
        if arguments.verify:
            try:
                result = run_contender(model, contender, context, batch, arguments)
                step = f"{result.step:.1f} ms, peak {result.peak / 2**30:.1f} GiB"
            except Exception as error:
                step = gpu.one_line(error)
        gpu.say(table, title, batch, f"{batch / wide[0]:.2f}", f"{size / 2**30:.1f}", step)
    return table
