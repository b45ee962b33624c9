"""Decode attention in Gluon (Hopper): against the reference, and what it leaves to other kernels."""

import pytest
import torch

from hqmq_compile.cache.attend import attend as reference
from hqmq_compile.config import HQMQConfig
from hqmq_compile.kernels import launch
from tests.kernels.kernel_cases import empty, random_tokens

attend = pytest.importorskip("hqmq_compile.kernels.attend")
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
needs_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


def specs(head_dim=128, **changes):
    config = HQMQConfig()
    return [config.spec(r, head_dim, "bfloat16").replace(**changes) for r in ("key", "value")]


def cache(spec, batch, heads, slots, writes, keep, seed):
    buffers = type(b := empty(spec, batch, heads, slots))(*(t.cuda() for t in b))
    for i, (start, count) in enumerate(writes):
        tokens = random_tokens(spec, batch, heads, count, seed + i).cuda()
        launch.write(spec, buffers, tokens, None, start, keep)
    return buffers


def check(
    *, group=4, batch=1, heads=2, slots=1000, writes=((0, 1000),), keep=0, first=0, length=None,
    dtype=torch.float16, mask=None, scale=128**-0.5 / 8, sinks=None, **changes,
):  # fmt: skip
    key_spec, value_spec = specs(**changes)
    length = length or slots
    key = cache(key_spec, batch, heads, slots, writes, keep, 0)
    value = cache(value_spec, batch, heads, slots, writes, keep, 50)
    query = torch.randn(batch, heads * group, 1, 128, device="cuda", dtype=dtype)
    assert attend.why_not(key_spec, value_spec, query, 1, group) is None
    options = {"scale": scale, "mask": mask, "sinks": sinks}
    start = int(key.state[0])
    want = reference(
        query.float(), key_spec, key, value_spec, value, start + first, length, **options
    )
    got = attend.attend(query, key_spec, key, value_spec, value, first, length, **options)
    assert got.dtype == dtype and got.is_contiguous()
    error = (got.float() - want).norm() / want.norm()
    assert error < (4e-3 if dtype == torch.bfloat16 else 2e-3)


def hidden_tail(batch, length, filled_to):
    mask = torch.rand(batch, 1, 1, length, device="cuda") < 0.7
    mask[..., filled_to:] = False
    mask[..., filled_to - 1] = True
    return mask


class TestOnHopper:
    pytestmark = needs_hopper

    def test_nothing_packed_yet(self):
        check(slots=50, writes=((0, 50),))

    @pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_groups(self, group, dtype):
        check(group=group, dtype=dtype, batch=2)

    def test_peaked_scores(self):
        check(scale=128**-0.5)

    def test_token_by_token_writes(self):
        check(slots=1100, length=1030, writes=((0, 1000), *((1000 + i, 1) for i in range(30))))

    def test_part_of_the_slots(self):
        check(first=100, length=800)

    def test_bool_mask_hides_unwritten_slots(self):
        mask = hidden_tail(2, 3000, 2000)
        check(slots=3000, writes=((0, 2000),), batch=2, mask=mask)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_added_mask(self, dtype):
        mask = hidden_tail(2, 3000, 2000)
        mask = torch.where(mask, 0.5, torch.finfo(dtype).min).to(dtype)
        check(slots=3000, writes=((0, 2000),), batch=2, mask=mask)

    def test_mask_that_differs_between_heads(self):
        check(mask=torch.rand(1, 8, 1, 1000, device="cuda") < 0.7)

    def test_unwritten_slots_without_mask_read_as_zero(self):
        check(slots=3000, writes=((0, 2000),))

    def test_rewind_leaves_cut_off_slots(self):
        check(slots=2000, writes=((0, 1500), (700, 50)))

    def test_sliding_window_wraps_around(self):
        writes = ((0, 400), (400, 300), (700, 333), (1033, 1), (1034, 200))
        check(slots=700, writes=writes, keep=512, length=512)

    def test_sink_logits(self):
        check(sinks=torch.randn(8, device="cuda"))

    def test_codebooks_of_heads_differ(self):
        check(codebook="haar")

    def test_no_sink_tokens(self):
        check(sink_tokens=0)

    @pytest.mark.parametrize("heads, slots", [(8, 16384), (16, 33000)])
    def test_shapes_of_long_calls(self, heads, slots):
        check(heads=heads, slots=slots, writes=((0, slots - 30),), length=slots - 30)

    def test_graph_replay_follows_the_state(self):
        key_spec, value_spec = specs()
        caches = [cache(s, 1, 2, 1000, ((0, 500),), 0, 0) for s in (key_spec, value_spec)]
        query = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.float16)
        mask = torch.zeros(1, 1, 1, 1000, device="cuda", dtype=torch.bool)
        mask[..., :500] = True
        key, value = caches

        def call():
            return attend.attend(
                query, key_spec, key, value_spec, value, 0, 1000, scale=0.02, mask=mask
            )

        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for spec, buffers in ((key_spec, key), (value_spec, value)):
            launch.write(spec, buffers, random_tokens(spec, 1, 2, 400, 9).cuda(), None, 500)
        mask[..., :900] = True
        graph.replay()
        want = reference(
            query.float(), key_spec, key, value_spec, value, 0, 1000, scale=0.02, mask=mask
        )
        assert (out.float() - want).norm() / want.norm() < 2e-3


@pytest.mark.parametrize(
    "changes, n, group, dtype, word",
    [
        ({}, 2, 4, torch.bfloat16, "query tokens"),
        ({}, 1, 9, torch.bfloat16, "query heads"),
        ({}, 1, 4, torch.float32, "float32"),
        ({"head_dim": 80}, 1, 4, torch.bfloat16, "head_dim"),
        ({"window": 0}, 1, 4, torch.bfloat16, "window"),
        ({"radius_bits": 2}, 1, 4, torch.bfloat16, "radius_bits"),
        ({}, 1, 4, torch.bfloat16, "NVIDIA"),
    ],
)
def test_why_not_says_what_is_not_served(changes, n, group, dtype, word):
    query = torch.empty(1, group, n, 128, dtype=dtype)
    assert word in attend.why_not(*specs(**changes), query, n, group)
