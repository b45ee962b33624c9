"""The cases of the evaluation by name: presets, other recipes, baselines.

A case is a baseline, a preset, one of `BUDGETS`, or a preset with changed fields, as in
`4bit{"block": 128}`. Its name may be that of a set of cases (`SETS`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from hqmq_compile import HQMQConfig

from .baselines import (
    AdditiveVQ,
    Baseline,
    ByLayer,
    Float8,
    Int,
    IntGroups,
    IntOutliers,
    LearnedVQ,
    RandomVQ,
    Rotated,
    Spherical,
    Stored,
)
from .faithful import Codec, Method

HELPERS = {"window": 64, "block": 64, "sinks": 4}  # of our recipe, for any codec


def plain(cls: type[Baseline], **settings: Any) -> Method:
    """Quantised on write, keys and values alike."""
    return Method(cls(**settings), cls(**settings))


def helped(cls: type[Baseline], value: dict[str, Any] | None = None, **settings: Any) -> Method:
    """With block means of the keys, sinks and window."""
    key = cls(**HELPERS, center=True, **settings)
    return Method(key, cls(**HELPERS, **(settings | (value or {}))))


def first_int8(method: Method) -> Method:
    """With the keys of the first layer, centred, in 8-bit integers: where rotations fail."""
    return Method(
        ByLayer(first=Int(width=8, center=True, **HELPERS), rest=method.key), method.value
    )


def kivi(width: int, residual: int = 128, group: int = 32) -> Method:
    """Keys by channel, packed `residual` tokens at a time; the newest `residual` values in 16 bits."""
    key = IntGroups(width=width, group=group, along="tokens", block=residual)
    return Method(key, IntGroups(width=width, group=group, window=residual))


BASELINES: dict[str, Callable[[], Method]] = {
    **{f"int{w}": lambda w=w: plain(Int, width=w) for w in (8, 4, 3, 2)},
    **{f"int{w} groups of 32": lambda w=w: plain(IntGroups, width=w) for w in (4, 3, 2)},
    "int4 groups of 64": lambda: plain(IntGroups, width=4, group=64),
    "int4 + Med3x": lambda: plain(IntOutliers, width=4),
    "int4 + Med3x, helpers": lambda: helped(IntOutliers, width=4),
    "int3 + Med3x, helpers": lambda: helped(IntOutliers, width=3),
    "fp8 e4m3": lambda: plain(Float8),
    "KIVI-4": lambda: kivi(4),
    "KIVI-2": lambda: kivi(2),
    **{f"TurboQuant {w} bit": lambda w=w: plain(Rotated, width=w) for w in (4, 3)},
    "TurboQuant 5 bit, helpers": lambda: helped(Rotated, width=5),
    "TurboQuant 4 bit, helpers": lambda: helped(Rotated, width=4),
    "TurboQuant K4 V3, helpers": lambda: helped(Rotated, width=4, value={"width": 3}),
    "TurboQuant 4 bit, helpers, layer 0 int8": lambda: first_int8(helped(Rotated, width=4)),
    "TurboQuant K4 V3, helpers, layer 0 int8": lambda: first_int8(
        helped(Rotated, width=4, value={"width": 3})
    ),
    "TurboQuant 3 bit, helpers, layer 0 int8": lambda: first_int8(helped(Rotated, width=3)),
    "TurboQuant 3 bit, helpers": lambda: helped(Rotated, width=3),
    "random VQ 10+4": lambda: plain(RandomVQ),
    "random VQ 10+4, helpers": lambda: helped(RandomVQ),
    "spherical 12+4": lambda: plain(Spherical),
    "spherical 12+4, helpers": lambda: helped(Spherical),
    "learned VQ 10": lambda: plain(LearnedVQ),
    "learned VQ 10, helpers": lambda: helped(LearnedVQ),
    "additive VQ 5+5": lambda: plain(AdditiveVQ),
    "additive VQ 5+5, helpers": lambda: helped(AdditiveVQ),
    "16 bit": lambda: Method(Codec(), Codec()),
}


# transformers' own caches: arguments of `QuantizedCache`. Steps and zero points: 32 bits for 64 elements.
CACHES: dict[str, dict[str, Any]] = {
    "QuantizedCache fp8": {"backend": "fp8"},
    "QuantizedCache quanto 4": {"backend": "quanto", "nbits": 4},
    "QuantizedCache quanto 2": {"backend": "quanto", "nbits": 2},
    "QuantizedCache hqq 4": {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
}


def _stored(nbits: int = 8, **settings: Any) -> Method:
    groups = nbits < 8  # which keep up to 128 tokens in 16 bits
    codec = Stored(width=nbits + 32 / 64 * groups, block=128 if groups else 1)
    return Method(codec, codec)


BASELINES |= {name: lambda s=settings: _stored(**s) for name, settings in CACHES.items()}


def _recipe(**changes: Any) -> str:
    return f"4bit{json.dumps(changes)}" if changes else "4bit"


def _codes(key: tuple[int, int], value: tuple[int, int], **med3x: Any) -> str:
    # "12+4" and so on: index bits and radius bits.
    fields = {
        role: {"secondary": 2 ** (index - 3) // 3, "radius_bits": radius}
        for role, (index, radius) in (("key", key), ("value", value))
    }
    return _recipe(**fields, **({"med3x": med3x} if med3x else {}))


# What of the recipe pays: each differs from the default in one thing.
RECIPE = (
    _recipe(),
    _recipe(block=32),
    _recipe(block=128),
    _recipe(center="none"),
    _recipe(med3x=None),
    _recipe(med3x=None, rotate=True),
    _recipe(med3x={"roles": ["key", "value"], "pool": 0.0625}),
    _recipe(med3x={"pool": 0.09375}),
    _recipe(med3x={"pool": 0.0625}),
    _recipe(med3x={"pool": 0.03125}),
    _recipe(med3x={"multiplier": 4.0, "pool": 0.0625}),
    _recipe(med3x={"multiplier": 2.5}),
    _recipe(med3x={"outliers": "16bit"}),
    _recipe(window=32),
    _recipe(window=128),
    _recipe(sink_tokens=0),
    _recipe(sink_tokens=16),
)
# Bits of keys and of values.
SPLITS = (
    _codes((12, 4), (8, 3)),
    _codes((12, 3), (10, 3)),
    _codes((11, 4), (10, 3)),
    _codes((11, 3), (10, 3)),
    _codes((10, 4), (10, 3)),
    _codes((10, 3), (10, 3)),
    _codes((10, 3), (9, 3)),
    _codes((10, 3), (8, 3)),
    _codes((10, 3), (8, 2)),
    _codes((9, 3), (8, 3)),
    _codes((12, 4), (11, 3)),
    _codes((12, 4), (11, 4)),
    _codes((12, 4), (12, 3)),
    _codes((13, 4), (12, 3)),
)


def _budget(key: tuple[int, int], value: tuple[int, int], pool: float = 0) -> dict[str, Any]:
    codec = {
        role: {"secondary": 2 ** (index - 3) // 3, "radius_bits": radius}
        for role, (index, radius) in (("key", key), ("value", value))
    }
    # The first layer's keys (Qwen's reach 200) are not for a rotation: outliers, more radius levels.
    wide = {"secondary": max(170, codec["key"]["secondary"]), "radius_bits": 6}
    first = {"key": wide, "med3x": {"pool": 0.125}, "rotate": False}
    others = {"med3x": {"pool": pool}} if pool else {"med3x": None, "rotate": True}
    return {**codec, **others, "layers": {0: first}}


# Stored bits at exactly 4,096 tokens. Chosen on `jargon`, a text that is not in `quality.TEXTS`.
BUDGETS: dict[str, dict[str, Any]] = {
    "3.4 bits": _budget((10, 3), (8, 2)),
    "4.0 bits": _budget((12, 4), (9, 3)),
    "4.6 bits": _budget((13, 4), (12, 4)),
    "5.1 bits": _budget((13, 5), (13, 5), pool=1 / 32),
}
MAIN = ("3bit", "4bit", "5bit")
PAPER = ("s24_r3", "s48_r4", "s96_r4", "s192_r4", "s96_r6", "s192_r6")
SETS: dict[str, tuple[str, ...]] = {
    "presets": (*MAIN, "paper"),
    "baselines": tuple(BASELINES),
    "papers": PAPER,
    "recipe": RECIPE,
    "splits": SPLITS,
}
SETS["budgets"] = tuple(BUDGETS)
SETS["caches"] = tuple(CACHES)
SETS["all"] = (*SETS["presets"], *SETS["baselines"])


def named(names: list[str]) -> list[str]:
    """Sets replaced by their cases, each once."""
    return list(dict.fromkeys(case for name in names for case in SETS.get(name, (name,))))


def config(case: str) -> HQMQConfig | None:
    """The config of a case that is one of ours, else None.

    Raises:
        ValueError: a config that cannot be, or a case that is nothing known.
    """
    if case in BASELINES:
        return None
    preset, brace, fields = case.partition("{")
    changes = json.loads(brace + fields) if brace else {}
    if preset in BUDGETS:
        preset, changes = "4bit", BUDGETS[preset] | changes
    base = HQMQConfig.preset(preset)
    for name, change in changes.items():
        old = getattr(base, name, None)
        if isinstance(change, dict) and dataclasses.is_dataclass(old):  # fields of a field
            kept = {f.name: getattr(old, f.name) for f in dataclasses.fields(old)}
            changes[name] = kept | change
    return HQMQConfig.preset(preset, **changes)


def method(case: str) -> Method:
    """The codecs of a case."""
    own = config(case)
    return BASELINES[case]() if own is None else Method.of(own)


def fingerprint(case: str) -> str | None:
    """What a config stores, so that a changed preset is measured anew; None for a baseline."""
    own = config(case)
    if own is None:
        return None
    plain = dataclasses.replace(own, layers={})
    specs = [str(plain.spec(role, 64, "bfloat16")) for role in ("key", "value")]
    layers = {str(n): change for n, change in own.layers.items()}
    return json.dumps([*map(json.loads, specs), own.prefill, layers], sort_keys=True, default=str)


def label(case: str) -> str:
    """A case as tables show it: `4bit, K 10+3, block 128`."""
    if case in BASELINES or "{" not in case:
        return case
    preset, _, fields = case.partition("{")
    return ", ".join([preset, *_described(json.loads("{" + fields), config(case))])


def _described(changes: dict[str, Any], own: HQMQConfig) -> list[str]:
    parts = []
    for name, change in changes.items():
        if name == "layers":
            for layer, fields in change.items():
                inner = "16 bit" if fields is None else own.for_layer(int(layer))
                words = [inner] if fields is None else _described(fields, inner)
                parts.append(f"layer {layer}: " + " ".join(words))
        elif name in ("key", "value"):
            codec = getattr(own, name)
            parts.append(f"{name[0].upper()} {codec.index_bits}+{codec.radius_bits}")
            known = {"secondary", "radius_bits"}
            parts += [f"{k} {v}" for k, v in change.items() if k not in known]
        elif isinstance(change, dict):
            both = "K and V Med3x" if "roles" in change else "Med3x"
            parts.append(" ".join([both, *(f"{k} {v}" for k, v in change.items() if k != "roles")]))
        else:
            parts.append({"med3x": "no Med3x"}.get(name, f"{name} {change}"))
    return parts
