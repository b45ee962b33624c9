"""Microseconds of writing new keys and values into packed caches of one layer.

    python -m benchmarks.write_path [--seconds 60]

8 KV heads, D = 128, bfloat16, replayed from CUDA graphs, keys and values together, as a compiled model
writes them. A decode step appends one token to the 16-bit window; every 64th step packs the block that
leaves it; with `window=0` every token is packed at once. The state of the caches is put back before
each replay, so every replay does the same work; the little that a decode step touches stays in L2 from
one replay to the next. "As intended" says whether the state afterwards shows that the step packed what
its name says.
"""

from __future__ import annotations

import argparse
import dataclasses

import torch

from hqmq_compile.cache.buffers import LENGTH, PACKED, START, Buffers
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.config import HQMQConfig
from hqmq_compile.kernels import launch

from . import gpu, kv_data
from .common import Table, parser, publish, set_threads

HEADS, DIM = 8, 128
DTYPE = torch.bfloat16
COPIES = 8  # of the caches of a decode step, each written once a replay


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    promised: float  # microseconds
    tokens: int  # written by one call
    before: int  # tokens in the cache; negative: that many short of the context
    packs: int  # slots that the call moves from the window into codes
    window: int = 64


def cases(context: int, prefill: int) -> list[Case]:
    """The steps of part 4 of the design, `context` (a multiple of 64) tokens into a sequence."""
    return [
        Case("decode step, appends to the window", 3, 1, context + 10, 0),
        Case("decode step, packs 64 tokens", 15, 1, context + 63, 64),
        Case("decode step, window=0", 5, 1, context + 10, 1, window=0),
        Case(f"prefill of {prefill:,} tokens", 3000, prefill, 0, prefill - 64),
        Case(f"prefill of {prefill:,} tokens, window=0", 3000, prefill, 0, prefill, window=0),
    ]


class Step:
    """Caches that are filled up to one step, and that step."""

    def __init__(self, case: Case, config: HQMQConfig, device: str) -> None:
        self.case = case
        self.specs = kv_data.specs(
            dataclasses.replace(config, window=case.window).resolved(), DIM, DTYPE
        )
        options = {"device": device, "dtype": DTYPE}
        slots = case.before + case.tokens + 64
        shape = (1, HEADS, max(case.before, case.tokens), DIM)
        data = [
            kv_data.fill_keys_(torch.empty(shape, **options)),
            kv_data.fill_values_(torch.empty(shape, **options)),
        ]
        self.tokens = [t[:, :, : case.tokens].clone() for t in data]
        self.positions = case.before + torch.arange(case.tokens, device=device)
        first = []
        for spec, tokens in zip(self.specs, data, strict=True):
            store = PackedKV.empty(spec, 1, HEADS, slots, device=device)
            if case.before:
                kv_data.write(spec, store.buffers, tokens[:, :, : case.before])
            first.append(store.buffers)
        more = COPIES - 1 if case.tokens == 1 else 0
        self.caches = [first, *([kv_data.clone(b) for b in first] for _ in range(more))]
        self.states = [b.state for pair in self.caches for b in pair]
        self.saved = [state.clone() for state in self.states]

    def restore(self) -> None:
        torch._foreach_copy_(self.states, self.saved)

    def calls(self) -> list[gpu.Call]:
        def call(pair: list[Buffers]) -> None:
            launch.write_both(
                *self.tokens, self.specs[0], pair[0], self.specs[1], pair[1],
                positions=self.positions,
            )  # fmt: skip

        return [lambda pair=pair: call(pair) for pair in self.caches]

    def as_intended(self) -> bool:
        """Whether one call, from the saved state, appends and packs what the case says."""
        self.restore()
        self.calls()[0]()
        good = True
        for before, after in zip(self.saved[:2], (b.state for b in self.caches[0]), strict=True):
            old, new = before.tolist(), after.tolist()
            good &= new[LENGTH] - new[START] == self.case.before + self.case.tokens
            good &= new[PACKED] - old[PACKED] == self.case.packs
        self.restore()
        return good


def measure(case: Case, config: HQMQConfig, table: Table, device: str) -> None:
    step = Step(case, config, device)
    good = step.as_intended()
    time = gpu.burst(step.calls(), before=step.restore)
    step.restore()
    eager = gpu.eager(step.calls(), count=len(step.caches))
    gpu.say(
        table,
        case.name,
        f"{time:.1f}",
        f"{case.promised:,.0f} {'kept' if time <= case.promised else 'MISSED'}",
        f"{eager:.1f}",
        "yes" if good else "NO",
    )


def run(arguments: argparse.Namespace, table: Table, device: str) -> None:
    clock = gpu.Clock(arguments.seconds)
    config = HQMQConfig.preset(arguments.preset)
    for case in cases(arguments.context, arguments.prefill):
        if not clock.allows():
            table.notes.append(f"Stopped after {arguments.seconds:.0f} s, before: {case.name}.")
            return
        try:
            measure(case, config, table, device)
        except Exception as error:
            gpu.say(table, case.name, "-", f"{case.promised:,.0f}", "-", gpu.one_line(error))
        gpu.free()


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--seconds", type=float, default=0, help="stop after; 0: measure all")
    options.add_argument("--context", type=int, default=32768, help="tokens before a decode step")
    options.add_argument("--prefill", type=int, default=32768, help="tokens of the prefill")
    options.add_argument("--preset", default="4bit")
    arguments = options.parse_args()
    gpu.need_cuda()
    set_threads(arguments.threads)
    table = Table(
        f"Writing keys and values of one layer, {HEADS} heads of {DIM}, {arguments.preset}",
        ("write", "us", "promised", "eager us", "as intended"),
    )
    with torch.no_grad():
        run(arguments, table, "cuda")
    publish("write_path", __doc__, [table], arguments.output)


if __name__ == "__main__":
    main()
