"""Words of any width as rows of bytes, in planes.

A word of `word_bits` is cut into planes whose widths are powers of two, low bits first (13 = 8 + 4
+ 1). In a plane the field of chunk c, of width w, sits at bit c·w, little endian. So every field is
aligned, and unpacking is a few passes over small integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import CacheSpec

# To spread a byte over its fields: view the byte as an integer of one byte per field, shift copies
# into place, mask.
_SPREAD = {
    4: (torch.int16, (4,), 0x0F0F),
    2: (torch.int32, (6, 12, 18), 0x03030303),
}
_ONES, _BITS = 0x0101010101010101, 0x8040201008040201 - 2**64


def pack_words(words: Tensor, spec: CacheSpec) -> Tensor:
    """`[..., C]` int32 words to `[..., row_bytes]` uint8 rows."""
    planes, shift = [], 0
    for width in spec.planes:
        field = words >> shift if shift else words
        shift += width
        if width >= 8:
            field = field.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
            planes.append(field[..., : width // 8].flatten(-2))
            continue
        field = (field & (2**width - 1)).to(torch.uint8)
        per_byte = 8 // width
        if pad := -field.shape[-1] % per_byte:
            field = torch.nn.functional.pad(field, (0, pad))
        parts = field.unflatten(-1, (-1, per_byte)).unbind(-1)
        byte = parts[0]
        for position, part in enumerate(parts[1:], 1):
            byte = byte | (part << (position * width))
        planes.append(byte)
    return planes[0].contiguous() if len(planes) == 1 else torch.cat(planes, -1)


def unpack_words(rows: Tensor, spec: CacheSpec) -> Tensor:
    """`[..., row_bytes]` uint8 rows to `[..., C]` int32 words."""
    words, shift, start = None, 0, 0
    for width in spec.planes:
        count = (spec.chunks * width + 7) // 8
        field = _unpack_plane(rows[..., start : start + count], width)[..., : spec.chunks].int()
        if width == 16:
            field &= 0xFFFF
        if shift:
            field <<= shift
        words = field if words is None else words.bitwise_or_(field)
        start, shift = start + count, shift + width
    return words


def _unpack_plane(part: Tensor, width: int) -> Tensor:
    if width == 16:
        part = part.contiguous()
        if part.storage_offset() % 2:  # a slice of rows of an odd length
            part = part.clone()
        return part.view(torch.int16)
    if width == 8:
        return part
    if width == 1:
        spread = (part.long() * _ONES) & _BITS
        return spread.view(torch.uint8) != 0
    dtype, shifts, mask = _SPREAD[width]
    byte = part.to(dtype)
    spread = byte
    for shift in shifts:
        spread = spread | (byte << shift)
    return (spread & mask).contiguous().view(torch.uint8)
