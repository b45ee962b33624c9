"""What a user-visible cache tensor points to: packed buffers, or a dense tensor being edited.

PyTorch slices are views, and a packed slice cannot be one: `keys[..., :-2, :]` of a packed tensor
is packed buffers of its own. Nobody can tell until somebody writes. So cells that were cut from one
another remember each other, weakly (`kin`), and the first write to one of them, or the first
ordinary view of it, gives every living one its part of one dense tensor. From then on they are true
views. A cell whose relatives are gone (`layer.keys = layer.keys[..., :-2, :]`) stays packed.
"""

from __future__ import annotations

import logging
import sys
import weakref

import torch

from .parts import Packed, load_state

log = logging.getLogger("hqmq.cache")


class Cell:
    """Content of one `HQMQTensor`; aliases of the tensor share the cell.

    The content is `packed`, or `dense` where that is not None. `packed` is kept meanwhile: what a
    user only looked at is packed again exactly, without a second quantization.
    """

    __slots__ = ("__weakref__", "dense", "kin", "packed", "start", "told")

    def __init__(self, packed: Packed, dense: torch.Tensor | None = None) -> None:
        self.packed = packed
        self.dense = dense
        self.start = 0  # first slot, counted in the tensor that all kin were cut from
        self.kin: list[weakref.ref[Cell]] = []  # one list for all cells cut from one tensor
        self.told = False  # the user knows why this cell stays dense

    @property
    def is_packed(self) -> bool:
        return self.dense is None

    def read(self) -> torch.Tensor:
        """The content as a plain tensor. It may be `dense`: not to be written to, or handed out."""
        return self.packed.dequantize() if self.dense is None else self.dense

    def relatives(self) -> list[Cell]:
        """Other living packed cells, which must become views of one memory when this one does."""
        cells = (ref() for ref in self.kin)
        return [cell for cell in cells if cell is not None and cell is not self and cell.is_packed]

    def is_alone(self) -> bool:
        """Nothing else sees this content: no living slice while packed, no view while dense."""
        if self.dense is None:
            return not self.relatives()
        return self._shared_by() is None

    def _shared_by(self) -> str | None:
        # Our own python reference is not counted; views, numpy arrays and DLPack capsules are.
        if self.dense._use_count() != 1 or shares_storage(self.dense):
            return "a view of it is alive"
        if self.dense.device.type == "cpu" and self.dense.is_shared():
            return "it is in memory shared with other processes"
        return None

    def crop(self, first: int, last: int) -> Cell:
        """Slots first..last-1 of a packed cell, packed."""
        with torch.inference_mode(False), torch.no_grad():
            child = Cell(self.packed.crop(first, last))
        self.kin[:] = [ref for ref in self.kin if ref() is not None] or [weakref.ref(self)]
        self.kin.append(weakref.ref(child))
        child.kin, child.start = self.kin, self.start + first
        return child

    def materialize(self, why: str) -> torch.Tensor:
        """Make the content dense, in memory shared with all relatives; returns `dense`."""
        if self.dense is None:
            log.info("%s materialised a packed cache tensor %s", why, tuple(self.packed.shape))
            cells = [self, *self.relatives()]
            # Not inference tensors: the user may edit them outside inference mode later on.
            with torch.inference_mode(False), torch.no_grad():
                parts = [cell.packed.dequantize() for cell in cells]
                if len(cells) > 1:
                    parts = _overlay(parts, [cell.start for cell in cells])
            for cell, part in zip(cells, parts, strict=True):
                cell.dense, cell.kin = part, []
        return self.dense

    def pack(self) -> bool:
        """Pack again. False, with one warning, while anything else sees the dense memory."""
        reason = self._shared_by()
        if reason is None:
            with torch.inference_mode(False), torch.no_grad():
                self.packed = self.packed.repacked(self.dense)
            self.dense = None
        elif not self.told:
            log.warning("a cache tensor %s stays dense: %s", tuple(self.dense.shape), reason)
        self.told = reason is not None
        return reason is None

    def copy(self) -> Cell:
        """An independent cell of equal content."""
        with torch.inference_mode(False), torch.no_grad():
            return Cell(self.packed.clone(), None if self.dense is None else self.dense.clone())

    def replaced(self, dense: torch.Tensor) -> Cell:
        """A cell of other content, which is packed as this one."""
        with torch.inference_mode(False):
            return Cell(self.packed.emptied(), dense)

    def __deepcopy__(self, memo: dict) -> Cell:
        return memo.setdefault(id(self), self.copy())

    def __reduce__(self):
        return rebuild_cell, (self.packed.state_dict(), self.dense)


def rebuild_cell(packed: dict, dense: torch.Tensor | None) -> Cell:
    """Unpickle a `Cell`."""
    return Cell(load_state(packed), dense)


def _overlay(parts: list[torch.Tensor], starts: list[int]) -> list[torch.Tensor]:
    """One dense tensor that spans all `parts` (equal where they overlap); returns its slices."""
    origin = min(starts)
    batch, heads, _, dim = parts[0].shape
    stop = max(start + part.shape[2] for start, part in zip(starts, parts, strict=True))
    whole = parts[0].new_zeros(batch, heads, stop - origin, dim)
    slices = []
    for start, part in zip(starts, parts, strict=True):
        place = whole[:, :, start - origin : start - origin + part.shape[2]]
        place.copy_(part)
        slices.append(same_memory(place))
    return slices


def same_memory(tensor: torch.Tensor, *, inference: bool = False) -> torch.Tensor:
    """A tensor over the memory of `tensor` that is no view: it holds the storage, not a base."""
    with torch.inference_mode(inference), torch.no_grad():
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor)


def shares_storage(tensor: torch.Tensor) -> bool:
    """Whether anything but the plain `tensor` holds its storage: a tensor, an array, a storage."""
    return _holders(tensor) > _holders(torch.empty(1))


def _holders(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    # All python names of a storage object are one C++ reference.
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
