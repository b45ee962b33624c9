import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hqmq_compile.codec.packing import pack_words, unpack_words
from hqmq_compile.codec.spec import CacheSpec


def specs():
    return st.builds(
        lambda chunks, size, bits, flag: CacheSpec(
            "key",
            4 * chunks,
            secondary=size,
            radius_bits=bits,
            med3x=3.0 * flag,
            outlier_flag="bit",
            codebook="haar",
        ),
        st.integers(1, 40),
        st.integers(1, 3000),
        st.integers(1, 8),
        st.booleans(),
    )


def naive_pack(words, spec):
    row = []
    shift = 0
    for width in spec.planes:
        plane = 0
        for c, word in enumerate(words):
            plane |= (word >> shift & (1 << width) - 1) << (c * width)
        row += plane.to_bytes((len(words) * width + 7) // 8, "little")
        shift += width
    return row


@settings(deadline=None)
@given(specs(), st.integers(0, 2**31))
def test_round_trip_and_layout(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 2**spec.word_bits, (2, 3, spec.chunks), generator=generator).int()
    words[0, 0], words[0, 1] = 0, 2**spec.word_bits - 1
    rows = pack_words(words, spec)
    assert rows.dtype == torch.uint8 and rows.shape == (2, 3, spec.row_bytes)
    assert rows[1, 2].tolist() == naive_pack(words[1, 2].tolist(), spec)
    back = unpack_words(rows, spec)
    assert back.dtype == torch.int32 and torch.equal(back, words)


@pytest.mark.parametrize("size, bits, row", [(170, 4, 64), (42, 3, 52), (10, 3, 44), (341, 6, 76)])
def test_row_bytes_of_32_chunks(size, bits, row):
    assert CacheSpec("key", 128, secondary=size, radius_bits=bits).row_bytes == row


@settings(deadline=None, max_examples=30)
@given(specs())
def test_strided_and_misaligned_rows(spec):
    words = torch.randint(0, 2**spec.word_bits, (3, 5, spec.chunks)).int()
    rows = pack_words(words, spec)
    odd = torch.zeros(3, 5, spec.row_bytes + 1, dtype=torch.uint8)
    odd[..., 1:] = rows
    assert torch.equal(unpack_words(odd[..., 1:], spec), words)
    flat = torch.cat((torch.zeros(1, dtype=torch.uint8), rows.flatten()))[1:].view(rows.shape)
    assert torch.equal(unpack_words(flat, spec), words)
    assert torch.equal(unpack_words(rows.transpose(0, 1), spec), words.transpose(0, 1))
    assert torch.equal(pack_words(words.transpose(0, 1), spec), rows.transpose(0, 1))
