"""Memory of packed caches, measured: storages that the process holds, and its resident memory.

    python -m benchmarks.memory

A random Llama that is small beside its cache, in bfloat16. Two cases, each in a process of its own:

adoption: the cache is filled in 16 bits, as an eager prefill leaves it, and a compiled decode step
    quantises it in place. Resident memory before it, filled, at the worst moment of the step, after.
prefill: the prompt itself goes through the compiled model, whole or in chunks, so that the caches
    are born packed. Resident memory before, at the worst moment, after.

All figures are differences to the same process before the cache existed, when everything was already
compiled and loaded: a first cache of the same size is made and dropped before. Memory that was freed
counts only as far as the allocator keeps it (`malloc_trim` is called before every reading).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .common import Session, Table, parser, progress, publish

# Large blocks come from and go back to the system at once, in every glibc.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}
PROMISED = {4096: 0.32, 32768: 0.29}


# -- readings --------------------------------------------------------------------------------------
def settle() -> int:
    """Resident bytes of this process once everything that is free was returned."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # not glibc: freed memory may count as used
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    return _status("VmRSS")


def reset_peak() -> None:
    """Start a new high-water mark of resident memory (Linux).

    Raises:
        OSError: the system does not allow it.
    """
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Largest number of resident bytes since `reset_peak`."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {name}")


def storages() -> dict[int, int]:
    """Bytes of every storage that a living tensor of this process holds, by its identity.

    Asks the storages themselves, not the packed caches: a wrapper has an empty one, and what it
    refers to is found as the tensors it consists of.
    """
    from torch._subclasses import FakeTensor

    found = {}
    for item in gc.get_objects():
        # type(), as isinstance() would run properties of lazy objects.
        if not issubclass(type(item), torch.Tensor) or issubclass(type(item), FakeTensor):
            continue
        if item.device.type == "meta":
            continue
        storage = torch._C.TensorBase.untyped_storage(item)
        found[storage._cdata] = storage.nbytes()
    return found


@contextlib.contextmanager
def watched_adoption() -> Iterator[list[int]]:
    """Resident bytes after each cache tensor that is packed in place meanwhile."""
    from hqmq_compile import runtime

    readings: list[int] = []
    adopt = runtime.adopt

    def watched(*args: Any, **kwargs: Any) -> None:
        adopt(*args, **kwargs)
        readings.append(settle())

    runtime.adopt = watched
    try:
        yield readings
    finally:
        runtime.adopt = adopt


# -- cases -----------------------------------------------------------------------------------------
def random_llama(layers: int, heads: int, kv_heads: int, head_dim: int) -> Any:
    """A Llama of random bfloat16 weights, whose hidden size is small beside its heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 17,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def dense_bytes(model: Any, slots: int) -> int:
    """Bytes of keys and values of `slots` tokens in bfloat16."""
    c = model.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * slots * c.head_dim * 2


@torch.no_grad()
def fill(session: Session, context: int) -> None:
    """Fill the cache with `context` tokens as an eager prefill leaves it: plain tensors."""
    c = session.model.config
    generator = torch.Generator().manual_seed(0)
    shape = (2, 1, c.num_key_value_heads, 512, c.head_dim)
    for layer in range(c.num_hidden_layers):
        piece = torch.randn(shape, generator=generator).to(torch.bfloat16)
        keys, values = piece.repeat(1, 1, 1, -(-context // 512), 1)[:, :, :, :context].clone()
        # Clones, because a DynamicCache keeps what it is given, and these share a storage.
        session.cache.update(keys.clone(), values.clone(), layer)


def adoption(kind: str, context: int, preset: str, layers: int) -> dict[str, Any]:
    """Fill, one compiled step, two more steps; see the module docstring."""
    model = random_llama(layers, heads=16, kv_heads=8, head_dim=128)
    token = torch.tensor([[7]])
    room = context + 8
    session = Session(model, "hqmq", kind, room, options={"preset": preset})

    fill(session, context)  # compiles, builds tables
    for _ in range(3):
        session(token)
    session.start()

    base, known = settle(), storages()
    fill(session, context)
    filled = settle() - base
    filled_storages = _sum_new(storages(), known)
    reset_peak()
    with watched_adoption() as readings:
        session(token)
    worst = peak() - base
    one_step = settle() - base
    for _ in range(2):
        session(token)
    after = settle() - base
    after_storages = _sum_new(storages(), known)
    tensors = _packed(session)
    return {
        "dense_bytes": dense_bytes(model, room if kind == "static" else context),
        "filled": filled,
        "filled_storages": filled_storages,
        "peak": worst,
        "while_adopting": [reading - base for reading in readings],
        "one_step": one_step,
        "after": after,
        "after_storages": after_storages,
        "reported": sum(t.stored_bytes for t in tensors),
        "bits": 8 * after_storages / sum(t.numel() for t in tensors),
        "packed_slots": min(t.packed.packed_slots for t in tensors),
    }


def prefill(
    kind: str, context: int, preset: str, layers: int, chunk: int, backend: str, steps: int = 2
) -> dict[str, Any]:
    """Compiled prefill of `context` tokens, `chunk` a call (0: all at once), then `steps` steps."""
    model = random_llama(layers, heads=4, kv_heads=4, head_dim=128)
    options = {"preset": preset} if backend == "hqmq" else None
    session = Session(model, backend, kind, context + 8, options=options)
    ids = torch.randint(1024, (1, context + steps), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        for piece in ids[:, :context].split(chunk or context, dim=1):
            session(piece)
        for i in range(steps):
            session(ids[:, context + i : context + i + 1])

    run()
    session.start()
    base, known = settle(), storages()
    reset_peak()
    run()
    worst = peak() - base
    after = settle() - base
    result = {
        "dense_bytes": dense_bytes(model, context + (8 if kind == "static" else steps)),
        "peak": worst,
        "after": after,
        "after_storages": _sum_new(storages(), known),
    }
    if backend == "hqmq":
        tensors = _packed(session)
        result["packed_slots"] = min(t.packed.packed_slots for t in tensors)
    return result


def _sum_new(now: dict[int, int], before: dict[int, int]) -> int:
    return sum(size for key, size in now.items() if key not in before)


def _packed(session: Session) -> list[Any]:
    tensors = session.tensors()
    dense = [t for t in tensors if not getattr(t, "is_packed", False)]
    if dense:
        raise RuntimeError(f"{len(dense)} of {len(tensors)} cache tensors are not packed")
    return tensors


CASES = {"adoption": adoption, "prefill": prefill}


def isolated(case: str, **settings: Any) -> dict[str, Any]:
    """Run one of `CASES` in a new process; returns what it returns, all sizes in bytes.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    command = [sys.executable, "-m", "benchmarks.memory", "--one", case, json.dumps(settings)]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        command, env=os.environ | ALLOCATOR, cwd=root, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- command ---------------------------------------------------------------------------------------
def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096, 32768])
    options.add_argument("--presets", nargs="+", default=["4bit", "3bit", "5bit", "paper"])
    options.add_argument("--kinds", nargs="+", default=["static", "dynamic"])
    options.add_argument("--prefill-context", type=int, default=8192)
    options.add_argument("--one", nargs=2, metavar=("CASE", "JSON"), help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.one:
        torch.set_num_threads(arguments.threads or 1)
        print(json.dumps(CASES[arguments.one[0]](**json.loads(arguments.one[1]))))
        return
    publish("memory", __doc__, [_adoptions(arguments), _prefills(arguments)], arguments.output)


def _adoptions(arguments: argparse.Namespace) -> Table:
    table = Table(
        "After adoption: 8 KV heads of 128, keys and values, bfloat16",
        (
            "preset, cache, tokens",
            "16-bit MiB",
            "packed MiB",
            "ratio",
            "bits an element",
            "resident before MiB",
            "after MiB",
            "ratio resident",
            "peak of the step MiB",
        ),
    )
    plan = [
        (preset, kind, context)
        for context in arguments.contexts
        for preset in arguments.presets
        for kind in arguments.kinds
    ]
    worst: dict[int, float] = {}
    for preset, kind, context in progress(plan, "adoption"):
        r = isolated(
            "adoption", kind=kind, context=context, preset=preset, layers=layers_for(context)
        )
        ratio = r["after_storages"] / r["filled_storages"]
        resident = r["after"] / r["filled"]
        if preset == "4bit":
            worst[context] = max(worst.get(context, 0.0), ratio, resident)
        table.add(
            f"{preset}, {kind}, {context:,}",
            *(f"{r[k] / 2**20:.1f}" for k in ("filled_storages", "after_storages")),
            f"{ratio:.3f}",
            f"{r['bits']:.2f}",
            *(f"{r[k] / 2**20:.1f}" for k in ("filled", "after")),
            f"{resident:.3f}",
            f"{r['peak'] / 2**20:.1f}",
        )
    for context, promised in PROMISED.items():
        if context in worst:
            verdict = "kept" if worst[context] <= promised else "MISSED"
            table.notes.append(
                f"Promise: at most {promised} of bfloat16 at {context:,} tokens, by storages and by"
                f" resident memory: {worst[context]:.3f}, {verdict}."
            )
    return table


def layers_for(context: int) -> int:
    """Layers of the model: enough for a cache of 64 MiB, which memory noise cannot blur."""
    return max(2, 16384 // context)


def _prefills(arguments: argparse.Namespace) -> Table:
    context = arguments.prefill_context
    table = Table(
        f"Compiled prefill of {context:,} tokens: 16 layers of 4 KV heads of 128, bfloat16",
        ("cache, calls, backend", "16-bit cache MiB", "peak MiB", "of the cache", "after MiB"),
        notes=["Peak and after: growth of resident memory, activations and scratch included."],
    )
    plan = [
        (kind, chunk, backend)
        for kind, chunk in (("dynamic", 0), ("dynamic", 2048), ("static", 2048))
        for backend in ("inductor", "hqmq")
    ]
    for kind, chunk, backend in progress(plan, "prefill"):
        r = isolated(
            "prefill",
            kind=kind,
            context=context,
            preset="4bit",
            layers=16,
            chunk=chunk,
            backend=backend,
        )
        table.add(
            f"{kind}, {f'{chunk:,} tokens each' if chunk else 'one call'}, {backend}",
            f"{r['dense_bytes'] / 2**20:.1f}",
            f"{r['peak'] / 2**20:.1f}",
            f"{r['peak'] / r['dense_bytes']:.2f}",
            f"{r['after'] / 2**20:.1f}",
        )
    return table


if __name__ == "__main__":
    main()
