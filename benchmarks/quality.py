"""Quality of caches on real text: KL divergence, perplexity and equal top tokens against 16 bits.

    python -m benchmarks.quality                                  # presets, three models, three texts
    python -m benchmarks.quality --cases all --models smollm2     # and every baseline
    python -m benchmarks.quality --cases 4bit '4bit{"block": 128}' --route product --tokens 512

Decode-faithful: the first `--prefill` tokens of a text are one call, every other token a call of its own,
and each token sees what was stored at its time. `--route fake` computes all of that in one pass over the
text by fake quantization (`faithful.py`), the only route of the baselines. `--route product` runs the
compiled model and its packed caches, `--chunk` tokens a call; with the same `--chunk` the two agree
(`tests/benchmarks/test_faithful.py`).

Paired: compared at each position after the prefill with the same float32 model without quantization, and
standard errors are those of the mean over groups of 64 neighbouring positions. Stored bits are those of
a 16-bit cache at 4k context, everything counted, averaged over the 128 lengths around 4,096 (a window
fills and empties); "at 4096" is at exactly that length, right after a block was packed.

Every case is appended to `results/quality.jsonl` when it is done, and not measured again. Tables and
plots are made of all that is there for the same settings.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .common import RESULTS, Session, cache_keyword, parser, progress, set_threads
from .faithful import Codec, Method, calls_of, through
from .models import load, token_ids
from .quality_cases import CACHES, config, fingerprint, method, named

TEXTS = ("python-docs", "python-source", "debian-handbook")
GROUP = 64  # neighbouring positions that are one sample of a standard error
STEP = 16  # tokens of a call of transformers' own caches
CONTEXT = 4096  # where bits are quoted
ROWS = 128  # of logits compared at once
KEY = (
    "model",
    "text",
    "case",
    "config",
    "route",
    "tokens",
    "skip",
    "prefill",
    "chunk",
    "positions",
)
CALIBRATION = {
    "python-docs": "python-source"
}  # learned codebooks see another text than the one tested


# -- comparing -------------------------------------------------------------------------------------
def compare(want: Tensor, got: Tensor, after: Tensor) -> Tensor:
    """Per position: KL, equal top token, more nats for the next token, nats of the unquantised, `[4, n]`.

    Args:
        want: log-probabilities `[n, V]` of the unquantised model.
        got: logits `[n, V]`.
        after: the tokens that follow, `[n]`.
    """
    parts = []
    for first in range(0, len(want), ROWS):
        p, q = want[first : first + ROWS], got[first : first + ROWS].float().log_softmax(-1)
        kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        index = after[first : first + ROWS, None]
        base, other = (-t.gather(1, index).squeeze(1) for t in (p, q))
        same = (p.argmax(-1) == q.argmax(-1)).float()
        parts.append(torch.stack((kl, same, other - base, base)))
    return torch.cat(parts, 1)


def grouped(values: Tensor, positions: Tensor) -> dict[str, list[float]]:
    """Sums of `compare` over groups of neighbouring positions, as a record keeps them."""
    owner = torch.div(positions, GROUP, rounding_mode="floor")
    owner = owner - owner[0]
    sums = torch.zeros(5, int(owner[-1]) + 1, dtype=torch.float64)
    sums.index_add_(1, owner, torch.cat((values, torch.ones_like(values[:1]))).double())
    names = ("kl", "same", "more", "base", "count")
    return {
        n: [float(f"{v:.6g}") for v in row] for n, row in zip(names, sums.tolist(), strict=True)
    }


# -- the two routes ---------------------------------------------------------------------------------
@torch.no_grad()
def reference(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Log-probabilities `[n, V]` of the unquantised model."""
    return model(ids, use_cache=False, logits_to_keep=positions).logits[0].log_softmax(-1)


@torch.no_grad()
def fake(model: Any, codecs: Method, ids: Tensor, positions: Tensor, prefill: int, chunk: int):
    """Logits `[n, V]` by fake quantization, all calls in one pass."""
    with through(model, codecs, calls_of(ids.shape[1], prefill, chunk)):
        return model(ids, use_cache=False, logits_to_keep=positions).logits[0]


def product(model: Any, case: str, ids: Tensor, prefill: int, chunk: int, cache: str) -> Tensor:
    """Logits `[T - prefill, V]` of the compiled model with packed caches, call by call."""
    torch._dynamo.reset()
    own = config(case)
    if own is None:
        raise SystemExit(f"{case!r} is no config of hqmq: it has no product route")
    session = Session(model, "hqmq", cache, ids.shape[1], options={"config": own})
    session(ids[:, :prefill])
    calls = calls_of(ids.shape[1], prefill, chunk)[1:]
    logits = [session(ids[:, a:b], keep=0)[0] for a, b in progress(calls, f"{case}, compiled")]
    if not all(getattr(t, "is_packed", False) and t.packed.packed_slots for t in session.tensors()):
        raise RuntimeError("some caches are not packed: this is no measurement of hqmq")
    return torch.cat(logits)


@torch.no_grad()
def stepped(model: Any, case: str, ids: Tensor, prefill: int, chunk: int) -> Tensor:
    """Logits `[T - prefill, V]` of the eager model with a cache of transformers, call by call.

    Raises:
        ImportError: the cache needs a package that is not installed.
    """
    from transformers import QuantizedCache

    cache = QuantizedCache(config=model.config, **CACHES[case])
    parts = []
    for first, last in calls_of(ids.shape[1], prefill, chunk):
        call = {cache_keyword(model): cache, "logits_to_keep": last - first if first else 1}
        parts.append(model(ids[:, first:last], **call).logits[0])
    return torch.cat(parts[1:])


class _Recorder(Codec):
    """Hands the keys or values of a calibration text to a codec that learns from them."""

    def __init__(self, learner: Any) -> None:
        super().__init__(block=1)
        self.learner = learner

    def read_back(self, x: Tensor, layer: int, calls: Any) -> Tensor:
        self.learner.fit(x, layer)
        return x


@torch.no_grad()
def calibrate(model: Any, tokenizer: Any, codecs: Method, text: str, tokens: int = 1024) -> None:
    """Lets learned codebooks see a text other than the one that is tested."""
    learners = [c for c in (codecs.key, codecs.value) if hasattr(c, "fit")]
    if len(learners) == 2:
        ids = token_ids(tokenizer, CALIBRATION.get(text, "python-docs"), tokens)
        with through(
            model, Method(*map(_Recorder, learners)), [(0, tokens - 1), (tokens - 1, tokens)]
        ):
            model(ids, use_cache=False, logits_to_keep=1)


# -- records -----------------------------------------------------------------------------------------
def shape_of(model: Any) -> tuple[int, int, int]:
    """Layers, KV heads and head dimension."""
    c = model.config.get_text_config()
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return c.num_hidden_layers, c.num_key_value_heads, dim


def allocated_bits(model: Any, case: str) -> float | None:
    """Bits an element of a growing bfloat16 cache of 4k tokens as the store allocates it."""
    from hqmq_compile.cache.store import PackedKV

    own, (_, heads, dim) = config(case), shape_of(model)
    if own is None or own.layers:
        return None
    specs = [own.spec(role, dim, torch.bfloat16) for role in ("key", "value")]
    stores = [PackedKV.empty(s, 1, heads, CONTEXT, growing=True) for s in specs]
    return sum(s.bits_per_element for s in stores) / 2


def key_of(o: argparse.Namespace, model: str, text: str, case: str) -> dict[str, Any]:
    """What must be equal for a record to count as this measurement."""
    return {
        "model": model,
        "text": text,
        "case": case,
        "config": fingerprint(case),
        "route": o.route if o.route == "fake" else f"product, {o.cache}",
        "tokens": o.tokens,
        "skip": o.skip,
        "prefill": o.prefill,
        "chunk": o.chunk,
        "positions": o.positions,
    }


def keys(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each record, what `key_of` gave."""
    return [{name: r.get(name) for name in KEY} for r in records]


def read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def _shares(codecs: Method, what: str) -> list[float]:
    # Of all chunks that were coded: of the keys, of the values.
    pairs = [(getattr(c, what, 0), getattr(c, "chunks", 0)) for c in (codecs.key, codecs.value)]
    return [round(found / max(1, chunks), 5) for found, chunks in pairs]


def measure(o: argparse.Namespace, model, tokenizer, ids, positions, want, key) -> dict[str, Any]:
    """One record."""
    case, begin = key["case"], time.perf_counter()
    codecs = method(case)
    if o.prefill >= o.tokens:  # as papers evaluate: one call that reads its own tokens as stored
        codecs.key.exact_prefill = codecs.value.exact_prefill = False
    if case in CACHES:  # quantised again and again as they grow: no one pass for them
        got = stepped(model, case, ids, o.prefill, max(o.chunk, STEP))[positions - o.prefill]
    elif o.route == "fake":
        calibrate(model, tokenizer, codecs, key["text"])
        got = fake(model, codecs, ids, positions, o.prefill, o.chunk)
    else:
        got = product(model, case, ids, o.prefill, o.chunk, o.cache)[positions - o.prefill]
    layers, _, dim = shape_of(model)
    return {
        **key,
        **grouped(compare(want, got, ids[0, positions + 1]), positions),
        "bits": [round(b, 4) for b in codecs.bits(dim, CONTEXT, layers)],
        "bits_at": round(codecs.bits_at(dim, CONTEXT, layers), 4),
        "allocated": allocated_bits(model, case),
        "outliers": _shares(codecs, "outliers"),
        "capped": _shares(codecs, "capped"),
        "seconds": round(time.perf_counter() - begin, 1),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
    }


def missing(o: argparse.Namespace) -> Iterator[tuple[str, str, list[str]]]:
    """Model, text, and the cases that have no record yet."""
    done = keys(read(o.records))
    for model in o.models:
        for text in o.texts:
            cases = [c for c in o.cases if key_of(o, model, text, c) not in done]
            if cases:
                yield model, text, cases


def run(o: argparse.Namespace) -> None:
    """Measure what is missing, and append it to the records."""
    o.records.parent.mkdir(parents=True, exist_ok=True)
    loaded = None
    for name, text, cases in missing(o):
        try:
            if loaded != name:
                model, tokenizer = load(name)
                loaded = name
            ids = token_ids(tokenizer, text, o.tokens, skip=o.skip)
        except FileNotFoundError as error:  # a model not fetched, or a text not installed
            print(f"left out: {error}", flush=True)
            continue
        start = o.prefill if o.prefill < o.tokens else GROUP
        step = max(1, -(-(o.tokens - 1 - start) // o.positions))
        positions = torch.arange(start, o.tokens - 1, step)
        want = reference(model, ids, positions)
        for case in progress(cases, f"{name}, {text}"):
            key = key_of(o, name, text, case)
            try:
                record = measure(o, model, tokenizer, ids, positions, want, key)
            except ImportError as error:
                print(f"left out: {case}: {str(error).splitlines()[0]}", flush=True)
                continue
            with o.records.open("a") as file:
                file.write(json.dumps(record) + "\n")


def _is_known(case: str) -> bool:
    try:
        return bool(method(case))
    except ValueError:
        return False


def options() -> argparse.Namespace:
    result = parser(__doc__, model=None)
    result.add_argument("--models", nargs="+", default=["smollm2", "qwen2.5-coder", "gemma3-270m"])
    result.add_argument(
        "--cases", nargs="+", default=["presets"], help="cases or sets; 'recorded': all there are"
    )
    result.add_argument("--texts", nargs="+", default=list(TEXTS), help="of benchmarks.models")
    result.add_argument("--tokens", type=int, default=2048)
    result.add_argument("--skip", type=int, default=0, help="tokens of each text to leave out")
    result.add_argument(
        "--prefill",
        type=int,
        default=128,
        help="tokens of the first call; all of --tokens: one call",
    )
    result.add_argument("--chunk", type=int, default=1, help="tokens of every later call")
    result.add_argument("--positions", type=int, default=2048, help="at most so many are compared")
    result.add_argument("--route", choices=("fake", "product"), default="fake")
    result.add_argument("--cache", choices=("static", "dynamic"), default="static")
    result.add_argument("--records", type=Path, default=RESULTS / "quality.jsonl")
    result.add_argument("--name", default="quality", help="of the table, the CSV and the plots")
    result.add_argument("--no-plot", action="store_true")
    result.add_argument("--only-report", action="store_true", help="measure nothing")
    o = result.parse_args()
    if o.cases == ["recorded"]:
        o.cases = list(dict.fromkeys(r["case"] for r in read(o.records) if _is_known(r["case"])))
        o.only_report = True
    o.cases = named(o.cases)
    for case in o.cases:
        method(case)  # a wrong name fails before hours of work
    return o


def main() -> None:
    o = options()
    set_threads(o.threads)
    if not o.only_report:
        run(o)
    from .quality_report import report

    wanted = [key_of(o, m, t, c) for m in o.models for t in o.texts for c in o.cases]
    known = read(o.records)
    records = [r for r, key in zip(known, keys(known), strict=True) if key in wanted]
    report(o.name, __doc__, records, plot=not o.no_plot, output=o.output)


if __name__ == "__main__":
    main()
