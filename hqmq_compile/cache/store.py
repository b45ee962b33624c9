"""`PackedKV`: the packed state of one cache tensor, and what can be done to it without unpacking."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..codec.spec import CacheSpec
from . import write as _write
from .buffers import (
    CAPPED,
    LENGTH,
    PACKED,
    START,
    Buffers,
    allocate,
    growing_blocks,
    static_blocks,
)
from .read import dequantize, read_slots

SPARE = 64  # a growing store gets 1/64 more room than it needs: one copy in that many blocks


class _Head:
    """Shared by all stores over one set of buffers: which of them wrote last (copy on write)."""

    def __init__(self) -> None:
        self.version = 0


class PackedKV:
    """Packed keys or values of one attention, logical shape `[B, H, length, D]`.

    A *static* store has a fixed logical length; where it was last written is on the device only. A
    *growing* store (`DynamicCache`) knows its length and its oldest slot here on the host; appending
    makes a new store over the same buffers, and appending again to the older one copies them first,
    so that branches of a conversation never write into each other.
    """

    def __init__(
        self,
        spec: CacheSpec,
        buffers: Buffers,
        length: int,
        *,
        growing: bool = False,
        start: int = 0,
        head: _Head | None = None,
    ) -> None:
        self.spec = spec
        self.buffers = buffers
        self.length = length
        self.growing = growing
        self.start = start  # absolute slot of logical index 0 (growing stores only)
        self._head = head or _Head()
        self._version = self._head.version

    # -- construction ----------------------------------------------------------------------------
    @classmethod
    def empty(
        cls,
        spec: CacheSpec,
        batch: int,
        heads: int,
        length: int,
        *,
        growing: bool = False,
        device: torch.device | str = "cpu",
    ) -> PackedKV:
        """A store that nothing was written to; a static one reads as zeros."""
        blocks = (growing_blocks if growing else static_blocks)(spec, length)
        return cls(spec, allocate(spec, batch, heads, blocks, device), length, growing=growing)

    @classmethod
    def from_dense(
        cls,
        spec: CacheSpec,
        dense: torch.Tensor,
        written: int | None = None,
        *,
        growing: bool = False,
        write: Callable = _write.write,
    ) -> PackedKV:
        """Pack a dense cache `[B, H, T, D]` whose first `written` slots hold the sequence.

        Slots from `written` on (static caches) are packed too where they are not zero, so that
        nothing of the user's tensor is lost. `write` stores the sequence: the reference, or a kernel
        of the same signature.
        """
        batch, heads, length, _ = dense.shape
        written = length if written is None else min(max(int(written), 0), length)
        store = cls.empty(spec, batch, heads, length, growing=growing, device=dense.device)
        if not growing and not _any(dense):  # a fresh static cache: nothing of it is a sequence yet
            return store
        if written:
            write(spec, store.buffers, dense[:, :, :written], 0)
        rest = dense[:, :, written:]
        if _any(rest):
            _write.write_beyond(spec, store.buffers, dense, written)
        return store

    def emptied(self) -> PackedKV:
        """A store like this one, that nothing was written to."""
        batch, heads, length, _ = self.shape
        return PackedKV.empty(
            self.spec, batch, heads, length, growing=self.growing, device=self.device
        )

    def repacked(self, dense: torch.Tensor) -> PackedKV:
        """The store of what the user made of `dequantize()`; itself where that was not changed."""
        try:
            changed = (dense != self.dequantize()).any(dim=3).any(dim=1).any(dim=0)
        except RuntimeError:  # a branch whose slots a sliding window has overwritten meanwhile
            changed = None
        written = None
        if changed is not None:
            slots = changed.nonzero()
            if not slots.numel():
                return self
            if not self.growing:  # the user's rows belong to the sequence
                written = max(self.written, int(slots[-1]) + 1)
        return PackedKV.from_dense(self.spec, dense, written, growing=self.growing)

    # -- shape and size --------------------------------------------------------------------------
    batch_dim = 0  # the dim along which sequences are selected

    @property
    def shape(self) -> torch.Size:
        batch, heads = self.buffers.codes.shape[:2]
        return torch.Size((batch, heads, self.length, self.spec.head_dim))

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.torch_dtype

    @property
    def device(self) -> torch.device:
        return self.buffers.codes.device

    @property
    def stored_bytes(self) -> int:
        """Bytes of all buffers as allocated: codes, scales, outliers, means, window, sinks, state."""
        return self.buffers.stored_bytes

    @property
    def logical_bytes(self) -> int:
        """Bytes of the dense tensor that this store stands for."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def bits_per_element(self) -> float:
        return 8 * self.stored_bytes / max(self.shape.numel(), 1)

    @property
    def blocks(self) -> int:
        """Blocks of capacity."""
        return self.buffers.capacity // self.spec.block

    @property
    def packed_slots(self) -> int:
        """Slots of the sequence that live in codes (reads the device state)."""
        state = self.buffers.state.tolist()
        return max(state[PACKED] - state[START], 0)

    @property
    def written(self) -> int:
        """Slots of the sequence so far, counted from logical index 0 (reads the device state)."""
        state = self.buffers.state.tolist()
        return state[LENGTH] - state[START]

    @property
    def capped_outliers(self) -> int:
        """Outliers that found no room in their block's pool so far (reads the device state)."""
        return int(self.buffers.state[CAPPED])

    @property
    def parts(self) -> tuple[PackedKV, ...]:
        """The stores that the tensor is made of (`parts.py`): this one."""
        return (self,)

    # -- reading ---------------------------------------------------------------------------------
    def _state(self) -> list[int]:
        """The state vector as this store sees it (a growing store may be behind its buffers)."""
        state = self.buffers.state.tolist()
        if self.growing:
            oldest = state[PACKED] - self.buffers.capacity
            if self.start // self.spec.block * self.spec.block < oldest:
                raise RuntimeError(
                    "hqmq: this cache tensor is an older branch of a sliding window whose first slots"
                    " were overwritten; take a copy.deepcopy of the cache before branching"
                )
            state[START] = self.start
        return state

    def dequantize(self) -> torch.Tensor:
        """The dense tensor `[B, H, length, D]` in the dtype of the cache."""
        return dequantize(self.spec, self.buffers, self.length, state=self._state())

    def read(self, first: int, last: int) -> torch.Tensor:
        """Logical slots first..last-1, float32."""
        state = self._state()
        return read_slots(self.spec, self.buffers, state[START] + first, state[START] + last, state)

    # -- native operations -----------------------------------------------------------------------
    def _like(self, buffers: Buffers, **changes) -> PackedKV:
        fields = {"length": self.length, "growing": self.growing, "start": self.start} | changes
        return PackedKV(self.spec, buffers, **fields)

    def _map_batch(self, function) -> PackedKV:
        """A store over copies of the buffers; what a newer branch wrote into them is undone."""
        self._state()  # raises if slots of this branch are gone
        with torch.inference_mode(False), torch.no_grad():
            copies = Buffers(*(function(t) for t in self.buffers[:-1]), self.buffers.state.clone())
        if self.growing and self._version != self._head.version:
            _write.crop_to(self.spec, copies, self.start, self.start + self.length)
        return self._like(copies)

    def index_select(self, index: torch.Tensor) -> PackedKV:
        """Batch rows `index`."""
        return self._map_batch(lambda t: t.index_select(0, index.to(t.device)))

    def repeat_interleave(self, repeats: int | torch.Tensor) -> PackedKV:
        """Batch rows repeated, as `Tensor.repeat_interleave(repeats, dim=0)`."""
        return self._map_batch(lambda t: t.repeat_interleave(repeats, dim=0))

    def clone(self) -> PackedKV:
        return self._map_batch(torch.clone)

    def crop(self, first: int, last: int) -> PackedKV:
        """Logical slots first..last-1 as a growing store of its own."""
        copy = self.clone()
        _write.crop(self.spec, copy.buffers, first, last)
        start = int(copy.buffers.state[START])
        return copy._like(copy.buffers, length=last - first, growing=True, start=start)

    def zero_(self) -> PackedKV:
        """Forget everything: all slots read as zero, as after `Tensor.zero_`."""
        for buffer in self.buffers:
            buffer.zero_()
        self.start = 0
        return self

    def to(self, device=None, dtype: torch.dtype | None = None, non_blocking=False) -> PackedKV:
        """On another device, or standing for a tensor of another floating dtype."""
        spec = self.spec
        if dtype is not None and dtype != self.dtype:
            spec = spec.replace(dtype=str(dtype).removeprefix("torch."))
        dtypes = {"ring": spec.torch_dtype, "sinks": spec.torch_dtype, "pool": spec.pool_dtype}
        parts = [
            buffer.to(device, dtypes.get(name, buffer.dtype), non_blocking=non_blocking, copy=False)
            for name, buffer in self.clone().buffers._asdict().items()
        ]
        return PackedKV(spec, Buffers(*parts), self.length, growing=self.growing, start=self.start)

    # -- growing ---------------------------------------------------------------------------------
    def appended(self, count: int, keep: int = 0) -> PackedKV:
        """The store after `count` more slots were written to these buffers (`keep` as in `write`)."""
        start, length = self.start, self.length + count
        if keep and length > keep:
            start, length = start + length - keep, keep
        self._head.version += 1
        return PackedKV(self.spec, self.buffers, length, growing=True, start=start, head=self._head)

    def prepare_append(self, count: int) -> None:
        """Own the buffers (copy on write), with room for `count` more slots."""
        if self._version != self._head.version:
            copy = self.clone()
            self.buffers, self._head, self._version = copy.buffers, copy._head, copy._version
        need = growing_blocks(self.spec, self.start % self.spec.block + self.length + count)
        if need > self.blocks:
            self.reserve(need + max(need // SPARE, 2))

    def reserve(self, blocks: int) -> None:
        """Make the capacity at least `blocks` blocks."""
        if blocks <= self.blocks:
            return
        start = self.start if self.growing else int(self.buffers.state[START])
        self.buffers = _write.resized(self.spec, self.buffers, blocks, start)

    # -- saving ----------------------------------------------------------------------------------
    def state_dict(self) -> dict:
        """Plain types and tensors only: safe for `torch.load(weights_only=True)`."""
        store = self.clone() if self._version != self._head.version else self
        return {
            "spec": str(self.spec),
            "length": self.length,
            "growing": self.growing,
            "start": self.start,
            **store.buffers._asdict(),
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> PackedKV:
        buffers = Buffers(*(state[name] for name in Buffers._fields))
        spec = CacheSpec.parse(state["spec"])
        return cls(spec, buffers, state["length"], growing=state["growing"], start=state["start"])

    def __repr__(self) -> str:
        return (
            f"PackedKV(shape={tuple(self.shape)}, dtype={self.spec.dtype}, device={self.device},"
            f" {self.bits_per_element:.2f} bits an element)"
        )


def _any(dense: torch.Tensor) -> bool:
    """Whether any element is not zero; slots at a time, so that no mask of the whole is made."""
    return any(bool(part.any()) for part in dense.split(1024, dim=2) if part.numel())
