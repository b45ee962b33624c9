"""Caches in other layouts, written by hand: the oracle, going back, and what the user does with them."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.compare import TYPICAL, cheap
from tests.configs import CONFIGS
from tests.hand_layouts import LAYOUTS, LayoutLoop

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]
STATIC = [style for style in LAYOUTS if style != "grown"]


def check(errors: list[float]) -> None:
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)


@pytest.mark.parametrize("style", LAYOUTS)
@pytest.mark.parametrize("which", ["16", "immediate"])
def test_every_layout(which, style):
    loop = LayoutLoop(style, CONFIGS[which])
    check([loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)])
    loop.check_stored()


@pytest.mark.parametrize("style", STATIC)
def test_new_prompt_at_slot_0(style):
    loop = LayoutLoop(style, CONFIGS["8"])
    before = loop.target.tensors()
    check([loop(60), loop(1), loop(29, 0), loop(1), loop(1), loop(45, 0), loop(1)])
    loop.check_stored()
    after = loop.target.tensors()
    assert all(a is b for a, b in zip(before, after, strict=True))  # the user's own tensors


@pytest.mark.parametrize("style", STATIC)
def test_user_edits_and_copies(style):
    """The user's tensor is an ordinary one of its own layout: read, edited, copied."""
    loop = LayoutLoop(style, CONFIGS["16"])
    check([loop(60), loop(1)])
    (*_, tensor) = loop.target.tensors()
    kept, dense = copy.deepcopy(tensor), tensor.dequantize()
    assert tensor.is_packed and kept.is_packed and torch.equal(kept, dense)
    assert torch.equal(tensor.clone(), dense) and torch.equal(tensor[..., :1], dense[..., :1])
    with torch.no_grad():
        view = tensor[:1]
        view.mul_(2)
    assert not tensor.is_packed and torch.equal(tensor[:1], 2 * dense[:1])
    assert torch.equal(kept, dense)
    tensor.copy_(dense)
    del view
    check([loop(1), loop(20), loop(1)])  # packed again, exactly: only the edits are undone
    loop.check_stored()


@pytest.mark.parametrize("style", STATIC)
def test_half_filled_cache_is_adopted(style):
    """An eager prefill, then compiled steps: what is there already is packed along with it."""
    loop = LayoutLoop(style, CONFIGS["16"])
    compiled, loop.compiled = loop.compiled, loop.target
    loop(37)  # exact, so not what the oracle sees
    assert not any(hasattr(t, "packed") for t in loop.target.tensors())
    loop.compiled = compiled
    check([loop(1), loop(1), loop(40), loop(1)])
    loop.check_stored()
