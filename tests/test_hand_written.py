"""Caches written by hand: every way to write them, every config, and going back."""

from __future__ import annotations

import random

import pytest
import torch

from tests.compare import TYPICAL, cheap
from tests.configs import CONFIGS
from tests.hand_written import GROWING, HEADS, QUERY_HEADS, ROOM, SLIDING, STYLES, Loop, fused

pytestmark = pytest.mark.usefixtures("fresh_dynamo", "cheap")
__all__ = ["cheap"]


def check(errors: list[float]) -> None:
    assert max(errors) <= TYPICAL, " ".join(f"{e:.1e}" for e in errors)


@pytest.mark.parametrize("style", ["cat", "index_copy"])
@pytest.mark.parametrize("which", CONFIGS)
def test_every_config(which, style):
    loop = Loop(style, CONFIGS[which])
    # 37 and 40 exceed every window, 11 some of them; 40 comes on top of a packed past.
    check([loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)])
    loop.check_stored()


@pytest.mark.parametrize("style", ["cat", "index_copy"])
def test_chunks_of_a_prefill(style):
    """Over a past that is packed more and more; and what is stored does not depend on the chunks."""
    stored = []
    for chunks in ((61,), (20, 20, 16, 5), (7, 30, 1, 1, 22)):
        loop = Loop(style, CONFIGS["8"])
        tokens = [loop.tokens(HEADS, 61) for _ in range(2)]
        with torch.no_grad():
            for count in chunks:
                first, last = loop.length, loop.length + count
                parts = (t[:, :, first:last] for t in tokens)
                loop.run(fused(loop.tokens(QUERY_HEADS, count), *parts), first)
                loop.length = last
        stored.append([t.dequantize()[:, :, :61] for t in loop.caches])
    for other in stored[1:]:
        for mine, theirs in zip(stored[0], other, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("style", STYLES)
def test_every_style(style):
    loop = Loop(style, CONFIGS["16"])
    check([loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)])
    loop.check_stored()


@pytest.mark.parametrize("style", SLIDING)
@pytest.mark.parametrize("which", ["8", "16", "long block", "immediate", "stored", "paper"])
def test_sliding_windows(which, style):
    """Blocks that leave the window in the very call that packs them are still seen in it."""
    loop = Loop(style, CONFIGS[which])
    check([loop(count) for count in (3, 1, 7, 1, 9, 1, 1, 16, 1, 40, 11, 1, 1)])
    for tensor in loop.caches:
        assert tensor.is_packed


@pytest.mark.parametrize("style", ["cat", "index_copy"])
def test_bfloat16(style):
    loop = Loop(style, CONFIGS["16"], dtype=torch.bfloat16)
    errors = [loop(count) for count in (37, 1, 1, 1, 11, 1, 40, 1)]
    assert max(errors) < 1e-2, errors  # of the output: eight bits
    loop.check_stored()


PLACED = [style for style in STYLES if style not in (*GROWING, *SLIDING)]


@pytest.mark.parametrize("style", PLACED)
@pytest.mark.parametrize("which", ["16", "immediate"])
def test_new_prompt_at_slot_0(which, style):
    loop = Loop(style, CONFIGS[which])
    check([loop(60), loop(1), loop(29, 0), loop(1), loop(1), loop(45, 0), loop(1)])
    loop.check_stored()


@pytest.mark.parametrize("which", ["8", "16", "long block", "immediate", "stored", "paper"])
def test_middle_is_written_again(which):
    loop = Loop("index_copy", CONFIGS[which])
    # Into a packed block, on from there, then beyond the old end: all of it is seen again.
    check([loop(60), loop(1), loop(5, 21), loop(1), loop(1, 61), loop(1), loop(3, 2), loop(20, 64)])
    loop.check_stored()


@pytest.mark.parametrize("which", ["8", "16", "long block", "immediate", "3bit"])
def test_any_order_of_writes(which):
    compiled = None
    for seed in range(12):
        choose = random.Random(seed)
        loop = Loop("index_copy", CONFIGS[which], compiled)
        compiled = loop.compiled
        loop.generator.manual_seed(seed)
        history, errors = [], []
        for _ in range(8):
            count = choose.choice((1, 1, 1, 2, 9, 33))
            position = choose.choice((loop.length, loop.length, choose.randrange(ROOM)))
            position = position if history else 0  # a sequence starts at its start
            position = min(position, ROOM - count)
            history.append((position, count))
            errors.append(loop(count, position))
        assert max(errors) <= TYPICAL, f"{history} {[f'{e:.0e}' for e in errors]}"
        for tensor, stored in zip(loop.caches, loop.past.stored, strict=True):
            torch.testing.assert_close(
                tensor.dequantize(), stored.values, rtol=0, atol=0, msg=str(history)
            )


@pytest.mark.parametrize("which", ["8", "16", "long block", "immediate", "3bit"])
def test_any_order_of_appends_and_crops(which):
    """A growing cache that is cut, continued, copied and continued again."""
    compiled = None
    for seed in range(8):
        choose = random.Random(seed)
        loop = Loop("cat", CONFIGS[which], compiled)
        compiled = loop.compiled
        loop.generator.manual_seed(seed)
        history, errors = [], []
        for _ in range(9):
            if loop.length > 1 and choose.random() < 0.4:
                cut = choose.choice((1, 2, choose.randrange(1, loop.length)))
                cut = min(cut, loop.length - 1)
                loop.keys, loop.values = (t[..., :-cut, :] for t in loop.caches)
                loop.length -= cut
                for stored in loop.past.stored:
                    stored.crop(loop.length)
                history.append(-cut)
                continue
            count = min(choose.choice((1, 1, 2, 9, 33)), ROOM - loop.length)
            history.append(count)
            errors.append(loop(count))
        assert max(errors) <= TYPICAL, f"{history} {[f'{e:.0e}' for e in errors]}"
        for tensor, stored in zip(loop.caches, loop.past.stored, strict=True):
            expected = stored.values[:, :, : loop.length]
            torch.testing.assert_close(
                tensor.dequantize(), expected, rtol=0, atol=0, msg=str(history)
            )
