"""Words of any width as rows of bytes, in planes.

A word of `word_bits` is cut into planes whose widths are powers of two, low bits first (13 = 8 + 4
+ 1). In a plane the field of chunk c, of width w, sits at bit c·w, little endian. So every field is
aligned, and unpacking is a few passes over small integers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .spec import CacheSpec
from .tables import cached_table


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
    lane = torch.int16 if spec.word_bits <= 16 else torch.int32  # narrow ones: half the traffic
    lanes = torch.empty((*rows.shape[:-1], spec.chunks), dtype=lane, device=rows.device)
    shift = start = 0
    for width in spec.planes:
        count = (spec.chunks * width + 7) // 8
        plane = rows[..., start : start + count]
        if width == 16:
            lanes.copy_(_pairs(plane))
        else:
            field = _spread(plane, width, shift, lane)[..., : spec.chunks]
            lanes = lanes.bitwise_or_(field) if shift else lanes.copy_(field)
        if width == 16 and lane is torch.int32:
            lanes &= 0xFFFF
        start, shift = start + count, shift + width
    words = lanes.int()
    return words.bitwise_and_(0xFFFF) if spec.word_bits == 16 else words


def _pairs(plane: Tensor) -> Tensor:
    if plane.stride(-1) != 1 or any(size % 2 for size in plane.stride()[:-1]):
        plane = plane.contiguous()
    if plane.storage_offset() % 2:
        plane = plane.clone(memory_format=torch.contiguous_format)
    return plane.view(torch.int16)


def _spread(plane: Tensor, width: int, shift: int, lane: torch.dtype) -> Tensor:
    if width == 8:
        return plane.to(lane) << shift if shift else plane
    # One lookup gives all the fields of a byte, shifted into place.
    table = _spread_table(width, shift, lane, plane.device)
    size = table.shape[1] * lane.itemsize
    if size <= 16:  # a row that one element can hold is copied fastest
        table = table.view({4: torch.int32, 8: torch.int64, 16: torch.complex128}[size]).view(-1)
    fields = table.index_select(0, plane.reshape(-1).int())
    return fields.view(lane).view(*plane.shape[:-1], -1)


@cached_table(64)
def _spread_table(width: int, shift: int, lane: torch.dtype, device: torch.device) -> Tensor:
    bits = torch.arange(0, 8, width, dtype=torch.int32)
    fields = (torch.arange(256, dtype=torch.int32)[:, None] >> bits) & (2**width - 1)
    return (fields << shift).to(lane).to(device)
