"""One pass over a text equals decoding it, call by call, with the stored cache of each time."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.common import Session
from benchmarks.faithful import HQMQ, Codec, Method, _Pass, calls_of, packed_by_query, through
from benchmarks.quality_cases import kivi
from hqmq_compile import HQMQConfig
from tests.compare import cheap, error
from tests.configs import CONFIGS
from tests.models.tiny import cache_keyword, prompt, tiny
from tests.oracle import OracleCache

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
__all__ = ["cheap"]
TOKENS, PREFILL = 90, 37


def in_one_pass(model, method: Method, ids, chunk: int, prefill: int = PREFILL):
    with torch.no_grad(), through(model, method, calls_of(ids.shape[1], prefill, chunk)):
        return model(ids, use_cache=False).logits


@pytest.mark.parametrize("which", [name for name in CONFIGS if name not in ("16", "3bit")])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_equals_the_oracle_step_by_step(name, which):
    model = tiny(name, **({"sliding_window": 24} if name == "gemma3" else {}))
    ids = prompt(TOKENS, seed=5)
    cache = OracleCache(model.config, CONFIGS[which])
    with torch.no_grad():
        steps = [
            model(ids[:, first:last], **{cache_keyword(model): cache}).logits
            for first, last in calls_of(TOKENS, PREFILL)
        ]
    assert max(cache.packed_slots) > 0
    actual = in_one_pass(model, Method.of(CONFIGS[which]), ids, 1)
    assert error(actual, torch.cat(steps, 1)) < 1e-3


@pytest.mark.parametrize("which, chunk", [("8", 1), ("long block", 4), ("paper", 3)])
def test_equals_the_compiled_model(cheap, which, chunk):
    """The product route: packed caches, stepping."""
    model, ids = tiny("llama"), prompt(TOKENS, seed=6)
    chunks = calls_of(TOKENS - (TOKENS - PREFILL) % chunk, PREFILL, chunk)
    ids = ids[:, : chunks[-1][1]]
    session = Session(model, "hqmq", "static", 128, options={"config": CONFIGS[which]})
    steps = [session(ids[:, first:last], keep=0) for first, last in chunks]
    assert all(t.is_packed and t.packed.packed_slots for t in session.tensors())
    actual = in_one_pass(model, Method.of(CONFIGS[which]), ids, chunk)
    assert error(actual, torch.cat(steps, 1)) < 1e-3


def test_without_quantization_nothing_changes():
    model, ids = tiny("gemma3", sliding_window=24), prompt(TOKENS, seed=7)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    before = model.config._attn_implementation
    for method in (Method(Codec(), Codec()), Method(Codec(block=32), Codec(window=20, sinks=3))):
        assert error(in_one_pass(model, method, ids, 1), expected) < 1e-5
    assert model.config._attn_implementation == before


class Half(Codec):
    """Packed tokens read as half of what they were."""

    def read_back(self, x, layer, calls):
        return x / 2


@pytest.mark.parametrize("sliding", [None, 13])
def test_keys_and_values_may_be_packed_at_different_times(sliding):
    """Against a loop over queries: KIVI's keys go in blocks, its values one by one."""
    key, value = Half(block=16), Half(window=20, sinks=2)
    q, k, v = (torch.randn(1, heads, 70, 8) for heads in (4, 2, 2))
    calls = calls_of(70, 30)
    one = _Pass(Method(key, value), calls)
    actual = one.attend(q, k, v, 0, None, sliding)
    for query in range(70):
        first = 0 if sliding is None else max(0, query - sliding + 1)
        # The prefill sees itself as it came, and so does a step where there is no window.
        lengths = (0, 0) if query < 30 else (query, query + 1)
        kk, vv = k.clone(), v.clone()
        kk[:, :, : key.packed(lengths[0])] /= 2
        vv[:, :, 2 : max(2, value.packed(lengths[1]))] /= 2
        part = slice(first, query + 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[:, :, query : query + 1], kk[:, :, part], vv[:, :, part], enable_gqa=True
        )
        torch.testing.assert_close(actual[:, :, query : query + 1], expected, rtol=1e-4, atol=1e-5)


def test_what_each_query_sees_packed():
    codec = Codec(window=4, block=4)
    assert (
        packed_by_query(codec, [(0, 10), (10, 11), (11, 13)]).tolist() == [0] * 10 + [4] + [8] * 2
    )
    codec.exact_prefill = False
    assert packed_by_query(codec, [(0, 10)]).tolist() == [4] * 10
    at_once = Codec()  # no window: a step sees itself as it came
    assert packed_by_query(at_once, [(0, 2), (2, 3), (3, 4)]).tolist() == [0, 0, 2, 3]
    at_once.exact_prefill = False
    assert packed_by_query(at_once, [(0, 2), (2, 3), (3, 4)]).tolist() == [2, 2, 3, 4]


def test_bits_of_a_window():
    """A 16-bit cache, everything counted: KIVI-4 has 5 bits and its residual."""
    method = kivi(4)
    assert method.bits_at(64, 4096) == pytest.approx(5 + 11 * 64 / 4096)  # no keys in 16 bits
    keys, values = method.bits(64, 4096)
    assert keys == pytest.approx(5 + 11 * 63.5 / 4096, rel=1e-3)
    assert values == pytest.approx(5 + 11 * 128 / 4096, rel=1e-3)
    ours = Method.of(HQMQConfig())
    from hqmq_compile.codec.accounting import bits_per_element

    specs = [HQMQConfig().spec(role, 64, torch.bfloat16) for role in ("key", "value")]
    mean = sum(bits_per_element(spec, 4096).total for spec in specs) / 2
    assert ours.bits_at(64, 4096) == pytest.approx(mean)
    assert sum(ours.bits(64, 4096)) / 2 > mean  # 4096 is right after a block was packed


def test_layers_left_alone_and_outliers_counted():
    codec = HQMQ(config=HQMQConfig(window=8, block=8, layers={0: None}), role="key")
    x = torch.randn(1, 2, 64, 16)
    assert codec.read_back(x, 0, []) is x
    assert codec.bits(16, 4096, 0) == 16 > codec.bits(16, 4096, 1)
    x[..., :4] *= 30  # one outlier chunk in every token, half of which find room
    codec.read_back(x - x.mean(), 1, [])
    assert codec.chunks == 2 * 64 * 4
    assert codec.capped > 0 and codec.outliers / codec.chunks == pytest.approx(0.125)
    assert math.isclose(codec.outliers + codec.capped, 2 * 64, abs_tol=6)
