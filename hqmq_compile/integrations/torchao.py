"""torchao: `HQMQConfig` as an `AOBaseConfig`, and `quantize_(model, HQMQConfig())`.

Importing torchao takes seconds and prints, so it is never imported here. Instead the registration
runs when the user's own import of torchao happens, before or after that of hqmq_compile. From
then on `isinstance(HQMQConfig(), AOBaseConfig)`, also for configs made earlier (it is a virtual
subclass), torchao's `config_to_dict` and `config_from_dict` know it, and so does `quantize_`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import FrameType, ModuleType

import torch

from hqmq_compile.config import HQMQConfig

# The last module of torchao that the registration needs; `import torchao` imports it.
_TARGET = "torchao.quantization.transform_module"


def register() -> None:
    """Makes `HQMQConfig` known to torchao, importing it if need be. Repeating it is harmless.

    Raises:
        ImportError: torchao is not installed (`pip install "hqmq-compile[torchao]"`).
    """
    from torchao.core.config import ALLOWED_AO_MODULES, AOBaseConfig
    from torchao.quantization.transform_module import register_quantize_module_handler

    AOBaseConfig.register(HQMQConfig)
    ALLOWED_AO_MODULES.add("hqmq_compile.config")
    register_quantize_module_handler(HQMQConfig)(compile_module)


def register_on_import() -> None:
    """Runs `register` now if torchao is imported, else as soon as it is."""
    if _TARGET in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds `_TARGET` as everyone does, and runs `register` after it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: importlib.abc.Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            register()

        loader.exec_module = exec_module


def compile_module(module: torch.nn.Module, config: HQMQConfig) -> torch.nn.Module:
    """What `quantize_` does for each module its filter selects: `module.compile(backend="hqmq")`.

    A KV cache belongs to the model, not to a weight, but the default filter of `quantize_` selects
    the linear layers and hands over nothing else. So a linear layer stands for the model given
    to `quantize_`, which is compiled once; any other module a filter selects is compiled itself.

    Args:
        module: selected by the filter.
        config: given to `quantize_`.

    Returns:
        `module`, unchanged as an object.
    """
    target = module
    if isinstance(module, torch.nn.Linear):
        target = _model_of_caller(sys._getframe(1)) or module
    if target.__dict__.get("_hqmq_config") is not config:
        from hqmq_compile.backend import hqmq

        target.compile(backend=hqmq, options={"config": config})
        target.__dict__["_hqmq_config"] = config
    return module


def _model_of_caller(frame: FrameType | None) -> torch.nn.Module | None:
    """The model of the `quantize_` call on the stack; torchao passes it to no handler."""
    while frame is not None:
        if frame.f_code.co_name == "quantize_":
            model = frame.f_locals.get("model")
            return model if isinstance(model, torch.nn.Module) else None
        frame = frame.f_back
    return None
