"""Regenerates the universal codebooks: Lloyd's algorithm on S^3/2T.

    python benchmarks/make_codebooks.py --sizes 5 10 --out /tmp/codebooks
    python benchmarks/make_codebooks.py            # all shipped sizes into the package (minutes)

Each iteration draws fresh uniform unit quaternions u, finds each one's codeword p·s, turns u back
by conj(p) and moves s to the normalised sum of these, weighted with the cosine (the criterion is
sin², the error that is left with a least-squares radius). The start is the best of several random
codebooks after a few iterations; towards the end the samples grow. The result depends on (size,
seed, counts) only, bit for bit: every operation is exactly rounded, in a fixed order.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import time
from pathlib import Path

import torch
from torch import Tensor

from hqmq_compile.codec import codebook
from hqmq_compile.codec.quaternion import HALF_UNITS, conjugate, dot, multiply

SEED = 2605_27646
STARTS = {5: 16, 10: 16, 21: 16, 42: 12, 85: 8, 170: 4, 341: 2}
ITERATIONS = 100
SAMPLES_PER_CODEWORD = 300


def step(secondary: Tensor, u: Tensor) -> Tensor:
    """One Lloyd iteration for `[S, 4]` on the samples `[N, 4]`, both float32."""
    half, negative = codebook.nearest(u, secondary)
    unit = HALF_UNITS[(half % 12).long()]
    unit = torch.where(negative.unsqueeze(-1), -unit, unit)
    turned = multiply(conjugate(unit), u)  # <turned, s> = <u, p·s>
    owner = (half // 12).long()
    weighted = turned.double() * dot(turned, secondary[owner]).double().unsqueeze(-1)
    total = torch.zeros(len(secondary), 4, dtype=torch.float64).index_add_(0, owner, weighted)
    length = dot(total, total).sqrt().unsqueeze(-1)
    return torch.where(length > 0, total / length, secondary.double()).float()


def train(
    size: int,
    *,
    seed: int = SEED,
    starts: int | None = None,
    iterations: int | None = None,
    samples: int | None = None,
) -> Tensor:
    """The universal codebook of `size` secondary quaternions, `[size, 4]` float32."""
    starts = starts or STARTS.get(size, 4)
    iterations = iterations or ITERATIONS
    samples = samples or max(20_000, SAMPLES_PER_CODEWORD * size)
    generator = torch.Generator().manual_seed(seed * 1000 + size)

    def draw(count: int) -> Tensor:
        return codebook.random_units(count, generator).float()

    trial = draw(samples)
    candidates = []
    for _ in range(starts):
        secondary = draw(size)
        for _ in range(iterations // 4):
            secondary = step(secondary, draw(samples // 2))
        candidates.append((codebook.direction_error(trial, secondary), len(candidates), secondary))
    secondary = min(candidates)[2]
    for i in range(iterations):
        # The last fifth runs on four times the samples: less noise in the fixed point.
        secondary = step(secondary, draw(samples * (4 if i >= 4 * iterations // 5 else 1)))
    return secondary


def write(secondary: Tensor, folder: Path) -> tuple[Path, str]:
    """Stores `[S, 4]` as raw little-endian float32; returns the path and its SHA-256."""
    data = struct.pack(f"<{secondary.numel()}f", *secondary.flatten().tolist())
    path = folder / f"universal_{len(secondary)}.bin"
    path.write_bytes(data)
    return path, hashlib.sha256(data).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(codebook.UNIVERSAL_SIZES))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--starts", type=int, help="random starts (default: by size)")
    parser.add_argument("--iterations", type=int, help=f"default: {ITERATIONS}")
    parser.add_argument("--samples", type=int, help="samples of an iteration (default: by size)")
    parser.add_argument("--out", type=Path, default=codebook._FOLDER)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the work is many small operations
    args.out.mkdir(parents=True, exist_ok=True)
    test = codebook.random_units(100_000, torch.Generator().manual_seed(99)).float()
    for size in args.sizes:
        begin = time.perf_counter()
        secondary = train(
            size,
            seed=args.seed,
            starts=args.starts,
            iterations=args.iterations,
            samples=args.samples,
        )
        path, digest = write(secondary, args.out)
        error = codebook.direction_error(test, secondary)
        seconds = time.perf_counter() - begin
        print(f"S={size} sin2={error:.6f} {seconds:.0f} s {path} sha256={digest}", flush=True)


if __name__ == "__main__":
    main()
