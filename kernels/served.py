"""What the Triton kernels can serve. Importing this needs no Triton."""

from __future__ import annotations

import functools
import importlib
import os

import torch

from ..codec.spec import CacheSpec

DTYPES = ("float16", "bfloat16", "float32")
BLOCKS = (16, 32, 64, 128)
MAX_HEAD_DIM = 256


@functools.cache
def _interpreted() -> bool | None:
    """Whether Triton runs its interpreter here; None where there is no Triton."""
    try:
        from triton.runtime.interpreter import InterpretedFunction

        read = importlib.import_module(".read", __package__)
    except ImportError:
        return None
    return isinstance(read.dequantize_kernel, InterpretedFunction)


@functools.lru_cache(maxsize=4096)
def why_not(device: torch.device, spec: CacheSpec) -> str | None:
    """None if the kernels can serve this device and cache, else the reason why not."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton needs a GPU (or TRITON_INTERPRET=1 before its import)"
    if device.type not in ("cpu", "cuda"):
        return f"no Triton kernels for {device.type} devices"
    interpreted = _interpreted()
    if interpreted is None:
        return "Triton is not installed"
    if device.type == "cpu" and not interpreted:
        return "Triton was imported without TRITON_INTERPRET=1, so it cannot run on the CPU"
    if torch.version.hip is not None:
        return "ROCm is not supported"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            return f"GPUs of compute capability {major}.{minor} are too old (8.0 is needed)"
    return unsupported(spec)


def unsupported(spec: CacheSpec) -> str | None:
    if spec.rotate:
        return "rotate=True is not in the kernels"
    if spec.dtype not in DTYPES:
        return f"a {spec.dtype} cache is not in the kernels; they know {', '.join(DTYPES)}"
    if spec.head_dim > MAX_HEAD_DIM:
        return f"head dimension {spec.head_dim} is above {MAX_HEAD_DIM}"
    if spec.block not in BLOCKS:
        return f"block={spec.block} is not one of {BLOCKS}"
    if spec.window == 0:
        if spec.center == "block":
            return 'center="block" needs a window'
        if spec.med3x and spec.outliers == "int8x4":
            return 'outliers="int8x4" need a window'
    elif spec.med3x and spec.med3x_scope == "batch":
        return 'med3x_scope="batch" with a window is not in the kernels'
    elif spec.center == "first":
        return 'center="first" with a window is not in the kernels'
    return None
