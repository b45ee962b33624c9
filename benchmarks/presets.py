"""Stored bits an element of each preset, as the store allocates them.

    python -m benchmarks.presets

Growing caches of one layer (8 KV heads of 128, bfloat16). Everything counts: codes, scales, outlier
pools, block means, the 16-bit window and sinks, and room to grow. Nothing is computed from a formula:
the buffers are made, and their bytes added up. Takes a second; no model is needed.
"""

from __future__ import annotations

import argparse

import torch

from hqmq_compile import HQMQConfig
from hqmq_compile.cache.store import PackedKV

from .common import Table


def bits(preset: str, context: int, heads: int = 8, head_dim: int = 128) -> float:
    """Mean over keys and values."""
    config = HQMQConfig.preset(preset)
    stores = [
        PackedKV.empty(
            config.spec(role, head_dim, torch.bfloat16, 0), 1, heads, context, growing=True
        )
        for role in ("key", "value")
    ]
    return sum(store.bits_per_element for store in stores) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--presets", nargs="+", default=["3bit", "4bit", "5bit", "paper"])
    options = parser.parse_args()
    table = Table("Stored bits an element", ["preset", *(f"{c} tokens" for c in options.contexts)])
    for preset in options.presets:
        row = [bits(preset, context) for context in options.contexts]
        table.add(preset, *(f"{b:.2f} ({b / 16:.3f} of bf16)" for b in row))
    table.show()


if __name__ == "__main__":
    main()
