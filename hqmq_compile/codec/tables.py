"""Constant tensors that are built once and kept."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def may_branch(t: Tensor) -> bool:
    """Whether control flow may look at the data of `t`: not on a device, where it would wait."""
    return t.device.type == "cpu"


def cached_table(maxsize: int) -> Callable:
    """`lru_cache` for a function that builds a constant tensor.

    The first call may come from anywhere: under inference mode, while a graph is traced with fake
    tensors, or with another default device. What is kept must not inherit that.
    """

    def wrap(build: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.lru_cache(maxsize=maxsize)
        @functools.wraps(build)
        def table(*args):
            from torch._subclasses.fake_tensor import unset_fake_temporarily

            with unset_fake_temporarily(), torch.inference_mode(False), torch.device("cpu"):
                return build(*args)

        return table

    return wrap
