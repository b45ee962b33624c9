"""Quality of the presets on real text, through the compiled model and its packed caches.

    python -m benchmarks.quality_quick

Teacher forcing: the first `--prefill` tokens of a text in one call, the rest `--chunk` tokens a call,
each through the graphs and packed caches that generation uses. A chunk is shorter than the window, so
its tokens see what single steps would have seen, but for at most chunk - 1 older tokens that are
packed a few steps earlier (with `--chunk 1` none). Presets that keep no window quantise every token
before it is attended to, as single steps do; the median of the paper's Med3x is over a chunk.

Compared, at every position of the chunks, with the same float32 model without quantization: mean KL
divergence, share of equal top tokens, perplexity. Float32, so that quantization is the only
difference. Bits are those of a bfloat16 cache of 4,096 tokens of this model, everything counted.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

import torch

from .common import Session, Table, parser, progress, publish, set_threads
from .models import load, token_ids


class Quality(NamedTuple):
    """Means over positions, and perplexity against the text."""

    kl: float
    top1: float
    perplexity: float
    reference: float


@torch.no_grad()
def reference(model: Any, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Log-probabilities `[T - start, V]` of the unquantised model from position `start` on."""
    return (
        model(ids, use_cache=False, logits_to_keep=ids.shape[1] - start).logits[0].log_softmax(-1)
    )


def compressed(session: Session, ids: torch.Tensor, prefill: int, chunk: int, what: str):
    """Log-probabilities of the same positions, chunk by chunk, with packed caches."""
    session(ids[:, :prefill])
    for first in progress(range(prefill, ids.shape[1], chunk), what):
        yield first, session(ids[:, first : first + chunk], keep=0)[0].log_softmax(-1)
    if not all(getattr(t, "is_packed", False) and t.packed.packed_slots for t in session.tensors()):
        raise RuntimeError("some caches are not packed: this is no measurement of hqmq")


def measure(
    session: Session, ids: torch.Tensor, prefill: int, chunk: int, expected: torch.Tensor, what: str
) -> Quality:
    """Quality of one session; `expected` is what `reference` gave from position `prefill` on."""
    kl = same = nll = base = 0.0
    count = 0
    for first, actual in compressed(session, ids, prefill, chunk, what):
        want = expected[first - prefill : first - prefill + len(actual)]
        kl += (want.exp() * (want - actual)).sum().item()
        same += (want.argmax(-1) == actual.argmax(-1)).sum().item()
        next_ids = ids[0, first + 1 : first + 1 + len(actual), None]
        nll -= actual[: len(next_ids)].gather(1, next_ids).sum().item()
        base -= want[: len(next_ids)].gather(1, next_ids).sum().item()
        count += len(actual)
    steps = count - 1  # the last position has no next token
    perplexity, plain = (torch.tensor(x / steps).exp().item() for x in (nll, base))
    return Quality(kl / count, same / count, perplexity, plain)


def stored_bits(model: Any, preset: str, slots: int = 4096) -> float:
    """Bits an element of a bfloat16 cache of `slots` tokens, keys and values, as allocated."""
    from hqmq_compile import HQMQConfig
    from hqmq_compile.cache.store import PackedKV

    c, config = model.config, HQMQConfig.preset(preset)
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    stores = [
        PackedKV.empty(config.spec(role, dim, torch.bfloat16), 1, c.num_key_value_heads, slots)
        for role in ("key", "value")
    ]
    return sum(s.bits_per_element for s in stores) / 2


def rows(arguments: argparse.Namespace):
    for name in arguments.models:
        model, tokenizer = load(name)
        ids = token_ids(tokenizer, arguments.text, arguments.tokens, skip=arguments.skip)
        expected = reference(model, ids, arguments.prefill)
        for preset in arguments.presets:
            torch._dynamo.reset()
            session = Session(model, "hqmq", "static", arguments.tokens, options={"preset": preset})
            what = f"{name}, {preset}"
            q = measure(session, ids, arguments.prefill, arguments.chunk, expected, what)
            yield (
                what,
                f"{stored_bits(model, preset):.2f}",
                f"{q.kl:.4f}",
                f"{100 * q.top1:.1f} %",
                f"{q.perplexity:.3f}",
                f"{100 * (q.perplexity / q.reference - 1):+.2f} %",
            )


def main() -> None:
    options = parser(__doc__, model=None)
    options.add_argument("--models", nargs="+", default=["smollm2", "qwen2.5-coder"])
    options.add_argument("--presets", nargs="+", default=["4bit", "3bit", "5bit", "paper"])
    options.add_argument("--tokens", type=int, default=2048)
    options.add_argument("--prefill", type=int, default=128, help="tokens of the first call")
    options.add_argument("--chunk", type=int, default=16, help="tokens of every later call")
    options.add_argument("--text", default="python-docs", help="of benchmarks.models, or a file")
    options.add_argument("--skip", type=int, default=0, help="tokens of the text to leave out")
    arguments = options.parse_args()
    if (arguments.tokens - arguments.prefill) % arguments.chunk:
        options.error("--tokens minus --prefill must be a multiple of --chunk: no graph for a rest")
    set_threads(arguments.threads)
    table = Table(
        f"{arguments.tokens:,} tokens of {arguments.text}, positions from {arguments.prefill} on",
        ("model, preset", "bits an element", "KL", "equal top token", "perplexity", "change"),
        notes=[f"Calls of {arguments.chunk} tokens after {arguments.prefill} in the first."],
    )
    for row in rows(arguments):
        table.add(*row)
    publish("quality_quick", __doc__, [table], arguments.output)


if __name__ == "__main__":
    main()
