"""torch.compile(model, backend="hqmq"): generation with the KV cache packed in HQMQ.

Importing this costs little beyond torch, and changes nothing global but for a hook that makes
`HQMQConfig` known to torchao once torchao is imported.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hqmq_compile.config import CodecConfig, HQMQConfig, KernelPreference, Med3xConfig

# Imported here and not on first use: from then on the name is the function, not the module.
from hqmq_compile.explain import explain
from hqmq_compile.integrations.torchao import register_on_import as _register_on_import

if TYPE_CHECKING:
    from hqmq_compile.cache.tensor import HQMQTensor

__version__ = "0.1.0"

__all__ = [
    "CodecConfig",
    "HQMQConfig",
    "HQMQTensor",
    "KernelPreference",
    "Med3xConfig",
    "__version__",
    "explain",
]

# `passes` and `kernels` stand beside this folder in a checkout and inside it once installed.
_FOLDER = Path(__file__).resolve().parent
if not (_FOLDER / "passes").is_dir():
    __path__.append(str(_FOLDER.parent))

_LAZY = {
    "HQMQTensor": "hqmq_compile.cache.tensor",
    "hqmq": "hqmq_compile.backend",
    "unadopt": "hqmq_compile.cache.adopt",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'hqmq_compile' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_register_on_import()
