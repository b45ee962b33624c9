"""`PackedParts`: the packed state of a cache tensor that is not one `[B, H, L, D]`.

A packed store is always `[B, H, L, D]` (`store.py`). A tensor of another layout (`[B, L, H, D]`), or of
several caches (a slab `[2, B, H, L, D]` of keys and values, all layers stacked), is made of such stores:
its `Layout` says how. `Cell` and `HQMQTensor` use either through the same few methods.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import torch

from ..codec.spec import CacheSpec
from . import write as _write
from .store import PackedKV


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tensor is made of parts: `tensor.permute(order)` is `[*lead, B, H, L, D]`.

    `Layout((), (0, 2, 1, 3))` is `[B, L, H, D]`; `Layout((2,), (0, 1, 2, 3, 4))` a slab of two.
    """

    lead: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """Indices of all parts, in the order of `PackedParts.parts`."""
        return list(itertools.product(*map(range, self.lead)))

    def views(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a dense tensor, views `[B, H, L, D]`."""
        turned = tensor.permute(self.order)
        return [turned[index] for index in self.parts]

    def shape(self, part: Sequence[int]) -> torch.Size:
        """Shape of the tensor whose parts have the shape `part`."""
        turned = (*self.lead, *part)
        return torch.Size(turned[self.order.index(dim)] for dim in range(len(turned)))


class PackedParts:
    """A tensor of several packed stores, or of one in another layout.

    Args:
        layout: of the tensor.
        parts: a store for each of `layout.parts`; specs may differ (keys, values, layers), while shape,
            dtype and device are the same.
    """

    def __init__(self, layout: Layout, parts: Sequence[PackedKV]) -> None:
        if len(parts) != len(layout.parts):
            raise ValueError(f"hqmq: {len(parts)} stores for {len(layout.parts)} parts of a tensor")
        if len({(p.shape, p.dtype, p.device, p.growing) for p in parts}) != 1:
            raise ValueError("hqmq: the parts of a cache tensor differ in shape, dtype or device")
        self.layout = layout
        self.parts = tuple(parts)

    @classmethod
    def from_dense(
        cls,
        layout: Layout,
        specs: Sequence[CacheSpec],
        dense: torch.Tensor,
        written: Sequence[int | None],
        *,
        growing: bool = False,
        write: Callable = _write.write,
    ) -> PackedParts:
        """Pack a dense tensor; arguments as of `PackedKV.from_dense`, for each part."""
        parts = [
            PackedKV.from_dense(spec, view.contiguous(), slots, growing=growing, write=write)
            for spec, view, slots in zip(specs, layout.views(dense), written, strict=True)
        ]
        return cls(layout, parts)

    # -- shape and size --------------------------------------------------------------------------
    @property
    def shape(self) -> torch.Size:
        return self.layout.shape(self.parts[0].shape)

    @property
    def spec(self) -> tuple[CacheSpec, ...]:
        """The spec of each part."""
        return tuple(part.spec for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def growing(self) -> bool:
        return self.parts[0].growing

    @property
    def written(self) -> int:
        """Slots of the sequence so far, of the longest part (reads the device state)."""
        return max(part.written for part in self.parts)

    @property
    def batch_dim(self) -> int:
        """The dim along which sequences are selected."""
        return self.layout.order[len(self.layout.lead)]

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts)

    @property
    def logical_bytes(self) -> int:
        return sum(part.logical_bytes for part in self.parts)

    @property
    def bits_per_element(self) -> float:
        return 8 * self.stored_bytes / max(self.shape.numel(), 1)

    # -- content ---------------------------------------------------------------------------------
    def dequantize(self) -> torch.Tensor:
        """The dense tensor, contiguous, in the dtype of the cache."""
        dense = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for view, part in zip(self.layout.views(dense), self.parts, strict=True):
            view.copy_(part.dequantize())
        return dense

    def repacked(self, dense: torch.Tensor) -> PackedParts:
        """What the user made of the dequantised tensor; unchanged parts stay as they are, exactly."""
        views = self.layout.views(dense)
        parts = [part.repacked(view) for part, view in zip(self.parts, views, strict=True)]
        return PackedParts(self.layout, parts)

    def _map(self, function: Callable[[PackedKV], PackedKV]) -> PackedParts:
        return PackedParts(self.layout, [function(part) for part in self.parts])

    def emptied(self) -> PackedParts:
        """A tensor like this one, that nothing was written to."""
        return self._map(PackedKV.emptied)

    def clone(self) -> PackedParts:
        return self._map(PackedKV.clone)

    def index_select(self, index: torch.Tensor) -> PackedParts:
        """Sequences `index`, in `batch_dim`."""
        return self._map(lambda part: part.index_select(index))

    def repeat_interleave(self, repeats: int | torch.Tensor) -> PackedParts:
        """Sequences repeated, in `batch_dim`."""
        return self._map(lambda part: part.repeat_interleave(repeats))

    def zero_(self) -> PackedParts:
        for part in self.parts:
            part.zero_()
        return self

    def to(self, device=None, dtype: torch.dtype | None = None, non_blocking=False) -> PackedParts:
        return self._map(lambda part: part.to(device, dtype, non_blocking))

    # -- saving ----------------------------------------------------------------------------------
    def state_dict(self) -> dict:
        """Plain types and tensors only: safe for `torch.load(weights_only=True)`."""
        return {
            "lead": list(self.layout.lead),
            "order": list(self.layout.order),
            "parts": [part.state_dict() for part in self.parts],
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> PackedParts:
        layout = Layout(tuple(state["lead"]), tuple(state["order"]))
        return cls(layout, [PackedKV.from_state_dict(part) for part in state["parts"]])

    def __repr__(self) -> str:
        return (
            f"PackedParts(shape={tuple(self.shape)}, {len(self.parts)} parts, device={self.device},"
            f" {self.bits_per_element:.2f} bits an element)"
        )


Packed = PackedKV | PackedParts


def load_state(state: dict) -> Packed:
    """The inverse of `state_dict` of either."""
    return (PackedParts if "parts" in state else PackedKV).from_state_dict(state)
