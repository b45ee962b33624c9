"""Who takes part in `benchmarks/decode_attention.py`: cases, and what attends to their caches.

A contender is a list of calls: the same attention on as many copies of the caches as exceed L2.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hqmq_compile.config import HQMQConfig

from . import bf16_split_kv as split_kv
from . import gpu, kv_data

K = 1024
DTYPE = torch.bfloat16


# -- cases -----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    query_heads: int
    heads: int
    context: int
    dim: int = 128

    def __str__(self) -> str:
        dim = f", D={self.dim}" if self.dim != 128 else ""
        return f"({self.batch}, {self.query_heads}, {self.heads}) {self.context // K}k{dim}"

    @property
    def promised(self) -> tuple[float, float] | None:
        """bf16 / hqmq that the project promises: with the default recipe, and stripped."""
        group = self.query_heads // self.heads
        if self.dim != 128:
            return None
        if self.context >= 128 * K:
            large = self.batch * self.heads * self.context >= 1 << 20
            return (1.8, 2.0) if group in (7, 8) else (2.1, 2.4) if group <= 4 and large else None
        if self.context == 32 * K and self.batch == 1 and self.heads == 8:
            return 1.6, 1.8
        return (1.05, 1.2) if self.context == 4 * K and self.batch == 1 else None


SHAPES = ((1, 32, 8), (8, 32, 8), (1, 28, 4), (1, 64, 8), (1, 32, 32))
CASES = (
    *(Case(*shape, 128 * K) for shape in SHAPES[:4]),
    Case(1, 32, 8, 32 * K),
    Case(1, 32, 8, 4 * K),
    Case(1, 32, 32, 128 * K),
    Case(1, 64, 8, 32 * K),
    *(Case(*shape, 4 * K) for shape in SHAPES[2:]),
    Case(8, 32, 8, 32 * K),
    Case(8, 32, 8, 4 * K),
    Case(1, 28, 4, 32 * K),
    Case(1, 32, 32, 32 * K),
    *(Case(1, 32, 8, n * K, dim) for dim in (64, 256) for n in (128, 32, 4)),
)


# -- contenders ------------------------------------------------------------------------------------
@dataclasses.dataclass
class Contender:
    calls: list[gpu.Call]  # the same attention on different memory
    size: int  # bytes that one call must read
    stored: Callable[[], tuple[torch.Tensor, torch.Tensor]]  # keys and values it stands for


class Data:
    """Query, keys and values of one case; each contender takes the copies that it needs."""

    def __init__(self, case: Case, device: str) -> None:
        shape = (case.batch, case.heads, case.context, case.dim)
        self.case = case
        options = {"device": device, "dtype": DTYPE}
        torch.manual_seed(0)
        self.query = torch.randn(case.batch, case.query_heads, 1, case.dim, **options)
        self.keys = kv_data.fill_keys_(torch.empty(shape, **options))
        self.values = kv_data.fill_values_(torch.empty(shape, **options))
        self.size = 2 * self.keys.nbytes

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.keys, self.values

    @functools.cached_property
    def rotated(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        more = gpu.copies(self.size) - 1
        return [self.dense(), *((self.keys.clone(), self.values.clone()) for _ in range(more))]

    def over_dense(self, attend: Callable[..., torch.Tensor]) -> Contender:
        """`attend(query, keys, values)` on the bf16 cache."""
        calls = [functools.partial(attend, self.query, k, v) for k, v in self.rotated]
        return Contender(calls, self.size, self.dense)


def tuned_split_kv(data: Data) -> Contender:
    """Our bf16 kernel with the fastest of its plans."""
    case = data.case
    pairs = case.batch * case.heads
    times = {}
    processors = split_kv.device_facts(data.keys.device)[0]
    for plan in split_kv.plans(pairs, case.context, case.dim, processors):
        try:
            calls = data.over_dense(functools.partial(split_kv.attend, plan=plan)).calls
            times[plan] = gpu.burst(calls, budget_ms=3)
        except Exception as error:  # too much shared memory, say
            print(f"  {plan}: {gpu.one_line(error)}", flush=True)
    best = min(times, key=times.__getitem__)
    print(f"  {case}: fastest is {best}, {times[best]:.1f} us", flush=True)
    return data.over_dense(functools.partial(split_kv.attend, plan=best))


def default_split_kv(data: Data) -> Contender:
    return data.over_dense(split_kv.attend)


def backend(kind: SDPBackend) -> Callable[[Data], Contender]:
    def attend(query, keys, values):
        with sdpa_kernel([kind]):
            return sdpa(query, keys, values, enable_gqa=query.shape[1] != keys.shape[1])

    return lambda data: data.over_dense(attend)


def flex(data: Data) -> Contender:
    from torch.nn.attention.flex_attention import flex_attention

    torch._dynamo.reset()  # each case is a compilation of its own, far from the recompile limit
    compiled = torch.compile(flex_attention, dynamic=False)
    gqa = data.case.query_heads != data.case.heads
    return data.over_dense(functools.partial(compiled, enable_gqa=gqa))


def packed(
    config: HQMQConfig, *, masked: bool = False, dense: bool = False
) -> Callable[[Data], Contender]:
    """Our attention, with a bool mask if `masked`; if `dense`, dequantising and SDPA instead."""

    def build(data: Data) -> Contender:
        from hqmq_compile.kernels import launch

        case = data.case
        specs = kv_data.specs(config, case.dim, DTYPE)
        texts = [str(spec) for spec in specs]
        stores = [kv_data.store_of(s, t) for s, t in zip(specs, data.dense(), strict=True)]
        size = sum(store.stored_bytes for store in stores)
        first = [store.buffers for store in stores]
        caches = [first, *([kv_data.clone(b) for b in first] for _ in range(gpu.copies(size) - 1))]
        mask = None
        if masked:
            shape = (case.batch, 1, 1, case.context)
            mask = torch.ones(shape, dtype=torch.bool, device=data.query.device)

        def stored():
            pairs = zip(specs, first, strict=True)
            return [launch.dequantize(spec, buffers, case.context) for spec, buffers in pairs]

        def attend(keys, values):
            return torch.ops.hqmq.attend(
                data.query, *keys, *values, mask, None, 0, case.context, case.dim**-0.5, False, 0.0,
                *texts, "auto",
            )  # fmt: skip

        def unpack_and_attend(keys, values):
            k = launch.dequantize(specs[0], keys, case.context)
            v = launch.dequantize(specs[1], values, case.context)
            return sdpa(data.query, k, v, enable_gqa=case.query_heads != case.heads)

        call = unpack_and_attend if dense else attend
        return Contender([functools.partial(call, *cache) for cache in caches], size, stored)

    return build


BF16, HQMQ, STRIPPED = "bf16 split-KV", "hqmq", "stripped"
CONTENDERS: dict[str, Callable[[Data], Contender]] = {
    BF16: tuned_split_kv,
    HQMQ: packed(HQMQConfig()),
    STRIPPED: packed(kv_data.STRIPPED),
    "cuDNN": backend(SDPBackend.CUDNN_ATTENTION),
    "flash": backend(SDPBackend.FLASH_ATTENTION),
    "dequantise + SDPA": packed(HQMQConfig(), dense=True),
    "hqmq, bool mask": packed(HQMQConfig(), masked=True),
    "bf16 split-KV, not tuned": default_split_kv,
    "FlexAttention": flex,
}
# Measured after all else.
LATE = ("hqmq, bool mask", "bf16 split-KV, not tuned", "FlexAttention")


def path_of(case: Case, config: HQMQConfig) -> str:
    """Which of our kernels serves a case."""
    from hqmq_compile.kernels import attend as gluon

    query = torch.empty(case.batch, case.query_heads, 1, case.dim, dtype=DTYPE)
    query = query.to("cuda" if torch.cuda.is_available() else "cpu")
    specs = kv_data.specs(config, case.dim, DTYPE)
    reason = gluon.why_not(*specs, query, 1, case.query_heads // case.heads)
    return f"portable kernel ({reason})" if reason else "Gluon kernel"
