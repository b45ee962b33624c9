"""The cases of the evaluation by name: presets, other recipes, baselines.

A case is one of `CASES`, or a preset with changed fields, as in `4bit{"block": 128}`.
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
    Float8,
    Int,
    IntGroups,
    IntOutliers,
    LearnedVQ,
    RandomVQ,
    Rotated,
    Spherical,
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
MAIN = ("3bit", "4bit", "5bit")
PAPER = ("s24_r3", "s48_r4", "s96_r4", "s192_r4", "s96_r6", "s192_r6")
SETS: dict[str, tuple[str, ...]] = {
    "presets": (*MAIN, "paper"),
    "baselines": tuple(BASELINES),
    "paper": PAPER,
}
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
