"""Tensors of several packed stores, or in another layout: as plain ones, and packed where they can be."""

from __future__ import annotations

import copy
import io

import pytest
import torch

from hqmq_compile.cache.adopt import adopt_as, exclusive, unadopt
from hqmq_compile.cache.parts import Layout, PackedParts
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.cache.tensor import HQMQTensor
from hqmq_compile.codec.spec import CacheSpec

B, H, T, D = 2, 3, 21, 16
KEY = CacheSpec("key", D, dtype="float32", secondary=10, block=8, window=5, sink_tokens=1)
VALUE = CacheSpec("value", D, dtype="float32", secondary=5, block=8, window=5, sink_tokens=1)
LAYOUTS = {
    "[B, L, H, D]": Layout((), (0, 2, 1, 3)),
    "[L, B, H, D]": Layout((), (1, 2, 0, 3)),
    "[2, B, H, L, D]": Layout((2,), (0, 1, 2, 3, 4)),
    "[B, L, 2, H, D]": Layout((2,), (2, 0, 3, 1, 4)),
    "[3, 2, B, H, L, D]": Layout((3, 2), (0, 1, 2, 3, 4, 5)),
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def specs(layout: Layout) -> list[CacheSpec]:
    return [(KEY, VALUE)[i % 2] for i in range(len(layout.parts))]


def dense(layout: Layout) -> torch.Tensor:
    shape = layout.shape((B, H, T, D))
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def packed(layout: Layout, written: int | None = 13) -> PackedParts:
    content = dense(layout)
    for view in layout.views(content):
        view[:, :, 13:] = 0
    slots = [written] * len(layout.parts)
    return PackedParts.from_dense(layout, specs(layout), content, slots)


def adopted(layout: Layout) -> torch.Tensor:
    tensor = dense(layout)
    adopt_as(tensor, lambda: packed(layout))
    return tensor


@each_layout
def test_parts_are_what_each_would_be_alone(layout):
    content, parts = dense(layout), packed(layout)
    assert parts.shape == content.shape and parts.dtype == torch.float32 and not parts.growing
    assert parts.written == 13
    whole = parts.dequantize()
    assert whole.is_contiguous() and whole.shape == content.shape
    views = zip(layout.views(content), layout.views(whole), specs(layout), strict=True)
    for plain, view, spec in views:
        assert plain.shape == (B, H, T, D)
        alone = plain.contiguous()
        alone[:, :, 13:] = 0
        assert torch.equal(view, PackedKV.from_dense(spec, alone, 13).dequantize())
    assert parts.stored_bytes == sum(part.stored_bytes for part in parts.parts)
    assert parts.logical_bytes == content.numel() * 4


def test_stores_must_fit_the_layout():
    store = PackedKV.empty(KEY, B, H, T)
    with pytest.raises(ValueError, match="1 stores for 2 parts"):
        PackedParts(Layout((2,), (0, 1, 2, 3, 4)), [store])
    with pytest.raises(ValueError, match="differ in shape"):
        PackedParts(Layout((2,), (0, 1, 2, 3, 4)), [store, PackedKV.empty(KEY, B, H, T + 1)])


@each_layout
def test_adopted_tensor_reads_like_a_plain_one(layout):
    tensor = adopted(layout)
    expected = packed(layout).dequantize()
    assert isinstance(tensor, HQMQTensor) and tensor.is_packed and exclusive(tensor) is not None
    assert tensor.shape == expected.shape and tensor.stride() == expected.stride()
    assert torch.equal(tensor, expected) and torch.equal(tensor + 1, expected + 1)
    assert torch.equal(tensor.sum(), expected.sum()) and "HQMQTensor" in repr(tensor)
    assert tensor.is_packed
    unadopt(tensor)
    assert type(tensor) is torch.Tensor and torch.equal(tensor, expected)


@each_layout
def test_views_materialise_and_nothing_is_lost(layout):
    with torch.no_grad():
        tensor, expected = adopted(layout), packed(layout).dequantize()
        places = [(0,), (..., slice(2, 5)), (slice(None), 1), (slice(0, 1), slice(None, -1))]
        for place in places:
            assert torch.equal(tensor[place], expected[place])
            tensor[place] = 2
            expected[place] = 2
            assert torch.equal(tensor, expected)
        assert not tensor.is_packed and tensor.repack()
        assert tensor.packed.layout == layout


@each_layout
def test_what_was_only_looked_at_is_packed_again_exactly(layout):
    tensor = adopted(layout)
    before, expected = tensor.packed, tensor.dequantize()
    tensor.transpose(0, 1)
    assert not tensor.is_packed and tensor.repack()
    assert all(a is b for a, b in zip(tensor.packed.parts, before.parts, strict=True))
    with torch.no_grad():
        layout.views(tensor.materialize())[0][:, :, 3] = 7
    assert tensor.repack()
    same = [a is b for a, b in zip(tensor.packed.parts, before.parts, strict=True)]
    assert same == [False] + [True] * (len(layout.parts) - 1)  # the other parts keep their codes
    changed = layout.views(tensor.dequantize())[0]
    assert (changed[:, :, 3] - 7).abs().max() < 2
    assert torch.equal(changed[:, :, 10:], layout.views(expected)[0][:, :, 10:])


@each_layout
def test_copies_and_zeros_stay_packed(layout):
    with torch.no_grad():
        tensor = adopted(layout)
        expected = tensor.dequantize()
        copies = [
            tensor.clone(),
            copy.deepcopy(tensor),
            tensor.to("cpu", copy=True),
            tensor.detach(),
        ]
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=True))
        for other in copies:
            assert other.is_packed and torch.equal(other, expected)
            assert other.packed.layout == layout and other.packed.spec == tuple(specs(layout))
        tensor.zero_()
        assert tensor.is_packed and not tensor.any() and not copies[3].any()
        assert all(torch.equal(other, expected) for other in (*copies[:3], copies[4]))
        tensor.copy_(copies[0])
        assert tensor.is_packed and torch.equal(tensor, expected)
        tensor.data = torch.ones_like(expected)
        assert torch.equal(tensor, torch.ones_like(expected)) and tensor.repack()


@each_layout
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sequences_are_selected_packed(layout, mode):
    with mode():
        tensor, index = adopted(layout), torch.tensor([1, 1, 0])
        expected, dim = tensor.dequantize(), layout.order[len(layout.lead)]
        for batch in (dim, dim - tensor.dim()):
            selected = tensor.index_select(batch, index)
            assert selected.is_packed and torch.equal(selected, expected.index_select(dim, index))
            repeated = tensor.repeat_interleave(2, dim=batch)
            assert repeated.is_packed
            assert torch.equal(repeated, expected.repeat_interleave(2, dim))
        assert tensor.is_packed
        for other in set(range(tensor.dim())) - {dim}:  # dense, and right
            first = torch.tensor([0])
            actual = tensor.index_select(other, first)
            assert torch.equal(actual, expected.index_select(other, first))
            assert torch.equal(
                tensor.repeat_interleave(2, dim=other), expected.repeat_interleave(2, other)
            )
        assert torch.equal(tensor[index[:1]], expected[index[:1]])
        assert torch.equal(tensor[:, :1], expected[:, :1])
        assert torch.equal(tensor.narrow(2, 0, 1), expected.narrow(2, 0, 1))
        with pytest.raises(IndexError):
            tensor.index_select(tensor.dim(), index)


def test_a_view_that_is_alive_is_no_reason_to_lose_it():
    layout = LAYOUTS["[2, B, H, L, D]"]
    tensor = dense(layout)
    view = tensor[0]
    assert exclusive(tensor) == "a view of it is alive, or C++ code holds it"
    assert exclusive(view) == "it is a view of another tensor"
    with pytest.raises(RuntimeError, match="cannot be quantised in place"):
        adopt_as(tensor, lambda: packed(layout))
