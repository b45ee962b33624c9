"""Figures of `docs/what-is-hqmq.md`.

    python -m benchmarks.figures             # all; needs matplotlib, the last one Qwen2.5-Coder-0.5B
    python -m benchmarks.figures codebook error

codebook: the 24 Hurwitz units, and 24 x 10 codewords, projected.  error: signal to noise on Gaussian data
against stored bits, beside the rate-distortion bound.  keys: key channels of Qwen before and after
centring.  Where and when: in the PNG's metadata, and in `docs/figures/README.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from hqmq_compile import HQMQConfig
from hqmq_compile.codec.codebook import codewords
from hqmq_compile.codec.codec import fake_quantize
from hqmq_compile.codec.quaternion import HURWITZ_UNITS
from hqmq_compile.codec.spec import CacheSpec

from .baselines import Int, RandomVQ, Rotated, Spherical
from .common import machine
from .faithful import Codec, Method, through

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "figures"


def _figure(*args: Any, **kwargs: Any):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*args, layout="constrained", **kwargs)


def _save(figure: Any, name: str, dpi: int = 100) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    facts = "; ".join(f"{k}: {v}" for k, v in machine().items())
    figure.savefig(FOLDER / f"{name}.png", dpi=dpi, metadata={"Description": facts})
    print(f"written to {FOLDER / name}.png")


# -- the codebook ----------------------------------------------------------------------------------
def coxeter_plane(x: torch.Tensor) -> torch.Tensor:
    """`[N, 4]` seen along the plane that a symmetry of order 12 of the 24-cell turns, `[N, 2]`.

    The symmetry is a Coxeter element of F4, whose short roots the 24 units are: the product of the
    reflections in its four simple roots. The units fall on two rings of twelve.
    """
    roots = torch.tensor(
        [[0, 1, -1, 0], [0, 0, 1, -1], [0, 0, 0, 1], [0.5, -0.5, -0.5, -0.5]], dtype=torch.float64
    )
    turn = torch.eye(4, dtype=torch.float64)
    for r in roots:
        turn = turn @ (torch.eye(4, dtype=torch.float64) - 2 * torch.outer(r, r) / (r @ r))
    values, vectors = torch.linalg.eig(turn)
    chosen = vectors[:, (values.angle() - math.pi / 6).abs().argmin()]
    plane = torch.linalg.qr(torch.stack((chosen.real, chosen.imag), 1))[0]
    return (x.double() @ plane).float()


def codebook() -> None:
    spec = CacheSpec("key", 64, secondary=10)
    half = codewords(spec, 1)[0].float() / 127
    words = torch.cat((half, -half))
    figure, (left, right) = _figure(1, 2, figsize=(10, 5))
    units = coxeter_plane(HURWITZ_UNITS)
    for i, j in (HURWITZ_UNITS @ HURWITZ_UNITS.t() > 0.49).triu(1).nonzero().tolist():
        left.plot(*units[[i, j]].t(), color="tab:blue", lw=0.5, alpha=0.5)
    left.scatter(*units.t(), s=36, color="tab:blue", zorder=2)
    left.set_title("24 Hurwitz units: the 24-cell, 96 edges")
    points = coxeter_plane(words)
    right.scatter(*points.t(), s=8, color="tab:orange")
    right.scatter(*units.t(), s=36, facecolors="none", edgecolors="tab:blue")
    right.set_title("24 x 10 codewords (8 index bits); circles: the units")
    for axes in (left, right):
        axes.set_aspect("equal")
        axes.axis("off")
    _save(figure, "codebook")


# -- error against bits ------------------------------------------------------------------------------
def _decibels(x: torch.Tensor, y: torch.Tensor) -> float:
    return 10 * math.log10(x.square().sum() / (y - x).square().sum())


def error(dim: int = 128) -> None:
    x = torch.randn(1, 1, 2048, dim, generator=torch.Generator().manual_seed(0))
    curves: dict[str, list[tuple[float, float]]] = {}
    for kind in ("universal", "haar"):
        for size, radius in ((5, 2), (10, 3), (21, 3), (42, 3), (85, 4), (170, 4), (341, 5)):
            spec = CacheSpec("value", dim, secondary=size, radius_bits=radius, codebook=kind)
            bits = (spec.word_bits) / 4 + 8 / 64
            curves.setdefault(f"HQMQ, {kind} codebook", []).append(
                (bits, _decibels(x, fake_quantize(spec, x)))
            )
    others = {
        "integers per token": [Int(width=w) for w in (2, 3, 4, 5)],
        "rotation + Lloyd-Max": [Rotated(width=w) for w in (2, 3, 4, 5)],
        "flat random VQ": [RandomVQ(index_bits=i, radius_bits=3) for i in (7, 8, 9, 10)],
        "spherical": [Spherical(angle_bits=(a, a, a), radius_bits=r) for a, r in ((3, 3), (4, 4))],
    }
    for name, codecs in others.items():
        curves[name] = [(c.packed_bits(dim), _decibels(x, c.read_back(x, 0, []))) for c in codecs]
    figure, axes = _figure(figsize=(7.5, 5))
    axes.plot(
        [2, 5.5], [20 * math.log10(2) * b for b in (2, 5.5)], "k--", label="bound: 6.02 dB a bit"
    )
    for marker, (name, points) in zip("osv^Dx", curves.items(), strict=True):
        axes.plot(*zip(*points, strict=True), marker=marker, ms=4, lw=1, label=name)
        print(name, " ".join(f"{b:.2f} b {d:.2f} dB" for b, d in points))
    axes.set(
        xlabel="stored bits an element, scales included", ylabel="signal to noise, dB",
        title=f"Gaussian vectors, D = {dim}",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, "error")


# -- keys of a real model ----------------------------------------------------------------------------
@dataclasses.dataclass
class _Keep(Codec):
    kept: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)

    def read_back(self, x: torch.Tensor, layer: int, calls: Any) -> torch.Tensor:
        self.kept[layer] = x
        return x


@torch.no_grad()
def keys(name: str = "qwen2.5-coder", tokens: int = 321, head: int = 0) -> None:
    from matplotlib.colors import LogNorm

    from .models import load, token_ids

    model, tokenizer = load(name)
    ids, keep = token_ids(tokenizer, "python-docs", tokens), _Keep()
    with through(model, Method(keep, Codec()), [(0, tokens - 1), (tokens - 1, tokens)]):
        model(ids, use_cache=False, logits_to_keep=1)
    block = HQMQConfig().block
    count = (tokens - 1) // block * block
    layer = max(keep.kept, key=lambda n: float(keep.kept[n][0, head].abs().amax()))
    x = keep.kept[layer][0, head, block:count]  # without the first block, which holds the sinks
    blocks = x.view(-1, block, x.shape[-1])
    centred = (blocks - blocks.mean(1, keepdim=True)).flatten(0, 1)
    figure, grid = _figure(2, 2, figsize=(10, 6), width_ratios=(3, 2), sharey="col")
    top = float(x.abs().amax())
    for row, (y, title) in zip(
        grid, ((x, "as they are"), (centred, f"less the mean of {block} tokens")), strict=True
    ):
        scale = LogNorm(vmin=top / 1000, vmax=top)
        image = row[0].imshow(y.abs().t(), aspect="auto", cmap="magma", norm=scale)
        row[0].set(title=f"|keys|, {title}", xlabel="token", ylabel="channel")
        figure.colorbar(image, ax=row[0])
        row[1].bar(range(y.shape[1]), y.abs().amax(0), color="tab:blue", label="largest")
        row[1].bar(range(y.shape[1]), y.square().mean(0).sqrt(), color="tab:orange", label="rms")
        row[1].set(title=f"by channel, {title}", xlabel="channel", yscale="log")
        row[1].legend(fontsize=7)
        print(
            f"layer {layer}, {title}: rms {y.square().mean().sqrt():.2f}, max {y.abs().amax():.2f}"
        )
    figure.suptitle(f"{name}, layer {layer}, head {head}, after RoPE")
    _save(figure, "keys", 75)


FIGURES = {"codebook": codebook, "error": error, "keys": keys}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="FIGURE", help=f"of: {', '.join(FIGURES)}")
    names = parser.parse_args().names or list(FIGURES)
    torch.set_num_threads(1)
    for name in names:
        FIGURES[name]()
    lines = [f"- {key}: {value}" for key, value in machine().items() if key != "load"]
    head = (
        "Drawn by `python -m benchmarks.figures` (the last run, of " + ", ".join(names) + "):\n\n"
    )
    (FOLDER / "README.md").write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
