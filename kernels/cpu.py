"""Decode attention on the CPU: `cpu_attend.cpp`, compiled once per machine and called by ctypes.

Needs a C++ compiler, as inductor does on the CPU. The library lies in inductor's cache folder, under
the hash of its source, so that it is built once. `why_not` says why plain torch runs instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..cache.buffers import Buffers
from ..codec import codebook, med3x, radius
from ..codec.codec import unit
from ..codec.spec import CacheSpec

SOURCE = Path(__file__).with_name("cpu_attend.cpp")
FLAGS = (
    "-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"
)  # fmt: skip
MAX_HEAD_DIM = 512
MAX_ROWS = 32  # rows of one head up to which a pass over the codes beats decoding and a matmul
_POOLS = {torch.int8: 0, torch.float16: 1, torch.bfloat16: 2}
_ADDRESSES = ("codes", "scales", "pool", "exponents", "table", "scale_table")
_SIZES = ("heads", "table_heads", "capacity", "first", "count")
_NUMBERS = (
    "row_bytes", "groups", "group_chunks", "chunks", "word_bits", "index_bits", "radius_bits",
    "level_offset", "escape", "flag_bit", "block", "pool_slots", "tiles", "tile", "half_scales",
    "pool_kind",
)  # fmt: skip


class Cache(ctypes.Structure):
    """The struct of the same name in `cpu_attend.cpp`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_int32) for name in _NUMBERS),
        ("unit", ctypes.c_float),
    ]


# -- building ----------------------------------------------------------------------------------
def _compile(source: Path, target: Path) -> None:
    from torch._inductor.cpp_builder import get_cpp_compiler

    compiler = get_cpp_compiler()  # raises where there is none
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        for openmp in ("-fopenmp", None):  # without it: one thread
            command = [compiler, *FLAGS, *filter(None, (openmp,)), "-o", str(built), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                os.replace(built, target)  # atomic: another process may build it, too
                return
    raise RuntimeError(done.stderr.strip().splitlines()[0] if done.stderr.strip() else "failed")


@functools.cache
def _library() -> ctypes.CDLL:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    # The flags name the machine, so the library of another one must not be taken for ours.
    parts = (SOURCE.read_text(), *FLAGS, platform.processor(), _cpu_flags())
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    target = Path(cache_dir()) / "hqmq" / f"cpu_attend_{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        _compile(SOURCE, target)
    library = ctypes.CDLL(str(target))
    library.hqmq_cache_size.restype = ctypes.c_int64
    if library.hqmq_cache_size() != ctypes.sizeof(Cache):
        raise RuntimeError(f"{target} has another layout of the cache struct")
    for function in (library.hqmq_scores, library.hqmq_weighted_sum):
        function.restype = None
        function.argtypes = [
            ctypes.POINTER(Cache), *[ctypes.c_int64] * 3, ctypes.c_int, *[ctypes.c_void_p] * 2
        ]  # fmt: skip
    return library


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def _build_problem() -> str | None:
    try:
        _library()
    except Exception as error:  # whatever it is, plain torch can do the work
        return f"cannot build {SOURCE.name}: {type(error).__name__}: {error}"
    return None


@functools.lru_cache(maxsize=4096)
def why_not(spec: CacheSpec) -> str | None:
    """None if the C++ kernel can serve this cache, else the reason why not."""
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head dimension {spec.head_dim} is above {MAX_HEAD_DIM}"
    return _build_problem()


# -- calling -----------------------------------------------------------------------------------
@functools.lru_cache(maxsize=1024)
def _constants(spec: CacheSpec, heads: int) -> tuple[dict, tuple[Tensor, Tensor]]:
    cpu = torch.device("cpu")
    tables = (codebook.index_table(spec, heads, cpu), radius.scale_table(cpu))
    return {
        "table": tables[0].data_ptr(),
        "scale_table": tables[1].data_ptr(),
        "heads": heads,
        "table_heads": len(tables[0]),
        "row_bytes": spec.row_bytes,
        "groups": spec.scale_groups,
        "group_chunks": spec.chunks if spec.scale_groups == 1 else radius.GROUP_CHUNKS,
        "chunks": spec.chunks,
        "word_bits": spec.word_bits,
        "index_bits": spec.index_bits,
        "radius_bits": spec.radius_bits,
        "level_offset": spec.level_offset,
        "escape": spec.has_escape,
        "flag_bit": spec.has_flag_bit,
        "block": spec.block,
        "pool_slots": spec.pool_slots,
        "tiles": spec.tiles,
        "tile": med3x.TILE,
        "half_scales": spec.scale_dtype == torch.float16,
        "pool_kind": _POOLS[spec.pool_dtype],
        "unit": unit(spec),
    }, tables  # kept, so that the addresses stay good


def _describe(spec: CacheSpec, buffers: Buffers, first: int, count: int) -> Cache:
    parts = buffers[:4]
    if not all(t.is_contiguous() and t.device.type == "cpu" for t in parts):
        raise ValueError("the buffers of a packed cache must be contiguous, on the CPU")
    constants, _ = _constants(spec, buffers.codes.shape[1])
    codes, scales, pool, exponents = (t.data_ptr() for t in parts)
    return Cache(
        codes=codes, scales=scales, pool=pool, exponents=exponents, first=first, count=count,
        capacity=buffers.codes.shape[2], **constants,
    )  # fmt: skip


def _run(function, spec, buffers, first, count, given: Tensor, out: Tensor, splits: int) -> Tensor:
    batch, heads, rows = given.shape[:3]
    cache = _describe(spec, buffers, first, count)
    function(
        ctypes.byref(cache), batch * heads, rows, splits, torch.get_num_threads(),
        given.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    return out


def scores(spec: CacheSpec, buffers: Buffers, first: int, count: int, rows: Tensor) -> Tensor:
    """Products of `rows` float32 `[B, H, R, D]` and what the codes of `count` absolute slots hold.

    float32 `[B, H, R, count]`; without means, and with the rotation still to be undone.
    """
    out = rows.new_empty(*rows.shape[:3], count)
    splits = torch.get_num_threads()
    return _run(_library().hqmq_scores, spec, buffers, first, count, rows.contiguous(), out, splits)


def weighted_sum(spec: CacheSpec, buffers: Buffers, first: int, weights: Tensor) -> Tensor:
    """The sum over `count` absolute slots, weighted by float32 `[B, H, R, count]`: `[B, H, R, D]`.

    Without means, and with the rotation still to be undone. A token of weight 0 is not read.
    """
    splits = torch.get_num_threads()
    out = weights.new_empty(splits, *weights.shape[:3], spec.head_dim)
    _run(
        _library().hqmq_weighted_sum, spec, buffers, first, weights.shape[3], weights.contiguous(),
        out, splits,
    )  # fmt: skip
    return out[0] if splits == 1 else out.sum(0)
