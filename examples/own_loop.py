"""A generation loop of one's own, with a static cache that is packed from the first token on.

    python examples/own_loop.py [model folder or hub id]

The prefill is compiled too, so no 16-bit cache is ever allocated.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache

import hqmq_compile


@torch.no_grad()
def main(name: str = "HuggingFaceTB/SmolLM2-135M-Instruct", steps: int = 40) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name).eval()
    model.compile(backend="hqmq", options={"preset": "4bit"})

    ids = tokenizer("The folder names are the map:", return_tensors="pt").input_ids
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + steps)
    tokens, text = ids, []
    for _ in range(steps):
        logits = model(tokens, past_key_values=cache).logits
        tokens = logits[:, -1:].argmax(-1)
        text.append(tokens.item())
    print(tokenizer.decode(text))

    keys = cache.layers[0].keys
    print(type(keys).__name__, tuple(keys.shape), f"{keys.bits_per_element:.2f} bits an element")
    print(hqmq_compile.explain(model))


if __name__ == "__main__":
    main(*sys.argv[1:2])
