"""Configs whose windows and blocks are so short that a short text is packed."""

from __future__ import annotations

from hqmq_compile import HQMQConfig, Med3xConfig

ROOMY = Med3xConfig(pool=0.5)  # never full, so that no outlier depends on the order of writes
CONFIGS = {
    "16": HQMQConfig(window=16, block=16),
    "8": HQMQConfig(window=8, block=8, sink_tokens=2),
    "long block": HQMQConfig(window=8, block=32, sink_tokens=0),
    "immediate": HQMQConfig(window=0, block=16, med3x=ROOMY),
    "stored": HQMQConfig(window=8, block=16, prefill="stored"),
    "3bit": HQMQConfig.preset("3bit", window=8, block=16),
    "5bit": HQMQConfig.preset("5bit", window=16, block=8),
    "paper": HQMQConfig.preset("paper", block=16),
    "rotated": HQMQConfig(window=8, block=16, med3x=None, rotate=True),
    "first": HQMQConfig(window=0, block=16, center="first", prefill="stored", med3x=ROOMY),
    "haar": HQMQConfig(
        window=8,
        block=16,
        key={"codebook": "haar", "secondary": 30, "radius_bits": 4},
        value={"codebook": "haar", "secondary": 20, "radius_bits": 3, "scale": "float16"},
        med3x={"roles": ["key", "value"]},
    ),
}
