"""Swapping a user's cache tensor for its `HQMQTensor` in place, and back.

The python object stays: its identity, its attributes and the weak references to it (Dynamo's guards
hold some) survive, while its class and its C++ tensor change. That is only right when no other
tensor looks at the same memory, because it would go on looking at the old content: see `exclusive`.

`torch.utils.swap_tensors` does the same but refuses objects with weak references.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..codec.spec import CacheSpec
from . import write as _write
from .cell import same_memory, shares_storage
from .parts import Packed
from .store import PackedKV
from .tensor import OWN_ATTRIBUTES, HQMQTensor


def exclusive(tensor: torch.Tensor) -> str | None:
    """Why `tensor` cannot be adopted, or None if nothing but this python object sees its memory.

    Any number of python references to the object itself is fine. Refused are other tensors over the
    same storage (views, `detach`, a slab that several layers share), memory that torch does not own
    or cannot see the owners of, and everything that is not a plain dense inference tensor.
    """
    if type(tensor) is not torch.Tensor:
        return f"it is a {type(tensor).__name__}, not a plain tensor"
    if tensor.requires_grad or tensor.grad_fn is not None:
        return "it takes part in autograd"
    if not 4 <= tensor.dim() <= 6 or not tensor.is_floating_point():
        return "it is not a floating-point tensor [batch, heads, slots, head_dim], or several"
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        return "it is not contiguous"
    if tensor._is_view():
        return "it is a view of another tensor"
    # One C++ reference from the python object; a living view holds another as its base.
    if tensor._use_count() != 1:
        return "a view of it is alive, or C++ code holds it"
    if shares_storage(tensor):
        return "something else holds its storage"
    # Also true of what torch.load returns. But an owner outside torch cannot be told from a file.
    if not tensor.untyped_storage().resizable():
        return "its memory may belong to numpy, DLPack or a file; replace it by its .clone()"
    if tensor.device.type == "cpu" and tensor.is_shared():
        return "it is in memory shared with other processes"
    return None


def swap_in(tensor: torch.Tensor, packed: Packed) -> None:
    """Turn the object `tensor` into an `HQMQTensor` over `packed`; its dense storage is released.

    Raises RuntimeError when the tensor is not exclusively owned, ValueError when shape, dtype or
    device of `packed` differ.
    """
    reason = exclusive(tensor)
    if reason is not None:
        raise RuntimeError(f"hqmq: this cache tensor cannot be quantised in place: {reason}")
    for name in ("shape", "dtype", "device"):
        if getattr(tensor, name) != getattr(packed, name):
            raise ValueError(
                f"hqmq: {name} of the cache tensor is {getattr(tensor, name)}, of its packed form"
                f" {getattr(packed, name)}"
            )
    with torch.inference_mode(tensor.is_inference()):
        _exchange(tensor, HQMQTensor(packed))


def swap_out(tensor: HQMQTensor) -> None:
    """Turn the object `tensor` back into a plain tensor with the content it has now.

    Views of a materialised tensor, and its aliases, go on sharing memory with it.
    """
    if not isinstance(tensor, HQMQTensor):
        raise TypeError(f"hqmq: expected an HQMQTensor, not {type(tensor).__name__}")
    dense = tensor._hqmq_cell.materialize("swap_out")
    plain = same_memory(dense, inference=tensor.is_inference())
    if tensor.requires_grad:
        plain.requires_grad_()
    _exchange(tensor, plain)


def adopt(
    tensor: torch.Tensor,
    spec: CacheSpec,
    written: int | None = None,
    *,
    growing: bool = False,
    write: Callable = _write.write,
) -> None:
    """Quantise a plain cache tensor `[B, H, T, D]` in place.

    `written` is the length of the sequence in a static cache (None: all slots); `growing` marks the
    tensor of a cache that is extended by concatenation; `write` as in `PackedKV.from_dense`. Raises
    as `swap_in`.
    """

    def pack() -> Packed:
        return PackedKV.from_dense(spec, tensor, written, growing=growing, write=write)

    adopt_as(tensor, pack)


def adopt_as(tensor: torch.Tensor, pack: Callable[[], Packed]) -> None:
    """Quantise a plain cache tensor of any layout in place: `pack` makes its packed form."""
    reason = exclusive(tensor)
    if reason is not None:  # before the work of quantising
        raise RuntimeError(f"hqmq: this cache tensor cannot be quantised in place: {reason}")
    with torch.inference_mode(False), torch.no_grad():
        packed = pack()
    swap_in(tensor, packed)


def unadopt(tensor: torch.Tensor) -> None:
    """Make a cache tensor plain again; nothing to do if it is."""
    if isinstance(tensor, HQMQTensor):
        swap_out(tensor)


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Swap class, own attributes and C++ tensor of two objects; `a` keeps the user's attributes."""
    users = {k: v for k, v in a.__dict__.items() if k not in OWN_ATTRIBUTES}
    a.__class__, b.__class__ = b.__class__, a.__class__
    a.__dict__, b.__dict__ = {**b.__dict__, **users}, a.__dict__
    torch._C._swap_tensor_impl(a, b)
