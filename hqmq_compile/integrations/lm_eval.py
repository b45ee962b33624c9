"""lm-evaluation-harness: the model `hqmq`, a Hugging Face model with packed caches.

    python -m hqmq_compile.integrations.lm_eval run --model hqmq \
        --model_args pretrained=Qwen/Qwen2.5-0.5B-Instruct,preset=4bit --tasks gsm8k,hellaswag

is `lm_eval run` with one more model (needs `pip install "hqmq-compile[lm-eval]"`); in Python,
`HQMQLM(pretrained="...", preset="3bit")` is an `LM` for `lm_eval.simple_evaluate`. All arguments of the
harness's `hf` model work as well.

The harness scores a choice by one forward pass without a past, in which no cache is read, so that any
cache would score alike. Here such a pass is a session: `chunk` tokens a call, each of which reads all
earlier ones from the packed cache. Generation is `model.generate`, compiled.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from hqmq_compile.config import HQMQConfig


def _config(preset: str, config: HQMQConfig | dict[str, Any] | str | None) -> HQMQConfig:
    if config is None:
        return HQMQConfig.preset(preset)
    if isinstance(config, str) and Path(config).is_file():
        config = Path(config).read_text()
    return HQMQConfig.from_options({"config": config})


@register_model("hqmq")
class HQMQLM(HFLM):
    """A causal language model, compiled with `backend="hqmq"`.

    Args:
        pretrained: hub id, folder, or a model.
        preset: of `HQMQConfig.preset`.
        config: instead of a preset: an `HQMQConfig`, its fields, JSON, or the path of a JSON file.
        chunk: tokens of one call when a text is scored. At most the window of the config, so that
            every token sees all others as stored once they have left the window.
        kwargs: of `lm_eval.models.huggingface.HFLM`.

    Raises:
        ValueError: a chunk longer than the window, or a model that is not a decoder.
    """

    def __init__(
        self,
        pretrained: Any,
        preset: str = "4bit",
        config: HQMQConfig | dict[str, Any] | str | None = None,
        chunk: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pretrained, **kwargs)
        if self.backend != "causal":
            raise ValueError(f"hqmq scores decoders, and this is a {self.backend} model")
        self.hqmq_config = _config(preset, config)
        window = max(self.hqmq_config.window, 1)
        self.chunk = int(chunk or window)
        if not 1 <= self.chunk <= window:
            raise ValueError(f"chunk is {self.chunk}: it must be from 1 to the window, {window}")
        parameters = inspect.signature(type(self.model).forward).parameters
        self._keyword = "cache" if "cache" in parameters else "past_key_values"
        self.model.forward = torch.compile(
            self.model.forward, backend="hqmq", options={"config": self.hqmq_config}
        )

    def _model_call(self, inps: torch.Tensor, attn_mask=None, labels=None) -> torch.Tensor:
        """Logits `[B, T, V]` of `inps` `[B, T]`, read from a packed cache call by call."""
        from transformers import DynamicCache

        cache = DynamicCache(config=self.model.config)
        parts = []
        with torch.no_grad():
            for part in inps.split(self.chunk, 1):
                parts.append(self.model(input_ids=part, **{self._keyword: cache}).logits)
        return torch.cat(parts, 1)


def main() -> None:
    """The harness's own command line, which now knows `--model hqmq`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
