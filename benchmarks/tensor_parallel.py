"""Decode steps of a model spread over GPUs: packed caches against inductor's bf16 ones.

    torchrun --nproc-per-node 1 -m benchmarks.tensor_parallel
    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel [--seconds 400] [--mode default]

Llama-3-70B's shape with random weights, distributed as `from_pretrained(..., distributed_config)` of
transformers does it, with `--layers` of its 80 layers: 16 leave room on one GPU for eight bf16 caches
of 128k tokens. Caches are filled and steps are timed as in `benchmarks/end_to_end.py`, on every rank
with its KV heads. Memory is that of one GPU. A run on several GPUs finds the JSON that the run on one
left beside its own table, and adds the speed-ups.

Largest batches are found by allocating the caches of a rank beside its weights, with `--reserve` GiB
kept free; of all ranks, the smallest counts.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from hqmq_compile.config import HQMQConfig

from . import gpu, largest_batch, shapes
from .common import RESULTS, Session, Table, cache_keyword, parser, publish, set_threads
from .decode_session import HQMQ, INDUCTOR, Contender, Result, fill, measure

K, GIB = 1024, 1 << 30
CONTENDERS = (HQMQ, INDUCTOR)
CASES = ((128 * K, 1), (32 * K, 1), (32 * K, 16), (128 * K, 8), (64 * K, 4))  # context, batch
CONTEXTS = (32 * K, 64 * K, 128 * K)  # of the largest batches
WORLD = int(os.environ.get("WORLD_SIZE", 1))


# -- ranks -----------------------------------------------------------------------------------------
def join() -> torch.device:
    """The device of this rank, in a process group if there are several."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if WORLD > 1:
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            timeout=datetime.timedelta(minutes=5),
            device_id=device if on_gpu else None,
        )
    return device


def least(number: float, device: torch.device) -> float:
    """The smallest `number` of all ranks, so that all of them decide alike."""
    found = torch.tensor(float(number), dtype=torch.float64, device=device)
    if WORLD > 1:
        dist.all_reduce(found, dist.ReduceOp.MIN)
    return found.item()


def is_first() -> bool:
    return int(os.environ.get("RANK", 0)) == 0


# -- models ----------------------------------------------------------------------------------------
@torch.no_grad()
def build(name: str, layers: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Random weights; those of this rank only, made on its device."""
    config = shapes.config_of(name, layers)
    kind = getattr(transformers, shapes.SHAPES[name]["architecture"] + "ForCausalLM")
    with torch.device("meta"), shapes.default_dtype(dtype):
        model = kind(config).eval().requires_grad_(False)
    distributed, _, mesh = kind.prepare_distribute_model(DistributedConfig(tp_plan="auto"))
    model = kind.maybe_distribute_model(model, distributed, mesh).to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    generator = torch.Generator(device).manual_seed(int(os.environ.get("RANK", 0)))
    for weight in model.parameters():
        if isinstance(weight, DTensor) or weight.dim() > 1:
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.normal_(std=0.02, generator=generator)
        else:  # a norm, the same on all ranks
            weight.fill_(1.0)
    return model


class InPlace(Session):
    """A session that compiles the model itself: what spreads it over ranks cannot be copied."""

    def __init__(self, model: Any, contender: Contender, length: int) -> None:
        self.model, self.kind, self.length = model, contender.kind, length
        self.keyword = cache_keyword(model)
        backend = contender.backend
        if backend == "hqmq":
            from hqmq_compile.backend import hqmq as backend
        model.forward = torch.compile(
            type(model).forward.__get__(model), backend=backend, mode=contender.mode
        )
        self.start()


def host_steps(step: gpu.Call, count: int) -> gpu.Steps:
    """As `gpu.timed_steps`, where there is no GPU."""
    milliseconds = []
    for _ in range(count):
        begin = time.perf_counter()
        step()
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    return gpu.Steps(milliseconds, sum(milliseconds) / 1e3, 0, 0)


# -- measuring -------------------------------------------------------------------------------------
def local_config(config: Any) -> Any:
    """The config of what one rank caches."""
    config = copy.deepcopy(config)
    config.num_key_value_heads //= WORLD
    return config


def run_case(
    model: Any, contender: Contender, context: int, batch: int, arguments: argparse.Namespace
) -> Result:
    """A session from an empty cache to the result; nothing of it stays allocated."""
    torch._dynamo.reset()
    gpu.free()
    slots = -(-(context + arguments.steps + arguments.warmup) // 64) * 64
    config = HQMQConfig.preset(arguments.preset) if contender.backend == "hqmq" else None
    session = InPlace(model, contender, slots)
    try:
        with torch.no_grad():
            fill(session, batch, context, config)
            steps = gpu.timed_steps if torch.cuda.is_available() else host_steps
            result = measure(session, batch, arguments.steps, arguments.warmup, steps)
        if config is not None:
            dense = sum(not getattr(t, "is_packed", False) for t in session.tensors())
            result.notes += f", {dense} CACHES NOT PACKED" if dense else ", all packed"
        return result
    finally:
        session.cache = None
        torch._dynamo.reset()
        gpu.free()


def has_room(model: Any, contender: Contender, context: int, batch: int, reserve: int) -> float:
    """Whether caches, one layer more for filling, and `reserve` bytes fit beside the weights."""
    if not torch.cuda.is_available():
        return 1.0
    size = batch * shapes.cache_bytes(local_config(model.config), context + 128)
    share = 0.35 if contender.backend == "hqmq" else 1.0
    need = size * (share + 1 / model.config.num_hidden_layers) + reserve
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return float(need < free - torch.cuda.memory_allocated())


def run(model: Any, arguments: argparse.Namespace, table: Table, device: torch.device) -> dict:
    """Fill `table`; figures by case and contender."""
    clock, slowest, found = gpu.Clock(arguments.seconds), 0.0, {}
    for context, batch in arguments.cases or CASES:
        for contender in (c for c in CONTENDERS if c.name in arguments.contenders):
            if not least(clock.allows(slowest), device):
                table.notes.append(f"Stopped by --seconds {arguments.seconds:.0f}.")
                return found
            begin = time.monotonic()
            title = f"{_tokens(context)}, B={batch}, {contender.name}"
            contender = dataclasses.replace(contender, mode=arguments.mode)
            if not least(
                has_room(model, contender, context, batch, arguments.reserve * GIB), device
            ):
                _say(table, title, *("-",) * 5, "no room on one GPU")
                continue
            result = run_case(model, contender, context, batch, arguments)
            sizes = {name: getattr(result, name) for name in ("cache", "peak", "resident")}
            figures = sizes | {"rate": result.rate, "step": result.step}
            found.setdefault(f"{_tokens(context)}, B={batch}", {})[contender.name] = figures
            cells = (f"{result.rate:.1f}", f"{result.step:.2f}")
            cells += tuple(f"{size / GIB:.2f}" for size in sizes.values())
            _say(table, title, *cells, result.notes)
            slowest = max(slowest, time.monotonic() - begin)
    return found


def fit(model: Any, arguments: argparse.Namespace, device: torch.device) -> Table:
    """Largest batches at each context, of packed and of bf16 caches."""
    table = Table(
        "Largest batch beside the weights", ("context", "inductor bf16", "hqmq", "times", "tokens")
    )
    config, kept = local_config(model.config), arguments.reserve * GIB
    recipe = HQMQConfig.preset(arguments.preset)
    for context in CONTEXTS:
        slots = context + 128
        room = torch.cuda.mem_get_info()[0] - kept
        guess = max(1, room // shapes.cache_bytes(config, slots))

        def dense(batch: int, slots: int = slots) -> list[torch.Tensor]:
            return largest_batch.dense(config, batch, slots, device)

        def packed(batch: int, slots: int = slots) -> list[torch.Tensor]:
            return largest_batch.packed(config, recipe, batch, slots, device)

        wide, narrow = (
            int(least(largest_batch.largest(make, most, lambda n: kept, device)[0], device))
            for make, most in ((dense, guess), (packed, 4 * guess))
        )
        times = f"{narrow / wide:.2f}" if wide else "-"
        _say(table, _tokens(context), wide, narrow, times, narrow * context)
    return table


def speed_ups(one: dict, many: dict) -> Table:
    """From one GPU to `WORLD`: tokens a second, and bytes of the caches of one GPU."""
    table = Table(
        f"From one GPU to {WORLD}",
        ("case", "hqmq", "inductor", "hqmq no worse", "hqmq's cache", "inductor's"),
    )
    for case, found in many.items():
        pairs = [(one.get(case, {}).get(c.name), found.get(c.name)) for c in CONTENDERS]
        rates = [b["rate"] / a["rate"] if a and b else None for a, b in pairs]
        sizes = [f"{b['cache'] / a['cache']:.3f}" if a and b else "-" for a, b in pairs]
        verdict = "-" if None in rates else "yes" if rates[0] >= rates[1] else "NO"
        table.add(case, *(f"{r:.2f}" if r else "-" for r in rates), verdict, *sizes)
    return table


def _say(table: Table, *cells: str | int) -> None:
    if is_first():
        gpu.say(table, *cells)


def _tokens(count: int) -> str:
    return f"{count // K}k" if count % K == 0 else str(count)


def _case(text: str) -> tuple[int, int]:
    context, batch = text.split(",")
    return int(context), int(batch)


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--model", default="llama-3-70b", choices=shapes.SHAPES, metavar="SHAPE")
    names = [c.name for c in CONTENDERS]
    options.add_argument("--contenders", nargs="+", choices=names, default=names)
    options.add_argument("--layers", type=int, default=16, help="of the model; 0: all")
    options.add_argument("--cases", nargs="+", type=_case, help="context,batch")
    options.add_argument("--seconds", type=float, default=0, help="stop after; 0: measure all")
    options.add_argument("--steps", type=int, default=64, help="measured; 64 pack one block")
    options.add_argument("--warmup", type=int, default=5, help="steps before, which compile")
    options.add_argument("--mode", default="reduce-overhead", help="of torch.compile")
    options.add_argument("--preset", default="4bit")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--reserve", type=int, default=6, help="GiB kept for all else")
    arguments = options.parse_args()
    set_threads(arguments.threads)
    device = join()
    model = build(arguments.model, arguments.layers, device, getattr(torch, arguments.dtype))
    layers = f"{model.config.num_hidden_layers} of {_layers(arguments.model)} layers"
    title = f"{arguments.model}, {layers}, {arguments.dtype}, {WORLD} ranks, {arguments.mode}"
    columns = ("case", "tokens/s", "ms a step", "cache GiB", "peak GiB", "resident GiB", "notes")
    tables = [Table(title, columns)]
    found = run(model, arguments, tables[0], device)
    if device.type == "cuda":
        tables.append(fit(model, arguments, device))
    if is_first():
        path = arguments.output or RESULTS / f"tensor_parallel_{WORLD}.md"
        run_of = {"title": title.replace(f"{WORLD} ranks", "ranks"), "found": found}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(run_of))
        one = _read(path.parent / "tensor_parallel_1.json", run_of["title"])
        if WORLD > 1 and one:
            tables.insert(0, speed_ups(one, found))
        publish("tensor_parallel", __doc__, tables, path)
    if WORLD > 1:
        dist.destroy_process_group()


def _layers(name: str) -> int:
    return shapes.SHAPES[name]["num_hidden_layers"]


def _read(path: Path, title: str) -> dict:
    """What a run on one GPU found, if it was of the same model."""
    left = json.loads(path.read_text()) if path.exists() else {}
    return left["found"] if left.get("title") == title else {}


if __name__ == "__main__":
    main()
