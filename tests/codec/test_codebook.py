import dataclasses
import hashlib

import pytest
import torch

from hqmq_compile.codec import codebook
from hqmq_compile.codec.quaternion import HALF_UNITS, dot, multiply, norm
from hqmq_compile.codec.spec import CacheSpec

SPEC = CacheSpec("key", 64)
HAAR = CacheSpec("key", 64, codebook="haar", secondary=96, layer=3, seed=7)


def digest(t):
    return hashlib.sha256(bytes(t.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()


def chosen(x, secondary):
    half, negative = codebook.nearest(x, secondary)
    word = multiply(HALF_UNITS[(half % 12).long()], secondary[(half // 12).long()])
    return torch.where(negative.unsqueeze(-1), -word, word)


# -- nearest -----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 5, 96, 170])
def test_nearest_reaches_the_brute_force_maximum(size):
    generator = torch.Generator().manual_seed(size)
    secondary = codebook.random_units(size, generator).float()
    x = torch.randn(3000, 4, generator=generator) * torch.randn(3000, 1, generator=generator).exp()
    found = dot(x, chosen(x, secondary))
    torch.testing.assert_close(found, codebook.brute_force(x, secondary), rtol=2e-6, atol=0)


def test_nearest_recovers_every_codeword():
    words = codebook.codewords(SPEC, 1)[0].float()
    for sign in (1, -1):
        half, negative = codebook.nearest(sign * words, codebook.load_universal(170))
        assert torch.equal(half, torch.arange(12 * 170, dtype=torch.int32))
        assert torch.equal(negative, torch.full_like(negative, sign < 0))


def test_nearest_depends_on_the_chunk_alone():
    secondary = codebook.load_universal(42)
    x = torch.randn(9001, 4, generator=torch.Generator().manual_seed(0))
    x[::3] = x[::3].bfloat16().float()  # near ties are likelier among coarse numbers
    half, negative = codebook.nearest(x, secondary)
    for start, stop in ((0, 1), (1, 2), (5, 22), (4000, 9001), (8999, 9001)):
        h, n = codebook.nearest(x[start:stop], secondary)
        assert torch.equal(h, half[start:stop]) and torch.equal(n, negative[start:stop])
    order = torch.randperm(9001)
    assert torch.equal(codebook.nearest(x[order], secondary)[0], half[order])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_nearest_in_threads(mode):
    secondary = codebook.load_universal(10)
    x = torch.randn(5 * codebook._CHUNKS_PER_THREAD + 3, 4)
    expected = torch.cat([codebook.nearest(part, secondary)[0] for part in x.split(1000)])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with mode():
            inside = (x + 0).requires_grad_(mode is torch.enable_grad)
            assert torch.equal(codebook.nearest(inside, secondary)[0], expected)
    finally:
        torch.set_num_threads(threads)


def test_nearest_keeps_shape_and_takes_degenerate_chunks():
    x = torch.zeros(2, 3, 4)
    x[0, 0, 1], x[0, 1, 2], x[1, 1] = torch.nan, torch.inf, 1e-30
    half, negative = codebook.nearest(x, codebook.load_universal(5))
    assert half.shape == negative.shape == (2, 3)
    assert half.dtype == torch.int32 and negative.dtype == torch.bool
    assert half.min() >= 0 and half.max() < 60
    assert codebook.nearest(torch.zeros(0, 4), codebook.load_universal(5))[0].shape == (0,)


# -- codebooks ---------------------------------------------------------------------------------
def test_haar_is_pinned():
    # A stored cache is only readable with the codebook it was written with.
    book = codebook.secondary("haar", 96, 7, 3, 1, "key")
    assert digest(book) == "b11ca6f6f81e2d0a529bc0bb80135e431b27102fcae0d2b6f98eb1c4000df78e"
    torch.testing.assert_close(norm(book), torch.ones(96))


def test_haar_depends_on_seed_layer_head_and_role_only():
    base = (96, 7, 3, 1, "key")
    books = {digest(codebook.secondary("haar", *base))}
    for other in ((96, 8, 3, 1, "key"), (96, 7, 4, 1, "key"), (96, 7, 3, 0, "key"),
                  (96, 7, 3, 1, "value")):  # fmt: skip
        books.add(digest(codebook.secondary("haar", *other)))
    assert len(books) == 5
    two, eight = codebook.secondaries(HAAR, 2), codebook.secondaries(HAAR, 8)
    assert torch.equal(two, eight[:2])
    assert torch.equal(eight[1], codebook.secondary("haar", *base))


def test_haar_is_uniform():
    units = codebook.random_units(100_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        units.T @ units / len(units), torch.eye(4).double() / 4, atol=0.003, rtol=0
    )
    assert units.mean(0).abs().max() < 0.006
    assert abs(units[:, 0].pow(4).mean() - 1 / 8) < 0.002  # E w^4 on S^3


def test_codewords_are_the_rounded_products():
    words = codebook.codewords(HAAR, 2)
    assert words.shape == (2, 12 * 96, 4) and words.dtype == torch.int8
    h = 12 * 50 + 7
    exact = 127 * multiply(HALF_UNITS[7], codebook.secondary("haar", 96, 7, 3, 1, "key")[50])
    assert torch.equal(words[1, h].float(), exact.round())
    assert codebook.codewords(SPEC, 8).shape == (1, 12 * 170, 4)
    assert len({tuple(w) for w in codebook.codewords(SPEC, 1)[0].tolist()}) == 12 * 170


@pytest.mark.parametrize("spec", [
    SPEC,
    HAAR,
    dataclasses.replace(SPEC, med3x=3.0, secondary=10, radius_bits=3),
    dataclasses.replace(SPEC, zero_level=True, secondary=5, radius_bits=6),
], ids=["12+4", "haar", "escape", "zero"])  # fmt: skip
def test_word_table_entries(spec):
    heads = 2 if spec.codebook == "haar" else 1
    table = codebook.word_table(spec, 2)
    index = codebook.index_table(spec, 2)
    assert table.shape == (heads, 2 ** (spec.radius_bits + spec.index_bits), 4)
    assert index.shape == (heads, 2**spec.index_bits, 4)
    half = codebook.codewords(spec, 2)
    for h, negative, code in ((0, 0, 0), (12 * spec.secondary - 1, 1, 1), (17, 1, 2), (29, 0, 7)):
        field = h | negative << (spec.index_bits - 1)
        value = (1 - 2 * negative) * half[-1, h].to(torch.int16)
        assert torch.equal(index[-1, field], value)
        expected = (code + spec.level_offset) * value
        assert torch.equal(table[-1, field << spec.radius_bits | code], expected)
    unused = 12 * spec.secondary << spec.radius_bits
    if 12 * spec.secondary < 2 ** (spec.index_bits - 1):
        assert not table[:, unused : 2 ** (spec.radius_bits + spec.index_bits - 1)].any()


def test_layers_share_the_universal_tables():
    other = dataclasses.replace(SPEC, layer=5, role="value", seed=3)
    assert codebook.word_table(SPEC, 2) is codebook.word_table(other, 8)


def test_tables_ignore_the_state_of_the_caller():
    spec = dataclasses.replace(HAAR, seed=12345)
    expected = codebook.word_table(spec, 1)
    clean = (codebook._secondaries, codebook._codewords, codebook._index_table,
             codebook._word_table, codebook.secondary)  # fmt: skip
    from torch._subclasses.fake_tensor import FakeTensorMode

    for table in clean:
        table.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode(), FakeTensorMode():
            again = codebook.word_table(spec, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert type(again) is torch.Tensor and not again.is_inference()
    assert again.dtype == torch.int16 and torch.equal(again, expected)


# -- errors ------------------------------------------------------------------------------------
def test_unshipped_size_names_the_shipped_ones_and_haar():
    with pytest.raises(ValueError, match=r"secondary=96; .*\(5, 10, 21, 42, 85, 170, 341\).*haar"):
        codebook.secondary("universal", 96)


def test_unknown_codebook():
    with pytest.raises(ValueError, match="unknown codebook 'e8'"):
        codebook.secondary("e8", 96)


def test_haar_codebooks_belong_to_a_head_of_the_model():
    whole = codebook.secondaries(HAAR, 4)
    for first in (0, 1, 2):
        part = codebook.secondaries(HAAR.replace(first_head=first), 2)
        assert torch.equal(part, whole[first : first + 2])
    assert codebook.codewords(SPEC, 2) is codebook.codewords(SPEC.replace(first_head=2), 2)
