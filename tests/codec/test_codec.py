import dataclasses

import pytest
import torch

from hqmq_compile.codec import codebook, codec, med3x, radius, transform
from hqmq_compile.codec.packing import unpack_words
from hqmq_compile.codec.spec import CacheSpec

KEY = CacheSpec("key", 64, med3x=3.0, center="block", block=32)
VALUE = CacheSpec("value", 64, secondary=42, radius_bits=3, block=32)
PAPER = CacheSpec(
    "key",
    64,
    secondary=96,
    codebook="haar",
    scale="float16",
    least_squares=False,
    zero_level=True,
    med3x=3.0,
    med3x_scope="batch",
    outliers="16bit",
    outlier_flag="bit",
    block=32,
)
SPECS = {
    "key": KEY,
    "value": VALUE,
    "paper": PAPER,
    "rotated": dataclasses.replace(KEY, rotate=True, head_dim=128, block=64),
    "wide": dataclasses.replace(VALUE, secondary=341, radius_bits=6, head_dim=80),
    "haar": dataclasses.replace(KEY, codebook="haar", layer=2, outliers="16bit"),
    "flagged int8": dataclasses.replace(KEY, outlier_flag="bit", secondary=10, block=40),
    "first": dataclasses.replace(KEY, center="first", outliers="16bit"),
    "half": dataclasses.replace(VALUE, scale="float16", zero_level=True),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def sample(spec, batch=2, heads=3, blocks=2, seed=0, rate=0.05):
    """Gaussian blocks with a mean, and chunks five times as long at the given rate."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, heads, blocks, spec.block, spec.chunks, 4)
    x = torch.randn(shape, generator=generator)
    x *= 1 + 4 * (torch.rand((*shape[:-1], 1), generator=generator) < rate)
    return x.flatten(-2) + torch.randn(spec.head_dim, generator=generator)


def given_mean(spec, x):
    if spec.center != "first":
        return None
    return codec.first_mean(x.flatten(2, 3))


def encode(spec, x, **kwargs):
    return codec.encode_blocks(spec, x, mean=given_mean(spec, x), **kwargs)


def decode(spec, coded, mean=None):
    means = coded.means if mean is None else mean
    return codec.decode_blocks(spec, *coded[:4], means)


def snr(x, y):
    return 10 * torch.log10(x.pow(2).sum() / (x - y).pow(2).sum()).item()


def assert_same(a, b):
    for name, left, right in zip(a._fields, a, b, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            assert left.dtype == right.dtype, name
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True, msg=name)


# -- fidelity ----------------------------------------------------------------------------------
@pytest.mark.parametrize("change, decibels", [
    ({"scale": "float16"}, 21.10),  # method.md: 21.10 dB at 4.125 bits
    ({}, 21.1),
    ({"codebook": "haar"}, 19.6),
    ({"secondary": 42, "radius_bits": 3}, 16.8),
    ({"secondary": 341, "radius_bits": 6}, 23.6),
    ({"med3x": 3.0, "center": "block", "rotate": True}, 21.1),
], ids=str)  # fmt: skip
def test_gaussian_data(change, decibels):
    spec = dataclasses.replace(CacheSpec("key", 128), **change)
    x = torch.randn(1, 2, 2048, 128, generator=torch.Generator().manual_seed(0))
    assert snr(x, codec.fake_quantize(spec, x)) == pytest.approx(decibels, abs=0.1)


def test_outliers_and_means_need_med3x_and_centering():
    x = sample(KEY, blocks=8)
    x[..., 7] += 30.0
    flat = x.flatten(2, 3)
    plain = dataclasses.replace(KEY, med3x=0.0, center="none")
    centered = x - x.mean(-2, keepdim=True)
    error = {
        name: (flat - codec.fake_quantize(spec, flat)).pow(2).mean().item()
        for name, spec in (
            ("both", KEY),
            ("no outliers", dataclasses.replace(KEY, med3x=0.0)),
            ("neither", plain),
        )
    }
    assert error["both"] < 0.7 * error["no outliers"] < 0.7 * error["neither"]
    assert error["both"] < 0.012 * centered.pow(2).mean()


# -- layout ------------------------------------------------------------------------------------
@every_spec
def test_shapes_and_dtypes(spec):
    x = sample(spec).bfloat16()
    coded = encode(spec, x)
    lead = (2, 3, 2)
    assert coded.codes.shape == (*lead, spec.block, spec.row_bytes)
    assert coded.scales.shape == (*lead, spec.block, spec.scale_groups)
    assert coded.pool.shape == (*lead, spec.pool_slots, 4)
    assert coded.exponents.shape == (*lead, spec.tiles)
    assert coded.codes.dtype == torch.uint8 and coded.scales.dtype == spec.scale_dtype
    assert coded.pool.dtype == spec.pool_dtype and coded.exponents.dtype == torch.int8
    if spec.center == "block":
        assert coded.means.shape == (*lead, spec.head_dim)
        assert coded.means.dtype == torch.float16
    else:
        assert coded.means is None
    assert coded.capped.shape == () and coded.capped.dtype == torch.int64
    assert all(t is None or t.is_contiguous() for t in coded)
    out = decode(spec, coded, given_mean(spec, x))
    assert out.shape == x.shape and out.dtype == torch.float32


@every_spec
def test_decode_follows_the_documented_layout(spec):
    """A scalar decoder written from the layout alone, on the bytes of one block."""
    x = sample(spec, blocks=1)
    coded = encode(spec, x)
    mean = given_mean(spec, x)
    out = decode(spec, coded, mean)
    heads = codebook.codewords(spec, 3)
    b, h = 1, 2
    table = heads[h if spec.codebook == "haar" else 0].tolist()
    expected = torch.zeros(spec.block, spec.head_dim)
    outliers = 0
    for t in range(0, spec.block, 5):
        row = int.from_bytes(bytes(coded.codes[b, h, 0, t].tolist()), "little")
        words, position, shift = [0] * spec.chunks, 0, 0
        for width in spec.planes:
            for c in range(spec.chunks):
                words[c] |= (row >> position + c * width & (1 << width) - 1) << shift
            position += (spec.chunks * width + 7) // 8 * 8
            shift += width
        for c, word in enumerate(words):
            code = word & 2**spec.radius_bits - 1
            index = word >> spec.radius_bits & 2**spec.index_bits - 1
            flag = word >> spec.radius_bits + spec.index_bits
            if flag or (spec.has_escape and code == 0):
                value = coded.pool[b, h, 0, index].float()
                if spec.outliers == "int8x4":
                    value = value * 2.0 ** coded.exponents[b, h, 0, t // 32].item()
                outliers += 1
            else:
                sign = -1 if index >> spec.index_bits - 1 else 1
                word8 = table[index & 2 ** (spec.index_bits - 1) - 1]
                scale = coded.scales[b, h, 0, t, c // 16 if spec.scale == "log8" else 0].item()
                if spec.scale == "log8":
                    scale = 2 ** ((scale - 128) / 8)
                level = code + spec.level_offset
                value = torch.tensor(word8) * (sign * level * scale / (127 * spec.top_level))
            expected[t, 4 * c : 4 * c + 4] = value
        if spec.rotate:
            expected[t] = expected[t] @ transform.hadamard(spec.head_dim, spec.seed).T
        if spec.center == "block":
            expected[t] += coded.means[b, h, 0].float()
        elif mean is not None:
            expected[t] += mean[b, h, 0].float()
    torch.testing.assert_close(out[b, h, 0, ::5], expected[::5], rtol=1e-5, atol=1e-5)
    if not spec.rotate:  # which leaves no outliers in this sample
        assert (outliers > 0) == bool(spec.med3x)


@pytest.mark.parametrize("spec", [KEY, VALUE, PAPER], ids=["key", "value", "paper"])
def test_decode_words_times_scale_is_the_chunk(spec):
    spec = dataclasses.replace(spec, center="none")
    coded = encode(spec, sample(spec))
    words = unpack_words(coded.codes, spec)
    assert spec.scale_groups == 1
    outlier = codec.is_outlier(spec, words, coded.scales[..., 0] != 0)
    chunks = codec.decode_words(spec, words)
    assert not chunks[outlier].any()
    scaled = chunks * radius.scale_decode(spec, coded.scales).unsqueeze(-1)
    out = decode(spec, coded).unflatten(-1, (-1, 4))
    torch.testing.assert_close(scaled[~outlier], out[~outlier])


# -- a token depends on its block alone --------------------------------------------------------
@every_spec
def test_independent_of_batch_mates_and_neighbours(spec):
    x = sample(spec, batch=3, heads=3, blocks=4)
    mean = given_mean(spec, x)
    median = torch.tensor([2.0, 1.5, 1.8]) if spec.med3x_scope == "batch" else None
    whole = codec.encode_blocks(spec, x, mean=mean, median=median)
    out = decode(spec, whole, mean)
    for b, block in ((0, 0), (1, 2), (2, 3)):
        one = (slice(b, b + 1), slice(None), slice(block, block + 1))
        part_mean = None if mean is None else mean[b : b + 1]
        part = codec.encode_blocks(spec, x[one], mean=part_mean, median=median)
        for name in ("codes", "scales", "pool", "exponents"):
            assert torch.equal(getattr(part, name), getattr(whole, name)[one]), name
        if part.means is not None:
            assert torch.equal(part.means, whole.means[one])
        assert torch.equal(decode(spec, part, part_mean), out[one])


@every_spec
def test_independent_of_strides_dtype_and_threads(spec):
    x = sample(spec).bfloat16()
    mean = given_mean(spec, x)
    reference = codec.encode_blocks(spec, x, mean=mean)
    strided = x.permute(3, 1, 4, 0, 2).contiguous().permute(3, 1, 4, 0, 2)
    assert not strided.is_contiguous()
    assert_same(codec.encode_blocks(spec, strided, mean=mean), reference)
    assert_same(codec.encode_blocks(spec, x.double(), mean=mean), reference)
    threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    try:
        assert_same(codec.encode_blocks(spec, x, mean=mean), reference)
    finally:
        torch.set_num_threads(threads)


def test_strided_codes_decode_alike():
    x = sample(KEY)
    coded = encode(KEY, x)
    swapped = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in coded[:5]]
    assert torch.equal(codec.decode_blocks(KEY, *swapped), decode(KEY, coded))


def test_padding_does_not_count():
    """A partial block is what its valid tokens alone would give, whatever lies in the others."""
    for spec in SPECS.values():
        x = sample(spec, blocks=1)
        mean = given_mean(spec, x)
        valid = torch.arange(spec.block) < 11
        filler = x.clone()
        filler[..., 11:, :] = torch.nan
        a = codec.encode_blocks(spec, x, valid=valid, mean=mean)
        b = codec.encode_blocks(spec, filler, valid=valid.view(1, -1), mean=mean)
        assert_same(a, b)
        zeros = torch.where(valid[:, None], x, 0.0)
        assert_same(a, codec.encode_blocks(spec, zeros, mean=mean))
        out = decode(spec, a, mean)
        assert not out[..., 11:, :].any()
        assert not a.codes[..., 11:, :].any() and not a.scales[..., 11:, :].any()
        flat = x[..., :11, :].flatten(2, 3)
        again = codec.fake_quantize(spec, flat, mean=mean)
        assert torch.equal(again, out[..., :11, :].flatten(2, 3))


# -- corners -----------------------------------------------------------------------------------
@every_spec
def test_empty_buffers_read_as_zero(spec):
    coded = encode(spec, torch.zeros_like(sample(spec)))
    assert not any(t.any() for t in coded if t is not None)
    mean = torch.ones(2, 3, 1, spec.head_dim, dtype=torch.float16)
    assert not decode(spec, coded, mean if spec.center != "none" else None).any()


def test_a_token_equal_to_the_mean_is_not_empty():
    x = torch.ones(1, 1, 1, 32, 64)
    coded = encode(KEY, x)
    assert bool((coded.scales > 0).all())
    torch.testing.assert_close(decode(KEY, coded), x, atol=1e-4, rtol=0)


def test_one_zero_token_gets_no_mean():
    x = sample(KEY)
    x[:, :, :, 5] = 0
    assert not decode(KEY, encode(KEY, x))[:, :, :, 5].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_spec
def test_non_finite_tokens_touch_no_other(spec, bad):
    x = sample(spec, blocks=1)
    mean = given_mean(spec, x)
    median = torch.full((3,), 2.0) if spec.med3x_scope == "batch" else None
    clean = x.clone()
    clean[..., 3, :] = 0
    x[..., 3, 9] = bad
    coded = codec.encode_blocks(spec, x, mean=mean, median=median)
    out = decode(spec, coded, mean)
    expected = decode(spec, codec.encode_blocks(spec, clean, mean=mean, median=median), mean)
    others = torch.arange(spec.block) != 3
    assert torch.equal(out[..., others, :], expected[..., others, :])
    if spec.scale == "float16":
        assert out[..., 3, 8:12].isnan().all()


def test_huge_finite_input_stays_finite():
    for spec in SPECS.values():
        x = sample(spec) * 1e4
        out = decode(spec, encode(spec, x), given_mean(spec, x))
        assert out.isfinite().all()
        x = sample(spec) * 1e30
        out = decode(spec, encode(spec, x), given_mean(spec, x))
        assert out.isfinite().all() or spec.scale == "float16"


def test_group_of_outliers_only():
    spec = dataclasses.replace(KEY, head_dim=256, center="none", pool=1.0)
    x = torch.randn(1, 1, 1, 32, 256)
    x[..., 64:128] *= 50
    coded = encode(spec, x)
    assert bool((coded.scales[..., 1] == 1).all())
    out = decode(spec, coded)
    assert snr(x[..., 64:128], out[..., 64:128]) > 30


# -- Med3x -------------------------------------------------------------------------------------
def test_outliers_are_stored_precisely_and_leave_the_scale_alone():
    x = sample(KEY, rate=0.0)
    x[0, 0, 0, 4, 8:12] = torch.tensor([90.0, -40.0, 3.0, 1.0])
    x[0, 0, 0, 20, 0:4] = 25.0
    with_outliers, mean = encode(KEY, x), x.mean(-2, keepdim=True)[0, 0, 0]
    out = decode(KEY, with_outliers)
    exponent = with_outliers.exponents[0, 0, 0, 0].item()
    assert 127 * 2.0**exponent >= (x - mean)[0, 0, 0, 4].abs().max() > 127 * 2.0 ** (exponent - 1)
    for t, c in ((4, 2), (20, 0)):
        error = (out - x)[0, 0, 0, t, 4 * c : 4 * c + 4].abs().max()
        assert error <= 2.0 ** (exponent - 1) + 1e-3
    assert with_outliers.scales[0, 0, 0, 4] < 128 + 8 * 3


def test_full_pool_keeps_the_largest_and_quantizes_the_rest():
    spec = dataclasses.replace(KEY, pool=0.01, center="none", outliers="16bit")
    slots = spec.pool_slots
    assert slots == 5
    x = sample(spec, batch=1, heads=1, blocks=2, rate=0.0)
    generator = torch.Generator().manual_seed(1)
    chunks = x[0, 0, 1].unflatten(-1, (-1, 4))
    spots = torch.randperm(32 * 16, generator=generator)[:9].tolist()
    for rank, spot in enumerate(spots):
        chunks[spot // 16, spot % 16] = 40.0 + 10 * rank
    coded = encode(spec, x)
    free = codec.encode_blocks(dataclasses.replace(spec, pool=0.5), x)
    words = unpack_words(coded.codes, spec)
    mask = codec.is_outlier(spec, words, coded.scales[..., 0] != 0)[0, 0, 1].flatten()
    assert set(mask.nonzero().flatten().tolist()) == set(spots[-5:])
    assert coded.capped.item() >= 4 and free.capped.item() == 0
    numbers = codec.outlier_slots(spec, words)[0, 0, 1].flatten()[mask]
    assert numbers.tolist() == list(range(5))
    lost = spots[0]
    got = decode(spec, coded)[0, 0, 1].unflatten(-1, (-1, 4))[lost // 16, lost % 16]
    torch.testing.assert_close(got, torch.full((4,), 40.0), rtol=0.2, atol=0)


def test_batch_scope_uses_one_median_per_head():
    x = sample(PAPER, batch=2, blocks=3)
    norms = med3x.chunk_norms(x)
    medians = torch.stack([norms[:, h].reshape(-1).median() for h in range(3)])
    reference = codec.encode_blocks(PAPER, x)
    assert_same(codec.encode_blocks(PAPER, x, median=medians), reference)
    shaped = medians.view(1, 3, 1, 1, 1)
    assert_same(codec.encode_blocks(PAPER, x, median=shaped), reference)
    words = unpack_words(reference.codes, PAPER)
    mask = codec.is_outlier(PAPER, words, reference.scales[..., 0] != 0)
    if reference.capped.item() == 0:
        assert torch.equal(mask, norms > 3 * shaped)


def test_pool_clamps_to_its_dtype():
    spec = dataclasses.replace(KEY, outliers="16bit", dtype="float16", center="none")
    x = sample(spec, rate=0.0)
    x[0, 0, 0, 0, :4] = 1e6
    out = decode(spec, encode(spec, x))
    assert out[0, 0, 0, 0, :4].tolist() == [65504.0] * 4


# -- devices ------------------------------------------------------------------------------------
@every_spec
def test_device_path_equals_the_cpu_path(spec, monkeypatch):
    """Without branches on data, as on a GPU; run here on the CPU."""
    x = sample(spec)
    x[0, 0, 0, 3] = 0
    mean = given_mean(spec, x)
    small = dataclasses.replace(spec, pool=0.02)
    expected = {s: codec.encode_blocks(s, x, mean=mean) for s in (spec, small)}
    outputs = {s: decode(s, coded, mean) for s, coded in expected.items()}
    monkeypatch.setattr(codec.tables, "may_branch", lambda t: False)
    for s, coded in expected.items():
        assert_same(codec.encode_blocks(s, x, mean=mean), coded)
        assert torch.equal(decode(s, coded, mean), outputs[s])
        assert coded.capped.item() > 0 or not s.med3x or s is spec or s.rotate


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_spec
def test_gpu_codes_equal_cpu_codes(spec):
    x = sample(spec).bfloat16()
    mean = given_mean(spec, x)
    reference = codec.encode_blocks(spec, x, mean=mean)
    on_gpu = codec.encode_blocks(spec, x.cuda(), mean=None if mean is None else mean.cuda())
    back = codec.BlockCodes(*(t if t is None else t.cpu() for t in on_gpu))
    assert_same(back, reference)
    out = decode(spec, on_gpu, None if mean is None else mean.cuda()).cpu()
    torch.testing.assert_close(out, decode(spec, reference, mean), rtol=1e-6, atol=1e-6)


# -- token by token ----------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["first", "haar", "value", "half"])
def test_tokens_match_blocks(name):
    spec = dataclasses.replace(SPECS[name], center="first", pool=0.5)
    x = sample(spec)
    mean = given_mean(spec, x)
    coded = codec.encode_blocks(spec, x, mean=mean)
    words = unpack_words(coded.codes, spec).flatten(2, 3)
    flat = x.flatten(2, 3)
    parts = [codec.encode_tokens(spec, part, mean) for part in flat.split([1, 2, 30, 31], 2)]
    tokens = codec.TokenCodes(*(torch.cat(t, 2) for t in zip(*parts, strict=True)))
    ordinary = torch.where(tokens.outliers, 0, words)
    assert torch.equal(tokens.words, ordinary)
    assert torch.equal(tokens.scales, coded.scales.flatten(2, 3))
    slots = codec.outlier_slots(spec, words)
    full = torch.where(tokens.outliers, codec.outlier_words(spec, slots), tokens.words)
    assert torch.equal(full, words)
    if spec.med3x:
        at = tokens.outliers[0, 0].unflatten(0, (2, -1))[0].flatten()
        stored = codec.pool_values(spec, tokens.values[0, 0].unflatten(0, (2, -1))[0])
        assert torch.equal(stored.flatten(0, 1)[at], coded.pool[0, 0, 0, : int(at.sum())])


def test_outliers_without_a_slot_count_for_the_scale():
    spec = dataclasses.replace(SPECS["first"], center="none")
    x = sample(spec, rate=0.0).flatten(2, 3)
    x[..., :4] = 20.0
    some = codec.encode_tokens(spec, x)
    assert some.outliers[..., 0].all()
    none = codec.encode_tokens(spec, x, kept=torch.zeros_like(some.outliers))
    assert not none.outliers.any() and bool((none.words[..., 0] != 0).all())
    assert bool((none.scales > some.scales).all())


# -- errors ------------------------------------------------------------------------------------
@pytest.mark.parametrize("change, message", [
    ({"role": "query"}, "role='query' is not one of"),
    ({"codebook": "e8"}, "codebook='e8' is not one of"),
    ({"scale": "int4"}, "scale='int4' is not one of"),
    ({"med3x_scope": "row"}, "med3x_scope='row' is not one of"),
    ({"outliers": "fp8"}, "outliers='fp8' is not one of"),
    ({"outlier_flag": "x"}, "outlier_flag='x' is not one of"),
    ({"center": "mean"}, "center='mean' is not one of"),
    ({"head_dim": 66}, "head_dim must be a positive multiple of 4, got 66"),
    ({"secondary": 0}, "secondary must be at least 1, got 0"),
    ({"secondary": 96}, "no universal codebook with secondary=96"),
    ({"radius_bits": 0}, "radius_bits must be in 1..8, got 0"),
    ({"codebook": "haar", "secondary": 2**20, "radius_bits": 8}, "33 bits does not fit 31"),
    ({"med3x": 3.0, "zero_level": True}, "both claim radius code 0"),
    ({"med3x": -1.0}, "med3x must be a multiplier >= 0"),
    ({"head_dim": 80, "rotate": True}, "head_dim power of two, got 80"),
], ids=str)  # fmt: skip
def test_bad_specs(change, message):
    spec = dataclasses.replace(VALUE, **change)
    with pytest.raises(ValueError, match=message):
        codec.encode_tokens(spec, torch.zeros(1, 1, 1, spec.head_dim))


def test_bad_calls():
    with pytest.raises(ValueError, match=r"expected \[B, H, nb, 32, 64\], got \(1, 1, 32, 64\)"):
        codec.encode_blocks(KEY, torch.zeros(1, 1, 32, 64))
    with pytest.raises(ValueError, match="center='block': a mean is given exactly with"):
        codec.encode_blocks(KEY, sample(KEY), mean=torch.zeros(2, 3, 1, 64))
    with pytest.raises(ValueError, match="center='first': .* got no mean"):
        codec.encode_blocks(SPECS["first"], sample(KEY))
