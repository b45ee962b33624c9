"""Compiles the kernels for a GPU that need not be there: `compile_for 90`; for test_compiles.py.

Triton gets a driver that names the target, and every launch becomes a compilation. The launching
code runs as it is, on CPU tensors, so the kernels are specialised as in real calls.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from hqmq_compile.cache.store import PackedKV
from hqmq_compile.config import HQMQConfig
from hqmq_compile.kernels import launch, served, write

compiled: list[str] = []
run = JITFunction.run


class Driver:
    """What Triton asks of a driver in order to compile."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_only(self, *args, grid, warmup, **kwargs):
    kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
    assert kernel.asm["cubin"], self.__name__
    compiled.append(self.__name__)


def main() -> None:
    capability = int(sys.argv[1])
    driver.set_active(Driver(capability))
    JITFunction.run = compile_only
    write._overlaps = lambda device: capability >= 90
    launch.why_not = lambda device, spec: served.unsupported(spec)
    config = HQMQConfig()
    heads, slots = 2, 1024
    specs = [config.spec(role, 128, torch.bfloat16) for role in ("key", "value")]
    key, value = (PackedKV.empty(spec, 1, heads, slots).buffers for spec in specs)
    for n in (1, 100):
        tokens = torch.zeros(1, heads, n, 128, dtype=torch.bfloat16)
        mask = torch.ones(1, 1, n, slots, dtype=torch.bool)
        launch.write_attend(
            tokens.repeat(1, 4, 1, 1), tokens, tokens, torch.arange(n), 0, 0, slots, key, value,
            0, slots, None, None, True, *specs, scale=0.1, mask=mask,
        )  # fmt: skip
    paper = HQMQConfig.preset("paper").spec("key", 128, torch.bfloat16)
    buffers = PackedKV.empty(paper, 1, heads, slots).buffers
    launch.write(paper, buffers, tokens[:, :, :1], median=torch.zeros(1, heads, 1, 1))
    print(triton.__version__, *sorted(set(compiled)))


if __name__ == "__main__":
    sys.exit(main())
