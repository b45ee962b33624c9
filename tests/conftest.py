"""Shared by all tests: devices, threads, fresh compilers, time limits, real models.

Real models come from `python -m benchmarks.models fetch NAME`; a test that asks for one that is
not there is skipped, and the summary says which command brings it.
"""

from __future__ import annotations

import os

# Before anything imports transformers or torchao.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "1")
# Compile workers cost more than they save on graphs of test size.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

TIMEOUT = 600  # seconds, for a test that names none


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # more only contend on tensors of test size
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout: needs pytest-timeout, which is not here")
    try:
        import hypothesis
    except ImportError:
        return
    # A busy machine must not fail a test, and a failure must come again.
    hypothesis.settings.register_profile("hqmq", deadline=None, derandomize=True)
    hypothesis.settings.load_profile("hqmq")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo():
    """No graph of another test counts towards recompile limits, before or after."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Every device there is."""
    return request.param


def _real(name: str):
    pytest.importorskip("transformers")
    from benchmarks.models import NotFetched, load

    try:
        return load(name)
    except NotFetched as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct in float32 on the CPU, and its tokenizer. Shared: do not change it."""
    return _real("smollm2")


@pytest.fixture(scope="session")
def qwen():
    """Qwen2.5-Coder-0.5B-Instruct in float32 on the CPU, and its tokenizer. Shared likewise."""
    if os.environ.get("CI") and not os.environ.get("HQMQ_ALL_MODELS"):
        pytest.skip("takes minutes: set HQMQ_ALL_MODELS=1 to run it in CI")
    return _real("qwen2.5-coder")


@pytest.fixture(scope="session")
def gemma():
    """Gemma 3 270M in float32 on the CPU, and its tokenizer. Shared likewise."""
    return _real("gemma3-270m")
