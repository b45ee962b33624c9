"""Importing and installing: the same names everywhere, nothing printed, extras optional."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def run(code: str, *, cwd: Path = ROOT, python: str = sys.executable, **environment: str) -> str:
    """Runs `code` in a fresh interpreter; returns what it printed, of both streams."""
    env = os.environ | {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"} | environment
    done = subprocess.run(
        [python, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


# -- import ----------------------------------------------------------------------------------------
def test_import_prints_nothing_and_loads_no_extra():
    output = run(
        "import sys, hqmq_compile\n"
        "extras = {'transformers', 'torchao', 'triton', 'gguf', 'numpy.testing', 'torch._dynamo',"
        " 'torch._inductor'}\n"
        "loaded = extras & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    assert output == ""


def test_import_costs_little_beyond_torch():
    times = []
    for _ in range(3):  # the fastest of three: the machine may be busy
        output = run(
            "import time, torch\n"
            "start = time.perf_counter()\n"
            "import hqmq_compile\n"
            "print(time.perf_counter() - start)"
        )
        times.append(float(output))
    assert min(times) < 0.3, times


def test_public_names():
    run(
        "import hqmq_compile as h\n"
        "assert all(hasattr(h, name) for name in h.__all__)\n"
        "assert set(h.__all__) <= set(dir(h))\n"
        "assert h.HQMQConfig().kernel is h.KernelPreference.AUTO\n"
        "try: h.HQMQTensors\n"
        "except AttributeError as error: assert 'HQMQTensors' in str(error)\n"
        "else: raise AssertionError('no error')"
    )


def test_explain_is_the_function_even_after_importing_its_module():
    run(
        "import hqmq_compile.explain\n"
        "from hqmq_compile.explain import Report\n"
        "import hqmq_compile\n"
        "assert callable(hqmq_compile.explain)\n"
        "from hqmq_compile import explain\n"
        "assert explain is hqmq_compile.explain"
    )


def test_works_without_extras(tmp_path):
    """Config and codec work where no extra can be imported."""
    for name in ("transformers", "torchao", "triton", "gguf", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name}', name='{name}')")
    output = run(
        "import torch, hqmq_compile as h\n"
        "assert h.HQMQConfig.from_json(h.HQMQConfig().to_json()) == h.HQMQConfig()\n"
        "from hqmq_compile.codec import codebook\n"
        "assert codebook.load_universal(170).shape == (170, 4)\n"
        "h.HQMQTensor",
        PYTHONPATH=os.pathsep.join((str(tmp_path), str(ROOT))),
        PYTHONWARNINGS="ignore",
    )
    assert output == ""


def test_nothing_imports_the_folders_at_top_level():
    for path in ROOT.glob("**/*.py"):
        if {".venv", "build", ".scratch"} & set(path.relative_to(ROOT).parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names.append(node.module or "")
            for name in names:
                assert name.split(".")[0] not in ("passes", "kernels"), f"{path}: {name}"


def test_codec_imports_nothing_of_ours():
    for path in (ROOT / "hqmq_compile" / "codec").glob("*.py"):
        for name in re.findall(r"^\s*(?:from|import)\s+(hqmq_compile[\w.]*)", path.read_text(), re.M):
            assert name.startswith("hqmq_compile.codec"), f"{path}: {name}"


# -- installations -----------------------------------------------------------------------------------
CHECK = (
    "import hqmq_compile, pathlib\n"
    "import hqmq_compile.passes, hqmq_compile.kernels, hqmq_compile.integrations\n"
    "from hqmq_compile.passes import normalize\n"
    "from hqmq_compile.codec.codebook import UNIVERSAL_SIZES, load_universal\n"
    "assert all(len(load_universal(size)) == size for size in UNIVERSAL_SIZES)\n"
    "print(pathlib.Path(hqmq_compile.__file__).parent)\n"
    "print(pathlib.Path(normalize.__file__).parent)\n"
)


def test_checkout_imports_its_own_folders():
    package, passes = run(CHECK).split()
    assert Path(package) == ROOT / "hqmq_compile"
    assert Path(passes) == ROOT / "passes"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["installed", "editable"])
def test_installation_imports_alike(how, tmp_path):
    """In a bare environment that borrows this one's torch; in the checkout and outside it."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        pytest.skip("needs pip")
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("needs setuptools, so as not to download it")
    site = tmp_path / "site"
    source = tmp_path / "source"
    _copy_checkout(source)
    options = ["--no-deps", "--no-build-isolation", "--no-compile", "-q", "--target", str(site)]
    arguments = ["--editable", str(source)] if how == "editable" else [str(source)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, *arguments],
        check=True,
        capture_output=True,
        timeout=300,
    )
    if how == "installed":
        assert (site / "hqmq_compile" / "passes" / "normalize.py").is_file()
    # site.addsitedir runs the .pth file of an editable install, as a real site-packages does.
    prologue = (
        "import sys, site\n"
        "sys.path[:] = [p for p in sys.path if p != '']\n"
        f"sys.meta_path[:] = [m for m in sys.meta_path if 'editable' not in repr(m)]\n"
        f"site.addsitedir({str(site)!r}); sys.path.insert(0, {str(site)!r})\n"
    )
    package, passes = run(prologue + CHECK, cwd=tmp_path).split()
    expected = site / "hqmq_compile" if how == "installed" else source / "hqmq_compile"
    assert Path(package) == expected
    assert Path(passes) == (expected / "passes" if how == "installed" else source / "passes")
    entry_points = run(
        prologue + "from importlib.metadata import entry_points\n"
        "print([e.value for e in entry_points(group='torch_dynamo_backends', name='hqmq')][0])",
        cwd=tmp_path,
    )
    assert entry_points.strip() == "hqmq_compile.backend:hqmq"
    # In the checkout, the checkout wins, and its folders are found.
    package, passes = run("import sys; sys.path.insert(0, '')\n" + prologue + CHECK, cwd=ROOT).split()


def _copy_checkout(target: Path) -> None:
    import shutil

    target.mkdir()
    for name in ("hqmq_compile", "passes", "kernels"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)


# -- torchao -----------------------------------------------------------------------------------------
TORCHAO = {
    "torchao first": "import torchao\nfrom hqmq_compile import HQMQConfig\nconfig = HQMQConfig()",
    "hqmq first": "from hqmq_compile import HQMQConfig\nconfig = HQMQConfig()\nimport torchao",
}


@needs_torchao
@pytest.mark.parametrize("order", TORCHAO)
def test_config_is_a_torchao_config(order):
    run(
        TORCHAO[order] + "\n"
        "from torchao.core.config import AOBaseConfig, config_from_dict, config_to_dict\n"
        "import json\n"
        "assert isinstance(config, AOBaseConfig) and issubclass(HQMQConfig, AOBaseConfig)\n"
        "for name in HQMQConfig.presets():\n"
        "    for change in ({}, {'kernel': 'gluon', 'layers': {3: {'key': {'secondary': 21}},\n"
        "                        0: None}, 'window': 8}, {'med3x': None}):\n"
        "        config = HQMQConfig.preset(name, **change)\n"
        "        data = config_to_dict(config)\n"
        "        assert data == config.to_dict() == json.loads(config.to_json())\n"
        "        again = config_from_dict(json.loads(json.dumps(data)))\n"
        "        assert again == config and type(again) is HQMQConfig, (again, config)\n"
    )


@needs_torchao
@pytest.mark.parametrize("order", TORCHAO)
def test_quantize_compiles_the_model_once(order):
    run(
        TORCHAO[order] + "\n"
        "import torch\n"
        "from torchao.quantization import quantize_\n"
        "import hqmq_compile.backend\n"
        "calls = []\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, part=None):\n"
        "        super().__init__()\n"
        "        self.part, self.a, self.b = part, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "    def compile(self, **kwargs): calls.append((self, kwargs))\n"
        "model = Model(Model())\n"
        "weight = model.a.weight\n"
        "quantize_(model, config)\n"
        "(target, kwargs), = calls\n"
        "assert target is model and model.a.weight is weight\n"
        "assert kwargs == {'backend': hqmq_compile.backend.hqmq, 'options': {'config': config}}\n"
        "quantize_(model, config)\n"
        "assert len(calls) == 1\n"
        "quantize_(model, HQMQConfig.preset('3bit'))\n"
        "assert len(calls) == 2\n"
        "quantize_(model, config, lambda module, name: name == 'part')\n"
        "assert calls[-1][0] is model.part\n"
    )
