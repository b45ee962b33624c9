"""Named recipes, as the fields in which they differ from the default `HQMQConfig()`."""

from __future__ import annotations

from typing import Any


def _paper(secondary: int, radius_bits: int) -> dict[str, Any]:
    """arXiv 2605.27646: nothing but the code, Med3x on keys and values, quantized on write."""
    codec = {
        "secondary": secondary,
        "radius_bits": radius_bits,
        "codebook": "haar",
        "scale": "float16",
        "least_squares": False,
        "zero_level": True,
    }
    return {
        "key": codec,
        "value": codec,
        "med3x": {
            "multiplier": 3.0,
            "scope": "batch",
            "roles": ["key", "value"],
            "outliers": "16bit",
            "flag": "bit",
            # The paper stores any number of outliers; a quarter of the chunks is room that real
            # keys (5 to 10 % outliers) do not fill.
            "pool": 0.25,
        },
        "center": "none",
        "sink_tokens": 0,
        "window": 0,
        "prefill": "stored",
    }


# By stored bits; then the paper's, by its own names.
PRESETS: dict[str, dict[str, Any]] = {
    "4bit": {},  # keys 12+4, values 10+3: index bits + radius bits for four elements
    "3bit": {  # keys 10+3, values 8+3
        "key": {"secondary": 42, "radius_bits": 3},
        "value": {"secondary": 10, "radius_bits": 3},
    },
    "5bit": {"value": {"secondary": 170, "radius_bits": 4}},  # keys and values 12+4
    "paper": _paper(96, 4),
    "s24_r3": _paper(24, 3),
    "s48_r4": _paper(48, 4),
    "s96_r4": _paper(96, 4),
    "s192_r4": _paper(192, 4),
    "s96_r6": _paper(96, 6),
    "s192_r6": _paper(192, 6),
}
