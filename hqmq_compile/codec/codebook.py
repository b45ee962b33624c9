"""Codewords p·s: 24 Hurwitz units p times S secondary quaternions s, and the nearest one.

Two kinds of secondary codebook: "universal", one trained set for all heads (Lloyd's algorithm on
S^3/2T, `benchmarks/make_codebooks.py`), and "haar", S random rotations for every (seed, layer,
KV head, role) as in the paper (arXiv 2605.27646).

The codebook *is* its int8 version: a codeword's value is `round(127 p·s) / 127`. Kernels look up
four bytes per chunk, and the reference computes with exactly these numbers.
Half index `h = 12·s + p` (p counts `HALF_UNITS`); the other half of the codewords are the
negatives, told apart by the top bit of the index field.
"""

from __future__ import annotations

import hashlib
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .quaternion import HALF_UNITS, HURWITZ_UNITS, dot, multiply
from .spec import CacheSpec
from .tables import cached_table

UNIVERSAL_SIZES = (5, 10, 21, 42, 85, 170, 341)  # fill 7 to 13 index bits
_FOLDER = Path(__file__).parent / "codebooks"


# -- secondary codebooks -----------------------------------------------------------------------
def random_units(count: int, generator: torch.Generator) -> Tensor:
    """`[count, 4]` float64 unit quaternions, uniform on S^3.

    Rejection from the ball in integers, then one square root and one division: bit-equal on every
    machine, which a sampler built on log and cos is not.
    """
    rows = torch.empty(0, 4, dtype=torch.int64, device="cpu")
    while len(rows) < count:
        draw = torch.randint(
            -(2**24), 2**24, (4 * count + 16, 4), generator=generator, device="cpu"
        )
        square = draw.pow(2).sum(-1)
        rows = torch.cat((rows, draw[(square <= 2**48) & (square >= 2**40)]))
    rows = rows[:count].double()
    return rows / rows.pow(2).sum(-1, keepdim=True).sqrt()


def _haar(size: int, seed: int, layer: int, head: int, role: str) -> Tensor:
    text = f"hqmq haar {seed} {layer} {head} {role}"
    digest = hashlib.sha256(text.encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "little"))
    return random_units(size, generator).float()


def load_universal(size: int) -> Tensor:
    """The shipped universal codebook, `[size, 4]` float32."""
    if size not in UNIVERSAL_SIZES:
        raise ValueError(
            f"no universal codebook with secondary={size}; shipped sizes are {UNIVERSAL_SIZES}. "
            'Use one of these, or codebook="haar", which takes any size.'
        )
    data = (_FOLDER / f"universal_{size}.bin").read_bytes()
    return torch.tensor(struct.unpack(f"<{4 * size}f", data), dtype=torch.float32).view(size, 4)


@cached_table(4096)
def secondary(
    kind: str, size: int, seed: int = 0, layer: int = 0, head: int = 0, role: str = "key"
) -> Tensor:
    """The secondary codebook, `[size, 4]` float32 unit quaternions on the CPU.

    Args:
        kind: "universal" (the other arguments are ignored) or "haar".
        head: global KV head; a head's codebook does not depend on how many heads there are.
    """
    if kind == "universal":
        return load_universal(size)
    if kind == "haar":
        return _haar(size, seed, layer, head, role)
    raise ValueError(f'unknown codebook {kind!r}; known are "universal" and "haar"')


def codebook_heads(spec: CacheSpec, heads: int) -> int:
    """How many codebooks `heads` KV heads need: 1 when it is universal."""
    return heads if spec.codebook == "haar" else 1


def _key(spec: CacheSpec, heads: int) -> tuple:
    # What a codebook depends on, so that the layers of a model share one cached universal table.
    if spec.codebook == "haar":
        heads = range(spec.first_head, spec.first_head + heads)
        return ("haar", spec.secondary, spec.seed, spec.layer, spec.role, heads)
    return (spec.codebook, spec.secondary, 0, 0, "", range(1))


@cached_table(512)
def _secondaries(key: tuple, device: torch.device) -> Tensor:
    kind, size, seed, layer, role, heads = key
    each = [secondary(kind, size, seed, layer, head, role) for head in heads]
    return torch.stack(each).to(device)


@cached_table(512)
def _codewords(key: tuple, device: torch.device) -> Tensor:
    each = _secondaries(key, torch.device("cpu")).double()
    product = multiply(HALF_UNITS.double(), each.unsqueeze(-2))  # [heads, S, 12, 4]
    return (127 * product).round().to(torch.int8).flatten(1, 2).to(device)


def secondaries(spec: CacheSpec, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """Secondary codebooks of `heads` KV heads from `first_head` on, `[heads or 1, S, 4]` float32."""
    return _secondaries(_key(spec, heads), torch.device(device))


def codewords(spec: CacheSpec, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """The codebook itself, `[heads or 1, 12·S, 4]` int8; the other half is its negative."""
    return _codewords(_key(spec, heads), torch.device(device))


# -- lookup tables -----------------------------------------------------------------------------
@cached_table(256)
def _index_table(key: tuple, index_bits: int, device: torch.device) -> Tensor:
    half = _codewords(key, torch.device("cpu"))
    table = torch.zeros(len(half), 2, 2 ** (index_bits - 1), 4, dtype=torch.int16)
    table[:, 0, : half.shape[1]] = half
    table[:, 1, : half.shape[1]] = -half.to(torch.int16)
    return table.flatten(1, 2).to(device)


@cached_table(64)
def _word_table(key: tuple, index_bits: int, levels: tuple, device: torch.device) -> Tensor:
    codes = torch.tensor(levels, dtype=torch.int16)
    table = _index_table(key, index_bits, torch.device("cpu"))
    return (table.unsqueeze(-2) * codes[:, None]).flatten(1, 2).contiguous().to(device)


def index_table(spec: CacheSpec, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """`[heads or 1, 2^index_bits, 4]` int16: ± codeword x 127 by index field; unused rows 0."""
    return _index_table(_key(spec, heads), spec.index_bits, torch.device(device))


def word_table(spec: CacheSpec, heads: int, device: torch.device | str = "cpu") -> Tensor:
    """`[heads or 1, 2^(radius_bits + index_bits), 4]` int16, by word without its flag bit.

    The entry is level · (± codeword x 127), an integer below 2^15: exact, and half as many bytes as
    float32. Rows of the escape code, of level 0 and of unused indices are 0. Kept per device.
    """
    levels = tuple(code + spec.level_offset for code in range(2**spec.radius_bits))
    return _word_table(_key(spec, heads), spec.index_bits, levels, torch.device(device))


# -- nearest codeword --------------------------------------------------------------------------
def _rows_of_right_product(s: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    # x·conj(s) is linear in x: component k is the sum over j of x_j · rows[k][j].
    a, b, c, d = s.unbind(-1)
    return ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))


def _right_product(x: list[Tensor], rows, out: list[Tensor], scratch: Tensor) -> None:
    # One multiplication or addition per kernel: no fused multiply-add, no blocked matmul, whose
    # rounding (and so the winner of a near tie) may depend on shape, position and device.
    for w, row in zip(out, rows, strict=True):
        torch.mul(x[0], row[0], out=w)
        for xj, rj in zip(x[1:], row[1:], strict=True):
            w.add_(torch.mul(xj, rj, out=scratch))


# Elements of one temporary. On the CPU: small enough for the caches, and for torch to run each
# operation in the calling thread; the barriers of its own threads would cost more.
_SLICE = {"cpu": 2**15 - 1}
_SLICE_ON_DEVICE = 2**24
_CHUNKS_PER_THREAD = 2**13


def _best_secondary(flat: Tensor, rows: list[list[Tensor]]) -> Tensor:
    # For chunks [4, N], the s whose best codeword wins, [N] int64.
    count, threads = flat.shape[1], 1
    if flat.device.type == "cpu":
        threads = max(1, min(torch.get_num_threads(), count // _CHUNKS_PER_THREAD))
    if threads == 1:
        return _best_of_part(flat, rows)
    # Parts are independent, so they run in threads (torch releases the GIL) without any barrier.
    inference = torch.is_inference_mode_enabled()  # per thread, as is the gradient mode

    def work(part: Tensor) -> Tensor:
        with torch.inference_mode(inference), torch.no_grad():
            return _best_of_part(part, rows)

    with ThreadPoolExecutor(threads) as pool:
        return torch.cat(list(pool.map(work, flat.chunk(threads, 1))))


def _best_of_part(flat: Tensor, rows: list[list[Tensor]]) -> Tensor:
    count, size = flat.shape[1], len(rows[0][0])
    step = max(1, _SLICE.get(flat.device.type, _SLICE_ON_DEVICE) // size)
    buffers = [flat.new_empty((min(step, count), size)) for _ in range(6)]
    best = torch.empty(count, dtype=torch.int64, device=flat.device)
    for start in range(0, count, step):
        stop = min(start + step, count)
        *w, total, scratch = (b[: stop - start] for b in buffers)
        _right_product([flat[j, start:stop, None] for j in range(4)], rows, w, scratch)
        for component in w:
            component.abs_()
        torch.add(w[0], w[1], out=total).add_(w[2]).add_(w[3]).mul_(0.5)
        for component in w:
            torch.maximum(total, component, out=total)
        torch.argmax(total, 1, out=best[start:stop])
    return best


def nearest(x: Tensor, secondary: Tensor) -> tuple[Tensor, Tensor]:
    """The codeword with the largest inner product with each chunk, in closed form.

    <x, p·s> = <x·conj(s), p>, and over the 24 Hurwitz units the maximum of <w, p> is
    max(max_i |w_i|, (|w_0| + |w_1| + |w_2| + |w_3|) / 2). Work and memory are O(S) per chunk and
    go in slices; the result of a chunk depends on nothing else. Exact ties go to the lower s, then
    to the axis units.

    Args:
        x: `[..., 4]` float32 chunks of any length (no need to be normalised).
        secondary: `[S, 4]` float32 unit quaternions.

    Returns:
        half index, `[...]` int32 in [0, 12 S), and the sign, `[...]` bool, True for the negative.
        A chunk with a NaN gets some valid index.
    """
    flat = x.detach().reshape(-1, 4).t().contiguous()  # component major: passes over whole rows
    rows = [[r.contiguous() for r in row] for row in _rows_of_right_product(secondary)]
    best = _best_secondary(flat, rows)

    chosen = [[r.index_select(0, best) for r in row] for row in rows]
    w = [torch.empty_like(flat[0]) for _ in range(4)]
    _right_product(list(flat.unbind(0)), chosen, w, torch.empty_like(flat[0]))
    size_of = [component.abs() for component in w]
    largest, axis = size_of[0], torch.zeros_like(best, dtype=torch.int32)
    axis_negative = w[0] < 0
    for k in (1, 2, 3):
        larger = size_of[k] > largest
        largest = torch.where(larger, size_of[k], largest)
        axis = torch.where(larger, k, axis)
        axis_negative = torch.where(larger, w[k] < 0, axis_negative)
    half_sum = (((size_of[0] + size_of[1]) + size_of[2]) + size_of[3]) * 0.5
    is_axis = largest >= half_sum
    first = w[0] < 0
    bits = [(component < 0) ^ first for component in w[1:]]
    mixed = 4 + 4 * bits[0].int() + 2 * bits[1].int() + bits[2].int()
    unit = torch.where(is_axis, axis, mixed)
    half = (12 * best).int() + unit
    negative = torch.where(is_axis, axis_negative, first)
    return half.view(x.shape[:-1]), negative.view(x.shape[:-1])


def brute_force(x: Tensor, secondary: Tensor) -> Tensor:
    """The largest inner product with any of the 24 S codewords, `[..., 4] -> [...]`; for tests."""
    table = multiply(HURWITZ_UNITS.to(x).unsqueeze(1), secondary.to(x)).reshape(-1, 4)
    return (x.unsqueeze(-2) * table).sum(-1).amax(-1)


def direction_error(x: Tensor, secondary: Tensor) -> float:
    """Mean sin² of the angle between unit quaternions `[N, 4]` and their codewords."""
    half, _ = nearest(x, secondary)
    unit = HALF_UNITS[(half % 12).long()]
    cosine = dot(x, multiply(unit, secondary[(half // 12).long()]))
    return float((1 - cosine.double().square()).mean())
