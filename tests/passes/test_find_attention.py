"""Every recognised attention, evaluated from its canonical fields alone, gives what it gave."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from hqmq_compile.passes.graph_types import Attention

B, H, HKV, N, T, D = 2, 4, 2, 3, 5, 8


def tensors(heads=HKV):
    return torch.randn(B, H, N, D), torch.randn(B, heads, T, D), torch.randn(B, heads, T, D)


def canonical(attention: Attention, value) -> torch.Tensor:
    """`graph_types.Attention` written out; `value(node)` is what a node holds."""
    q, k, v = value(attention.query), value(attention.key), value(attention.value)
    k, v = (x.repeat_interleave(attention.groups, 1) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if attention.scale is None else attention.scale
    logits = scale * q @ k.mT
    if attention.softcap is not None:
        logits = attention.softcap * torch.tanh(logits / attention.softcap)
    if attention.causal:
        ones = torch.ones(logits.shape[-2:], dtype=torch.bool)
        logits = logits.masked_fill(~ones.tril(), -torch.inf)
    if attention.mask is not None:
        mask = value(attention.mask)
        if mask.dtype is torch.bool:
            logits = logits.masked_fill(~mask, -torch.inf)
        else:
            logits = logits + mask
    if attention.sinks is not None:
        column = value(attention.sinks).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, column], -1)
    weights = logits.softmax(-1)[..., : k.shape[2]]
    return weights @ v


def check_numbers(analysis, *args) -> None:
    """Compare each matched attention of the graph with its canonical form."""
    interpreter = torch.fx.Interpreter(analysis.graph, garbage_collect_values=False)
    named = dict(zip(("q", "k", "v", "sinks"), args, strict=False))
    with torch.no_grad():  # Dynamo orders its inputs by first use
        interpreter.run(*(named[info.source[3:-2]] for info in analysis.infos))
    for attention in analysis.attentions:
        assert attention.reason is None
        expected = interpreter.env[attention.node]
        torch.testing.assert_close(canonical(attention, interpreter.env.__getitem__), expected)


def causal_bias():
    return torch.full((N, T), -torch.inf).triu(1)[None, None]


def sdpa_plain(q, k, v):
    return F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))


def sdpa_expand_reshape(q, k, v):
    k, v = (x[:, :, None].expand(B, HKV, 2, T, D).reshape(B, H, T, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def sdpa_gqa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_bool_mask(q, k, v):
    mask = torch.ones(N, T, dtype=torch.bool).tril(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def sdpa_single_head(q, k, v):
    k, v = (x[:, :1].expand(B, H, T, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_single_broadcast(q, k, v):
    """Multi-query attention without any expansion, as in Falcon."""
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1])


def eager_single_broadcast(q, k, v):
    return (q @ k[:, :1].mT).softmax(-1) @ v[:, :1]


def repeat_kv(x):
    return x.unsqueeze(2).expand(-1, -1, 2, -1, -1).clone().view(B, H, T, D)


def eager_plain(q, k, v):
    weights = q @ repeat_kv(k).transpose(2, 3) / math.sqrt(D)
    return F.softmax(weights + causal_bias(), -1, dtype=torch.float32).to(q.dtype) @ repeat_kv(v)


def eager_scaled_query(q, k, v):
    weights = torch.matmul(q * 0.25, repeat_kv(k).permute(0, 1, 3, 2))
    return torch.matmul(F.dropout(weights.softmax(-1), 0.1, training=False), repeat_kv(v))


def eager_scaled_key(q, k, v):
    weights = torch.matmul(q, (repeat_kv(k) * 0.5).mT) * 0.25
    return weights.softmax(-1) @ repeat_kv(v)


def eager_in_place(q, k, v):
    weights = q @ repeat_kv(k).mT
    weights /= D**0.5
    weights += causal_bias()
    return torch.softmax(weights, 3) @ repeat_kv(v)


def eager_masked_fill(q, k, v):
    mask = torch.ones(N, T, dtype=torch.bool).triu(2)
    weights = (q @ repeat_kv(k).mT).mul(0.3).masked_fill(mask, float("-inf"))
    return weights.softmax(-1) @ repeat_kv(v)


def eager_where(q, k, v):
    mask = torch.ones(N, T, dtype=torch.bool).tril(1)
    weights = q @ repeat_kv(k).mT / torch.full([], D**0.5)
    weights = torch.where(mask, weights, torch.full([], torch.finfo(q.dtype).min))
    return weights.softmax(-1) @ repeat_kv(v)


def eager_softcap(q, k, v):
    weights = q @ repeat_kv(k).mT * 0.5
    weights = torch.tanh(weights / 3.0) * 3.0 + causal_bias()
    return weights.softmax(-1) @ repeat_kv(v)


def eager_bmm(q, k, v):
    k, v = (repeat_kv(x).reshape(B * H, T, D) for x in (k, v))
    weights = torch.bmm(q.reshape(B * H, N, D), k.transpose(1, 2)) * 0.3
    return torch.bmm(weights.softmax(-1), v).view(B, H, N, D)


def eager_grouped_bmm(q, k, v):
    """Mask added to a four-dim view of the three-dim logits, as in GPT-J and OPT."""
    k, v = (repeat_kv(x).reshape(B * H, T, D) for x in (k, v))
    weights = torch.bmm(q.reshape(B * H, N, D), k.transpose(1, 2)).view(B, H, N, T)
    weights = (weights + causal_bias()).view(B * H, N, T).softmax(-1)
    return torch.bmm(weights, v).view(B, H, N, D)


def eager_two_masks(q, k, v):
    weights = q @ repeat_kv(k).mT + causal_bias() + torch.zeros(N, T)
    return weights.softmax(-1) @ repeat_kv(v)


@pytest.mark.parametrize(
    "function",
    [
        sdpa_plain,
        sdpa_expand_reshape,
        sdpa_gqa_causal,
        sdpa_bool_mask,
        sdpa_single_head,
        sdpa_single_broadcast,
        eager_single_broadcast,
        eager_plain,
        eager_two_masks,
        eager_scaled_query,
        eager_scaled_key,
        eager_in_place,
        eager_masked_fill,
        eager_where,
        eager_softcap,
        eager_bmm,
        eager_grouped_bmm,
    ],
)
def test_canonical_form_gives_the_same_numbers(analyze, function):
    args = tensors()
    analysis = analyze(function)(*args)
    (attention,) = analysis.attentions
    assert attention.form == function.__name__.split("_")[0]
    assert attention.groups == (4 if "single" in function.__name__ else 2)
    assert attention.source.startswith("test_find_attention.py:")
    check_numbers(analysis, *args)


def test_sinks_are_one_more_column(analyze):
    def attend(q, k, v, sinks):
        weights = q @ repeat_kv(k).mT * 0.3 + causal_bias()
        column = sinks.reshape(1, -1, 1, 1).expand(B, -1, N, -1)
        weights = torch.cat([weights, column], -1)
        weights = weights - weights.max(dim=-1, keepdim=True).values
        return torch.softmax(weights, -1)[..., :-1] @ repeat_kv(v)

    args = (*tensors(), torch.randn(H))
    analysis = analyze(attend)(*args)
    assert analysis.attentions[0].sinks.op == "placeholder"
    check_numbers(analysis, *args)


def test_softcap_constants_and_scale(analyze):
    attention = analyze(eager_softcap)(*tensors()).attentions[0]
    assert attention.softcap == pytest.approx(3.0)
    assert attention.scale == pytest.approx(0.5)


def test_a_router_softmax_is_no_attention(analyze):
    experts, gate = torch.randn(4, D, D), torch.randn(D, 4)

    def route(x):
        weights = F.softmax(x @ gate, -1, dtype=torch.float32)
        values, index = weights.topk(2, -1)
        return sum(
            values[..., i, None] * (x[..., None, :] @ experts[index[..., i]])[..., 0, :]
            for i in range(2)
        )

    assert analyze(route)(torch.randn(3, D)).attentions == []


def sdpa_dropout(q, k, v):
    return F.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), dropout_p=0.5)


def eager_dropout(q, k, v):
    return F.dropout((q @ repeat_kv(k).mT).softmax(-1), 0.5, training=True) @ repeat_kv(v)


def einsum(q, k, v):
    weights = torch.einsum("bhnd,bhtd->bhnt", q, repeat_kv(k)).softmax(-1)
    return torch.einsum("bhnt,bhtd->bhnd", weights, repeat_kv(v))


def alibi(q, k, v):
    k, v = (repeat_kv(x).reshape(B * H, T, D) for x in (k, v))
    bias = torch.zeros(B * H, 1, T)
    weights = torch.baddbmm(bias, q.reshape(B * H, N, D), k.mT, alpha=0.3).softmax(-1)
    return torch.bmm(weights, v).view(B, H, N, D)


def unknown_step(q, k, v):
    return torch.relu(q @ repeat_kv(k).mT).softmax(-1) @ repeat_kv(v)


def weights_returned(q, k, v):
    weights = (q @ repeat_kv(k).mT).softmax(-1)
    return weights @ repeat_kv(v), weights


def scaled_after_mask(q, k, v):
    return ((q @ repeat_kv(k).mT + causal_bias()) * 0.5).softmax(-1) @ repeat_kv(v)


def odd_head_dim(q, k, v):
    q, k, v = (x[..., :6].contiguous() for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def three_dims(q, k, v):
    return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])


def high_fill(q, k, v):
    mask = torch.ones(N, T, dtype=torch.bool).triu(2)
    return (q @ repeat_kv(k).mT).masked_fill(mask, -5.0).softmax(-1) @ repeat_kv(v)


@pytest.mark.parametrize(
    ("function", "form", "reason"),
    [
        (sdpa_dropout, "sdpa", "dropout"),
        (eager_dropout, "eager", "dropout"),
        (einsum, "einsum", "einsum attention is not rewritten"),
        (alibi, "baddbmm", "baddbmm attention is not rewritten"),
        (unknown_step, "eager", "aten.relu at test_find_attention.py"),
        (weights_returned, "eager", "attention weights are read by output"),
        (scaled_after_mask, "eager", "scaled after the mask"),
        (odd_head_dim, "sdpa", "head dim 6"),
        (three_dims, "sdpa", "not [B, H"),
        (high_fill, "eager", "filled with -5"),
    ],
)
def test_unsupported_forms_are_reported_with_a_reason(analyze, function, form, reason):
    (attention,) = analyze(function, check=False)(*tensors()).attentions
    assert attention.form == form
    assert reason in attention.reason
    assert attention.source.startswith("test_find_attention.py:")


def test_flex_attention_is_reported(analyze):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def causal(b, h, i, j):
        return i >= j

    block_mask = create_block_mask(causal, None, None, 128, 128, device="cpu")

    def attend(q, k, v):
        return flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)

    q, k, v = torch.randn(1, 4, 128, 16), torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16)
    (attention,) = analyze(attend, check=False)(q, k, v).attentions
    assert attention.form == "flex" and "flex" in attention.reason


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mixtral", "gptoss"])
def test_all_attentions_of_real_models_are_found(steps, name):
    """Two layers, prefill and decode; the router's softmax of the MoE models is not among them."""
    softcaps = {"gemma2": 50.0}
    for analysis in steps(name, "dynamic", "eager", (5, 1)):
        assert [a.reason for a in analysis.attentions] == [None, None]
        for layer, attention in enumerate(analysis.attentions):
            assert attention.form == "eager" and attention.groups == 2
            assert attention.module == f"model.layers.{layer}.self_attn"
            assert attention.softcap == pytest.approx(softcaps.get(name)) or name != "gemma2"
            assert (attention.sinks is not None) == (name == "gptoss")
