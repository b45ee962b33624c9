"""Swapping cache tensors in place: what is refused, what survives, and that memory is released."""

from __future__ import annotations

import copy
import io
import logging
import weakref

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hqmq_compile.cache.adopt import adopt, exclusive, swap_in, swap_out, unadopt
from hqmq_compile.cache.store import PackedKV
from hqmq_compile.cache.tensor import HQMQTensor
from hqmq_compile.codec.spec import CacheSpec

B, H, T, D = 2, 2, 21, 16
SPEC = CacheSpec("key", D, dtype="float32", secondary=10, block=8)
WINDOW = CacheSpec("key", D, dtype="float32", secondary=10, block=8, window=5, sink_tokens=1)
MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}


def dense(batch: int = B, heads: int = H, slots: int = T, dim: int = D) -> torch.Tensor:
    return torch.randn(batch, heads, slots, dim, generator=torch.Generator().manual_seed(1))


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((actual - expected).norm() < 0.25 * expected.norm())


# -- what may be adopted ---------------------------------------------------------------------------
class Holder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", dense())
        self.values = torch.nn.Buffer(dense())


def test_ordinary_tensors_are_exclusive() -> None:
    tensor = dense()
    same = [tensor, {"again": tensor}]  # python references to the object do not matter
    assert exclusive(tensor) is None and same
    module = Holder()
    assert exclusive(module.keys) is None and exclusive(module.values) is None
    torch._dynamo.mark_static_address(tensor)
    assert exclusive(tensor) is None
    with torch.inference_mode():
        assert exclusive(dense()) is None
    assert exclusive(torch.cat([dense(), dense()], 2)) is None
    assert exclusive(copy.deepcopy(module).keys) is None
    reference = weakref.ref(tensor)
    assert exclusive(tensor) is None and reference() is tensor


ALIASES = {
    "view": lambda t: t.transpose(1, 2),
    "slice": lambda t: t[:, :, :3],
    "element": lambda t: t[0, 0, 0],
    "iteration": list,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "dlpack": lambda t: t.__dlpack__(),
    "from_dlpack": torch.from_dlpack,
    "storage": lambda t: t.untyped_storage(),
    "set_": lambda t: torch.empty(0).set_(t),
    "copy": copy.copy,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALIASES)
def test_alias_is_refused_while_it_lives(name: str, mode: str) -> None:
    with MODES[mode]():
        tensor = dense()
        alias = ALIASES[name](tensor)
        assert exclusive(tensor) is not None
        with pytest.raises(RuntimeError, match="cannot be quantised in place"):
            adopt(tensor, SPEC)
        assert type(tensor) is torch.Tensor
        del alias
        if name == "numpy":  # torch marks the storage for good
            assert "numpy" in exclusive(tensor)
        else:
            assert exclusive(tensor) is None


def _loaded(**options) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(dense(), file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


REFUSED = {
    "a Parameter": lambda: torch.nn.Parameter(dense(), requires_grad=False),
    "autograd": lambda: dense().requires_grad_(),
    "graph": lambda: dense().requires_grad_() * 2,
    "HQMQTensor": lambda: HQMQTensor(PackedKV.from_dense(SPEC, dense())),
    "batch": lambda: dense()[0],
    "floating": lambda: torch.zeros(B, H, T, D, dtype=torch.long),
    "contiguous": lambda: torch.randn(B, T, H, D).transpose(1, 2),
    "view": lambda: dense()[1:],
    "file": _loaded,
    "numpy": lambda: torch.from_numpy(np.zeros((B, H, T, D), dtype=np.float32)),
    "processes": lambda: dense().share_memory_(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    tensor = REFUSED[name]()
    reason = exclusive(tensor)
    assert reason is not None and (name in reason or name == "graph")
    with pytest.raises(RuntimeError, match="cannot be quantised in place"):
        swap_in(tensor, PackedKV.from_dense(SPEC, dense()))
    if name in ("view", "file", "numpy"):
        assert exclusive(tensor.clone()) is None


def test_swap_in_checks_the_store() -> None:
    tensor = dense()
    with pytest.raises(ValueError, match="shape"):
        swap_in(tensor, PackedKV.from_dense(SPEC, dense(1)))
    with pytest.raises(ValueError, match="dtype"):
        swap_in(tensor, PackedKV.from_dense(SPEC.replace(dtype="bfloat16"), dense().bfloat16()))
    assert type(tensor) is torch.Tensor


# -- what survives ---------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
def test_identity_survives_and_memory_is_released(mode: str) -> None:
    with MODES[mode]():
        tensor = dense()
        tensor.note = "mine"
        torch._dynamo.mark_static_address(tensor)
        attributes = dict(tensor.__dict__)
        same, reference = [tensor], weakref.ref(tensor)
        content, inference = tensor.clone(), tensor.is_inference()
        storage = StorageWeakRef(tensor.untyped_storage())
        adopt(tensor, SPEC)
        assert storage.expired()
        assert isinstance(tensor, HQMQTensor) and tensor.is_packed
        assert same[0] is tensor and reference() is tensor
        assert tensor.is_inference() == inference
        assert attributes.items() <= tensor.__dict__.items()
        assert tensor.shape == content.shape and tensor.stride() == content.stride()
        assert close(tensor, content)
        assert tensor._use_count() == 1 and tensor.stored_bytes < tensor.logical_bytes
        expected = tensor.dequantize()

        packed = weakref.ref(tensor.packed)
        unadopt(tensor)
        assert type(tensor) is torch.Tensor and same[0] is tensor and reference() is tensor
        assert packed() is None and torch.equal(tensor, expected)
        assert tensor.__dict__ == attributes and tensor.is_inference() == inference
        assert exclusive(tensor) is None
        unadopt(tensor)  # nothing to do
        adopt(tensor, SPEC)
        assert torch.equal(tensor, expected) or close(tensor, expected)


def test_process_memory_is_released() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    tensor = torch.ones(1, 64, 16384, 16)  # 64 MB, all pages touched
    packed = PackedKV.empty(SPEC.replace(block=64), 1, 64, 16384)
    before = resident()
    swap_in(tensor, packed)
    assert before - resident() > 0.9 * 64 * 2**20
    assert not bool(tensor[:, :, 0].any())


def test_static_store_takes_the_written_length() -> None:
    tensor = dense()
    tensor[:, :, 9:] = 0
    content = tensor.clone()
    adopt(tensor, WINDOW, 9)
    assert tensor.packed.written == 9 and not tensor.packed.growing
    assert torch.equal(tensor[:, :, 6:], content[:, :, 6:])  # the window is exact
    grown = dense()
    adopt(grown, WINDOW, growing=True)
    assert grown.packed.growing and grown.packed.written == T


@pytest.mark.parametrize("mode", MODES)
def test_swap_out_keeps_views_and_aliases(mode: str) -> None:
    with MODES[mode]():
        tensor = dense()
        adopt(tensor, SPEC)
        expected = tensor.dequantize()
        view, alias = tensor.transpose(1, 2), tensor.detach()
        view[:, 0] = 3
        expected[:, :, 0] = 3
        swap_out(tensor)
        assert type(tensor) is torch.Tensor and torch.equal(tensor, expected)
        tensor[:, :, 1] = 4
        assert bool((view[:, 1] == 4).all()) and bool((alias[:, :, 1] == 4).all())
        view[:, 2] = 5
        assert bool((tensor[:, :, 2] == 5).all()) and bool((alias[:, :, 2] == 5).all())
        alias[:, :, 3] = 6
        assert bool((tensor[:, :, 3] == 6).all())


def test_swap_out_of_one_slice() -> None:
    tensor = dense()
    adopt(tensor, SPEC)
    part = tensor[:, :, 4:9]
    swap_out(part)
    part.fill_(2)
    assert type(part) is torch.Tensor and bool((tensor[:, :, 4:9] == 2).all())
    assert not bool((tensor[:, :, 9:] == 2).all())
    with pytest.raises(TypeError, match="HQMQTensor"):
        swap_out(part)


def test_module_buffers() -> None:
    module = Holder()
    expected = module.keys.clone()
    keys = module.keys
    adopt(module.keys, SPEC)
    adopt(module.values, SPEC)
    assert module.keys is keys and isinstance(module.keys, HQMQTensor)
    assert close(module.keys, expected) and close(copy.deepcopy(module).keys, expected)
    assert dict(module.named_buffers()).keys() == {"keys", "values"}
    other = Holder()
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.keys, module.keys)
    module.load_state_dict(Holder().state_dict())
    assert torch.equal(module.keys, expected)


# -- under Dynamo ----------------------------------------------------------------------------------
@pytest.fixture
def frames():
    torch._dynamo.reset()
    count = [0]

    def backend_of(run):
        """A backend that calls `run(graph, args)` for a compiled graph."""

        def backend(graph, inputs):
            count[0] += 1
            return lambda *args: run(graph, args)

        return backend

    yield count, backend_of
    torch._dynamo.reset()


def _decode(keys, new, position):
    keys.index_copy_(2, position, new)
    return keys.sum(-1)


@pytest.mark.parametrize("mode", MODES)
def test_adoption_inside_the_running_graph(frames, mode: str) -> None:
    """Dynamo's guards hold weak references to the tensor; one recompile follows, then none."""
    count, backend_of = frames

    def run(graph, args):
        keys = args[0]
        if isinstance(keys, HQMQTensor):
            assert keys.repack() or not keys.is_packed
        else:
            assert exclusive(keys) is None
            adopt(keys, WINDOW, 0)
        return graph.forward(*args)

    compiled = torch.compile(_decode, backend=backend_of(run))
    with MODES[mode]():
        for _ in range(2):
            keys = torch.zeros(B, H, T, D)
            torch._dynamo.mark_static_address(keys)
            expected = keys.clone()
            for step in range(4):
                new, position = dense(slots=1) + step, torch.tensor([step])
                torch.testing.assert_close(
                    compiled(keys, new, position), _decode(expected, new, position)
                )
            assert keys.repack() and keys.is_packed
            keys.zero_()
            assert keys.is_packed
    assert count == [2]


def test_unadopt_inside_the_running_graph(frames) -> None:
    _, backend_of = frames

    def run(graph, args):
        unadopt(args[0])
        return graph.forward(*args)

    compiled = torch.compile(_decode, backend=backend_of(run))
    with torch.no_grad():
        keys = dense()
        adopt(keys, SPEC)
        expected = keys.dequantize()
        for step in range(3):
            new, position = dense(slots=1), torch.tensor([step])
            want = _decode(expected, new, position)
            torch.testing.assert_close(compiled(keys, new, position), want)
        assert type(keys) is torch.Tensor and torch.equal(keys, expected)


# -- caches of transformers ------------------------------------------------------------------------
transformers = pytest.importorskip("transformers")


def _config():
    return transformers.LlamaConfig(
        hidden_size=H * D, num_attention_heads=H, num_key_value_heads=H, num_hidden_layers=2
    )


def _caches(kind: str, mode: str = "no_grad"):
    """An adopted cache, and the same cache in plain tensors."""
    config = _config()
    both = []
    for _ in range(2):
        if kind == "static":
            cache = transformers.StaticCache(config=config, max_cache_len=T)
        else:
            cache = transformers.DynamicCache(config=config)
        for layer in range(2):
            cache.update(dense(slots=13) + layer, dense(slots=13) - layer, layer)
        both.append(cache)
    ours, plain = both
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        for name in ("keys", "values"):
            tensor = getattr(mine, name)
            assert exclusive(tensor) is None
            adopt(tensor, WINDOW, 13, growing=kind == "dynamic")
            setattr(other, name, getattr(mine, name).dequantize())
    return ours, plain


def _assert_equal(ours, plain, *, packed: bool = True) -> None:
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        for name in ("keys", "values"):
            a, b = getattr(mine, name), getattr(other, name)
            assert a.shape == b.shape and torch.equal(a, b)
            if packed:
                assert isinstance(a, HQMQTensor) and a.is_packed
    assert int(ours.get_seq_length()) == int(plain.get_seq_length())


CACHE_METHODS = {
    "reorder_cache": lambda c: c.reorder_cache(torch.tensor([1, 0])),
    "batch_select_indices": lambda c: c.batch_select_indices(torch.tensor([1])),
    "batch_repeat_interleave": lambda c: c.batch_repeat_interleave(3),
    "crop": lambda c: c.crop(-4),
    "crop twice": lambda c: (c.crop(-2), c.crop(-3)),
    "crop then reorder": lambda c: (c.crop(-2), c.reorder_cache(torch.tensor([1, 1]))),
    "offload": lambda c: [layer.offload() for layer in c.layers],
    "prefetch": lambda c: [layer.prefetch() for layer in c.layers],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CACHE_METHODS)
def test_dynamic_cache(name: str, mode: str) -> None:
    with MODES[mode]():
        ours, plain = _caches("dynamic")
        CACHE_METHODS[name](ours)
        CACHE_METHODS[name](plain)
        _assert_equal(ours, plain)
        for cache in (ours, plain):  # and an eager step on it
            batch = cache.layers[0].keys.shape[0]
            for layer in range(2):
                cache.update(dense(batch, slots=1), dense(batch, slots=1), layer)
        _assert_equal(ours, plain, packed=False)
        for cache in (ours, plain):
            cache.reset()
        assert int(ours.get_seq_length()) == int(plain.get_seq_length())


@pytest.mark.parametrize("mode", MODES)
def test_static_cache_reset_and_reorder(mode: str) -> None:
    with MODES[mode]():
        ours, plain = _caches("static")
        keys = ours.layers[0].keys
        assert keys._dynamo_static_input_type
        for cache in (ours, plain):
            cache.reorder_cache(torch.tensor([1, 0]))
        _assert_equal(ours, plain)
        keys = ours.layers[0].keys
        for cache in (ours, plain):
            cache.reset()
        assert ours.layers[0].keys is keys
        _assert_equal(ours, plain)
        for cache in (ours, plain):  # eager steps after the reset
            cache.update(dense(slots=3), dense(slots=3), 0)
            cache.update(dense(slots=3), dense(slots=3), 1)
        _assert_equal(ours, plain, packed=False)
        assert ours.layers[0].keys is keys and keys.repack()
        assert keys.packed.written == 3 and torch.equal(keys, plain.layers[0].keys)


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_copies_of_a_cache(kind: str) -> None:
    with torch.no_grad():
        ours, plain = _caches(kind)
        deep, shallow = copy.deepcopy(ours), copy.copy(ours)
        _assert_equal(deep, plain)
        assert shallow.layers is ours.layers
        for cache in (ours, plain):
            for layer in cache.layers:
                layer.keys.mul_(2)
        _assert_equal(ours, plain, packed=False)
        assert deep.layers[0].keys.is_packed
        assert not torch.equal(deep.layers[0].keys, plain.layers[0].keys)
        file = io.BytesIO()
        torch.save(deep, file)
        file.seek(0)
        _, plain = _caches(kind)
        _assert_equal(torch.load(file, weights_only=False), plain)


def test_offloaded_copy_is_independent() -> None:
    tensor = dense()
    adopt(tensor, WINDOW)
    expected = tensor.dequantize()
    assert tensor.to("cpu", non_blocking=True) is tensor
    moved = tensor.to("cpu", copy=True, non_blocking=True)
    assert isinstance(moved, HQMQTensor) and moved.is_packed
    tensor.zero_()
    assert torch.equal(moved, expected)


def test_legacy_loops_over_layers() -> None:
    """What user code does with a cache: iterate, take shapes, slice heads, compare, stack."""
    ours, plain = _caches("static")
    for mine, other in zip(ours.layers, plain.layers, strict=True):
        assert mine.keys.shape[-2] == other.keys.shape[-2]
        assert torch.equal(mine.keys[:, :1], other.keys[:, :1])
        assert torch.equal(
            torch.stack([mine.keys, mine.values]), torch.stack([other.keys, other.values])
        )


def test_materialising_is_logged(caplog) -> None:
    tensor = dense()
    adopt(tensor, SPEC)
    with caplog.at_level(logging.INFO, "hqmq.cache"):
        tensor.add_(1)
    assert "add_ materialised a packed cache tensor" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mode", MODES)
def test_cuda(mode: str) -> None:
    with MODES[mode]():
        tensor = torch.randn(2, 4, 4096, D, device="cuda")
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        adopt(tensor, WINDOW)
        assert torch.cuda.memory_allocated() < before - 0.3 * 2 * 4 * 4096 * D * 4
        expected = tensor.dequantize()
        with pytest.raises(RuntimeError, match="no address"):
            _ = tensor.__cuda_array_interface__
        with pytest.raises(RuntimeError, match="dense data|data pointer"):
            torch._C._to_dlpack(tensor)
        away = tensor.to("cpu", non_blocking=True)
        torch.cuda.synchronize()
        assert isinstance(away, HQMQTensor) and away.is_packed and away.device.type == "cpu"
        assert torch.allclose(away, expected.cpu(), atol=1e-5)  # decoded elsewhere
        back = away.cuda()
        assert back.is_packed and torch.equal(back, expected) and back.is_shared()
        stream = torch.cuda.Stream()
        tensor.record_stream(stream)
        assert tensor.is_packed
        assert torch.equal(tensor[torch.tensor([1, 0])], expected[[1, 0]])
        assert torch.allclose(tensor.cpu().pin_memory(), expected.cpu(), atol=1e-5)
        tensor[:, :, 3:5] = 2
        expected[:, :, 3:5] = 2
        assert torch.equal(tensor, expected) and tensor.repack()
        other = torch.from_dlpack(tensor)
        assert other.is_cuda and not tensor.repack()
        del other
        unadopt(tensor)
        assert type(tensor) is torch.Tensor and tensor.is_cuda
