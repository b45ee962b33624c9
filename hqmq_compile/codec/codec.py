"""Blocks of keys or values to packed codes, and back. Plain torch, the oracle of the kernels.

Layout: `[B, H, nb, block, D]`, nb blocks of `block` tokens. A token's code depends on its own block
only, bit for bit: every step is elementwise or a reduction in a fixed order.

Encoding a block: subtract the mean of its tokens (float16), rotate, split into chunks of four, take
outliers out (Med3x), find the nearest codeword and the radius, scale by the largest radius that is
not an outlier's. Empty tokens (not valid, or all zeros) are all zero bytes and read as zeros.

Non-finite input raises nothing and touches no other token: such a token has no part in the mean and
no outliers. With float16 scales it reads as NaN. With log8 scales, which have no code for NaN, its
non-finite chunks read as finite numbers of the largest scale.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import codebook, med3x, radius, tables, transform
from .packing import pack_words, unpack_words
from .quaternion import dot
from .spec import CHUNK, CacheSpec


class BlockCodes(NamedTuple):
    """Packed blocks; the fields but the last are the buffers of a packed cache."""

    codes: Tensor  # uint8 [B, H, nb, block, row_bytes]
    scales: Tensor  # uint8 or float16 [B, H, nb, block, scale_groups]
    pool: Tensor  # int8 or 16-bit float [B, H, nb, pool_slots, 4]
    exponents: Tensor  # int8 [B, H, nb, tiles]
    means: Tensor | None  # float16 [B, H, nb, D] with center "block"
    capped: Tensor  # int64 scalar: outliers that found no slot


class Prepared(NamedTuple):
    """Tokens before quantization: centered, rotated, with their outliers marked."""

    values: Tensor  # float32 [..., C, 4]
    norms: Tensor  # float32 [..., C]
    outliers: Tensor  # bool [..., C]
    filled: Tensor  # bool [...]: not empty


class TokenCodes(NamedTuple):
    """Quantized tokens, not yet packed."""

    words: Tensor  # int32 [B, H, n, C]; 0 for outliers and empty tokens
    scales: Tensor  # uint8 or float16 [B, H, n, scale_groups]
    outliers: Tensor  # bool [B, H, n, C]
    norms: Tensor  # float32 [B, H, n, C]
    values: Tensor  # float32 [B, H, n, C, 4]: what the pool stores for an outlier


@functools.lru_cache(maxsize=4096)
def check(spec: CacheSpec) -> None:
    """Raises ValueError, naming the field, for a spec that the codec cannot express."""

    def known(field: str, *choices: str) -> None:
        if getattr(spec, field) not in choices:
            raise ValueError(f"{field}={getattr(spec, field)!r} is not one of {choices}")

    known("role", "key", "value")
    known("codebook", "universal", "haar")
    known("scale", "log8", "float16")
    known("med3x_scope", "token", "batch")
    known("outliers", "int8x4", "16bit")
    known("outlier_flag", "escape", "bit")
    known("center", "block", "first", "none")
    if spec.head_dim <= 0 or spec.head_dim % CHUNK:
        raise ValueError(f"head_dim must be a positive multiple of {CHUNK}, got {spec.head_dim}")
    if spec.secondary < 1:
        raise ValueError(f"secondary must be at least 1, got {spec.secondary}")
    if not 1 <= spec.radius_bits <= 8:
        raise ValueError(f"radius_bits must be in 1..8, got {spec.radius_bits}")
    if spec.word_bits > 31:
        raise ValueError(f"a word of {spec.word_bits} bits does not fit 31 bits")
    if spec.has_escape and spec.zero_level:
        raise ValueError(
            'zero_level=True and outlier_flag="escape" both claim radius code 0; '
            'use outlier_flag="bit"'
        )
    if not math.isfinite(spec.med3x) or spec.med3x < 0:
        raise ValueError(f"med3x must be a multiplier >= 0 (0: off), got {spec.med3x}")
    if spec.codebook == "universal" and spec.secondary not in codebook.UNIVERSAL_SIZES:
        codebook.load_universal(spec.secondary)  # raises the one clear error
    if spec.rotate and spec.head_dim & (spec.head_dim - 1):
        raise ValueError(f"rotate=True needs a head_dim power of two, got {spec.head_dim}")


# -- encode ------------------------------------------------------------------------------------
def _filled(x: Tensor, valid: Tensor | None) -> Tensor:
    filled = (x != 0).any(-1)
    return filled if valid is None else filled & valid.to(x.device)


def prepare(
    spec: CacheSpec,
    x: Tensor,
    *,
    filled: Tensor,
    mean: Tensor | None = None,
    median: Tensor | None = None,
) -> Prepared:
    """Centers, rotates, splits into chunks and marks outliers.

    Args:
        x: `[B, H, ..., D]` float32.
        filled: `[B, H, ...]` bool: the tokens that are not empty.
        mean: broadcastable to x, or None.
        median: of the chunk norms, `[H]` or broadcastable to `[B, H, ..., C]`; None: computed
            from x with the scope of the spec.
    """
    if mean is not None:
        x = x - mean.float()
    if spec.rotate:
        x = transform.rotate(x, spec.seed)
    values = x.unflatten(-1, (-1, CHUNK))
    norms = med3x.chunk_norms(x)
    if not spec.med3x:
        return Prepared(values, norms, torch.zeros_like(norms, dtype=torch.bool), filled)
    if median is None:
        median = med3x.median(norms, spec.med3x_scope, filled)
    elif median.dim() == 1:
        median = median.view(-1, *[1] * (norms.dim() - 2))
    outliers = med3x.outlier_mask(spec, norms, median) & filled.unsqueeze(-1)
    return Prepared(values, norms, outliers, filled)


def _nearest(spec: CacheSpec, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Codeword of each chunk of [B, H, ..., C, 4]: half index, sign, and the codeword x 127.
    heads = values.shape[1]
    books = codebook.secondaries(spec, heads, values.device)
    table = codebook.codewords(spec, heads, values.device).float()
    if len(books) == 1:
        half, negative = codebook.nearest(values, books[0])
        return half, negative, table[0].index_select(0, half.reshape(-1)).view(values.shape)
    half = values.new_empty(values.shape[:-1], dtype=torch.int32)
    negative = values.new_empty(values.shape[:-1], dtype=torch.bool)
    word = torch.empty_like(values)
    for head, book in enumerate(books):
        half[:, head], negative[:, head] = codebook.nearest(values[:, head], book)
        rows = table[head].index_select(0, half[:, head].reshape(-1))
        word[:, head] = rows.view(word[:, head].shape)
    return half, negative, word


def quantize(spec: CacheSpec, prepared: Prepared, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Words `[..., C]` int32 (0 where kept or empty) and scale codes `[..., G]`.

    Args:
        kept: `[..., C]` bool: outliers with a slot in the pool; they do not count for the scale.
    """
    values, norms, _, filled = prepared
    half, negative, word = _nearest(spec, values)
    radii = norms
    if spec.least_squares:  # of the int8 codeword: r = <x, c> / <c, c>, c = word / 127
        radii = (dot(values, word).abs() * 127) / dot(word, word)
    amax = radius.group_amax(spec, torch.where(kept, 0.0, radii))
    scales = radius.scale_encode(spec, amax)
    codes = radius.radius_codes(spec, radii, radius.scale_decode(spec, scales))
    words = (half | (negative.int() << (spec.index_bits - 1))) << spec.radius_bits
    words = (words | codes) * (~kept & filled.unsqueeze(-1))
    return words, scales * filled.unsqueeze(-1)


def outlier_words(spec: CacheSpec, slots: Tensor) -> Tensor:
    """The words (int32) of outliers in the given pool slots."""
    flag = 1 << (spec.radius_bits + spec.index_bits) if spec.has_flag_bit else 0
    return (slots << spec.radius_bits) | flag


def is_outlier(spec: CacheSpec, words: Tensor, filled: Tensor) -> Tensor:
    """`[..., C]` bool for words `[..., C]` of tokens `[...]`: is the chunk in the pool?

    Needs to know which tokens are not empty, as the word of an empty token is 0.
    """
    if not spec.med3x:
        return torch.zeros_like(words, dtype=torch.bool)
    if spec.has_flag_bit:
        return words >= 1 << (spec.radius_bits + spec.index_bits)
    return ((words & (2**spec.radius_bits - 1)) == 0) & filled.unsqueeze(-1)


def outlier_slots(spec: CacheSpec, words: Tensor) -> Tensor:
    """The pool slots (int32) in the index fields of words."""
    return (words >> spec.radius_bits) & (2**spec.index_bits - 1)


def pool_values(spec: CacheSpec, values: Tensor, exponents: Tensor | None = None) -> Tensor:
    """Outliers `[..., 4]` float32 as the pool stores them.

    Args:
        exponents: int8, broadcastable to `[..., 4]`; for int8x4 only.
    """
    if spec.outliers == "int8x4":
        scaled = (values / med3x.power_of_two(exponents)).round_().clamp_(-127, 127)
        return scaled.to(torch.int8)
    limit = torch.finfo(spec.pool_dtype).max
    return values.clamp(-limit, limit).to(spec.pool_dtype)


def encode_blocks(
    spec: CacheSpec,
    x: Tensor,
    *,
    valid: Tensor | None = None,
    mean: Tensor | None = None,
    median: Tensor | None = None,
) -> BlockCodes:
    """Encodes whole blocks.

    Args:
        x: `[B, H, nb, block, D]`, any float dtype. H are the global KV heads 0..H-1.
        valid: bool, broadcastable to `[B, H, nb, block]` (`[block]`, `[nb, block]`): tokens that
            are not valid are stored as empty and may hold anything.
        mean: `[B, H, 1, D]`, given with center "first" (and only then).
        median: see `prepare`.

    Returns:
        BlockCodes; `means` is a tensor with center "block" and None otherwise.
    """
    check(spec)
    if x.dim() != 5 or x.shape[-2:] != (spec.block, spec.head_dim):
        raise ValueError(
            f"expected [B, H, nb, {spec.block}, {spec.head_dim}], got {tuple(x.shape)}"
        )
    if (mean is not None) != (spec.center == "first"):
        raise ValueError(
            f'center={spec.center!r}: a mean is given exactly with center="first", '
            f"got {'a' if mean is not None else 'no'} mean"
        )
    x = x.float()
    filled = _filled(x, valid)
    if valid is not None:
        x = torch.where(filled.unsqueeze(-1), x, 0.0)
    means = None
    if spec.center == "block":
        means = transform.block_mean(x, filled & x.isfinite().all(-1))
        mean = means
    shift = None if mean is None else mean.unsqueeze(-2)
    prepared = prepare(spec, x, filled=filled, mean=shift, median=median)
    batch, heads, blocks = x.shape[:3]
    exponents = x.new_zeros((batch, heads, blocks, spec.tiles), dtype=torch.int8)
    pool = x.new_zeros((batch, heads, blocks, spec.pool_slots, CHUNK), dtype=spec.pool_dtype)
    if not spec.med3x:
        words, scales = quantize(spec, prepared, prepared.outliers)
        capped = torch.zeros((), dtype=torch.int64, device=x.device)
        return BlockCodes(pack_words(words, spec), scales, pool, exponents, means, capped)

    flat, slots, left = med3x.fit_pool(
        prepared.outliers.flatten(-2), prepared.norms.flatten(-2), spec.pool_slots
    )
    kept = flat.view(prepared.outliers.shape)
    words, scales = quantize(spec, prepared, kept)
    words = words | (outlier_words(spec, slots).view(words.shape) * kept)
    per_token = None
    if spec.outliers == "int8x4":
        exponents = med3x.tile_exponents(spec, prepared.values, kept)
        per_token = exponents.repeat_interleave(med3x.TILE, -1)[..., : spec.block, None, None]
    stored = pool_values(spec, prepared.values, per_token).flatten(-3, -2)
    # The extra last slot takes what is not kept, so that the scatter has no data-dependent shape.
    target = torch.where(flat, slots, spec.pool_slots).long().unsqueeze(-1).expand(stored.shape)
    pool = torch.cat((pool, pool.new_zeros((batch, heads, blocks, 1, CHUNK))), -2)
    pool = pool.scatter_(-2, target, stored)[..., : spec.pool_slots, :].contiguous()
    return BlockCodes(pack_words(words, spec), scales, pool, exponents, means, left.sum())


def encode_tokens(
    spec: CacheSpec,
    x: Tensor,
    mean: Tensor | None = None,
    median: Tensor | None = None,
    kept: Tensor | None = None,
) -> TokenCodes:
    """Encodes tokens one by one (window = 0), against a given mean.

    Args:
        x: `[B, H, n, D]`, any float dtype.
        mean: `[B, H, 1, D]` or None.
        median: see `prepare`.
        kept: `[B, H, n, C]` bool, the outliers that got a slot (the others become ordinary chunks
            and count for the scale); None: all of them.
    """
    check(spec)
    x = x.float()
    prepared = prepare(spec, x, filled=_filled(x, None), mean=mean, median=median)
    kept = prepared.outliers if kept is None else prepared.outliers & kept
    words, scales = quantize(spec, prepared, kept)
    return TokenCodes(words, scales, kept, prepared.norms, prepared.values)


# -- decode ------------------------------------------------------------------------------------
_TABLE_BITS = 17  # larger word tables fall out of the caches: look up the index, then multiply


def unit(spec: CacheSpec) -> float:
    """What 1 in `decode_units` stands for in a token of scale 1."""
    return 1 / (127 * spec.top_level)


def decode_units(spec: CacheSpec, words: Tensor) -> Tensor:
    """`[B, H, ..., C]` int32 words to `[B, H, ..., C, 4]` int16: level · codeword x 127, exact.

    Times the token's scale and `unit(spec)`, this is the chunk. Outliers and level 0 are zeros.
    """
    bits = spec.radius_bits + spec.index_bits
    if flagged := spec.has_flag_bit:
        outliers = words >= 1 << bits
        words = torch.where(outliers, 0, words)
    haar = spec.codebook == "haar"
    if haar or bits > _TABLE_BITS:
        table = codebook.index_table(spec, words.shape[1], words.device)
        rows, entries = words >> spec.radius_bits, 2**spec.index_bits
    else:
        table = codebook.word_table(spec, words.shape[1], words.device)
        rows, entries = words, 2**bits
    if haar:
        offset = torch.arange(words.shape[1], device=words.device, dtype=torch.int32) * entries
        rows = rows + offset.view(-1, *[1] * (words.dim() - 2))
    flat = table.view(torch.int64).view(-1)  # a row is one 8-byte element: copied fastest
    out = flat.index_select(0, rows.reshape(-1)).view(torch.int16).view(*rows.shape, CHUNK)
    if rows is not words:
        level = (words & (2**spec.radius_bits - 1)) + spec.level_offset
        out *= level.to(torch.int16).unsqueeze(-1)
    if flagged:
        out.masked_fill_(outliers.unsqueeze(-1), 0)
    return out


def decode_words(spec: CacheSpec, words: Tensor) -> Tensor:
    """Chunks of scale 1, `[B, H, ..., C]` int32 words to `[B, H, ..., C, 4]` float32."""
    return decode_units(spec, words).float().mul_(unit(spec))


def decode_blocks(
    spec: CacheSpec,
    codes: Tensor,
    scales: Tensor,
    pool: Tensor,
    exponents: Tensor,
    means: Tensor | None,
) -> Tensor:
    """The tensor that packed blocks stand for, `[B, H, nb, block, D]` float32.

    Args:
        codes, scales, pool, exponents: as in `BlockCodes`.
        means: `[B, H, nb or 1, D]` float16, or None.
    """
    check(spec)
    words = unpack_words(codes, spec)
    filled = scales[..., 0] != 0
    out = decode_units(spec, words).flatten(-2).float()
    scale = radius.scale_decode(spec, scales).mul_(unit(spec))
    for group in range(spec.scale_groups):
        part = out if spec.scale_groups == 1 else out[..., 64 * group : 64 * (group + 1)]
        part *= scale[..., group : group + 1]
    if spec.med3x:
        _place_outliers(spec, out, words, filled, pool, exponents)
    if spec.rotate:
        out = transform.unrotate(out, spec.seed)
    if means is not None:
        mean = means.float().unsqueeze(-2)
        if tables.may_branch(out) and bool(filled.all()):
            out += mean
        else:
            out += mean * filled.unsqueeze(-1)
    return out


def _place_outliers(spec, out, words, filled, pool, exponents) -> None:
    mask = is_outlier(spec, words, filled)
    shape = words.shape  # [B, H, nb, block, C]
    per_block = shape[-2] * shape[-1]
    if tables.may_branch(out):
        where = mask.reshape(-1).nonzero().squeeze(-1)  # few: 0 to 10 %
        slot = outlier_slots(spec, words.reshape(-1).index_select(0, where))
        block = where // per_block
        row = block * spec.pool_slots + slot
        values = pool.reshape(-1, CHUNK).index_select(0, row).float()
        if spec.outliers == "int8x4":
            tile = block * spec.tiles + (where % per_block) // (med3x.TILE * shape[-1])
            power = med3x.power_of_two(exponents.reshape(-1).index_select(0, tile))
            values *= power.unsqueeze(-1)
        out.view(-1, CHUNK).index_copy_(0, where, values)
        return
    slot = outlier_slots(spec, words).clamp_(max=spec.pool_slots - 1).flatten(-2).long()
    values = pool.float().gather(-2, slot.unsqueeze(-1).expand(*slot.shape, CHUNK))
    values = values.view(*shape, CHUNK)
    if spec.outliers == "int8x4":
        power = med3x.power_of_two(exponents).repeat_interleave(med3x.TILE, -1)
        values *= power[..., : shape[-2], None, None]
    chunks = out.unflatten(-1, (-1, CHUNK))
    chunks.copy_(torch.where(mask.unsqueeze(-1), values, chunks))


# -- both --------------------------------------------------------------------------------------
def fake_quantize(
    spec: CacheSpec,
    x: Tensor,
    *,
    mean: Tensor | None = None,
    median: Tensor | None = None,
) -> Tensor:
    """What packing all of `x` and reading it gives, block by block; float32.

    Args:
        x: `[B, H, T, D]`, any float dtype. T need not be a multiple of the block: the last block
            is then encoded from its own tokens only.
        mean: `[B, H, 1, D]` for center "first"; None: the mean over all of x, as in a first write.
        median: see `prepare`.
    """
    tokens, dim = x.shape[-2:]
    blocks = -(-tokens // spec.block)
    pad = blocks * spec.block - tokens
    blocked = torch.nn.functional.pad(x, (0, 0, 0, pad)).unflatten(-2, (blocks, spec.block))
    valid = torch.arange(blocks * spec.block, device=x.device).view(blocks, spec.block) < tokens
    if spec.center == "first" and mean is None:
        mean = first_mean(x)
    coded = encode_blocks(spec, blocked, valid=valid, mean=mean, median=median)
    means = coded.means if mean is None else mean
    out = decode_blocks(spec, coded.codes, coded.scales, coded.pool, coded.exponents, means)
    return out.flatten(2, 3)[:, :, :tokens]


def first_mean(x: Tensor) -> Tensor:
    """The mean of a first write, `[B, H, T, D] -> [B, H, 1, D]` float16 (center "first")."""
    x = x.float()
    return transform.block_mean(x, _filled(x, None) & x.isfinite().all(-1)).unsqueeze(-2)
