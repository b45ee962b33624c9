"""Importing and installing: the same names everywhere, nothing printed, extras optional."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hqmq_compile.integrations import torchao as torchao_integration

ROOT = Path(__file__).resolve().parents[1]
needs_torchao = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)


def run(code: str, *options: str, cwd: Path = ROOT, **environment: str) -> str:
    """Runs `code` in a fresh interpreter; returns what it printed, on both streams."""
    env = os.environ | {"PYTHONPATH": ""} | environment
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


# -- import -----------------------------------------------------------------
def test_import_prints_nothing_loads_no_extra_and_gives_the_names():
    output = run(
        "import sys, hqmq_compile as h\n"
        "extras = {'transformers', 'torchao', 'triton', 'gguf', 'torch._dynamo'}\n"
        "assert not extras & set(sys.modules), extras & set(sys.modules)\n"
        "assert all(hasattr(h, name) for name in h.__all__)\n"
        "assert set(h.__all__) <= set(dir(h))\n"
        "assert h.HQMQConfig().kernel is h.KernelPreference.AUTO\n"
        "try: h.HQMQTensors\n"
        "except AttributeError as error: assert 'HQMQTensors' in str(error)\n"
        "else: raise AssertionError('no error')\n"
        # explain is the function, also after its module has been imported
        "import hqmq_compile.explain\n"
        "from hqmq_compile.explain import Report\n"
        "assert h.explain.__name__ == 'explain' and callable(h.explain)"
    )
    assert output == ""


def test_import_costs_little_beyond_torch():
    for _ in range(5):  # a busy machine may need more than one try
        output = run(
            "import time, torch\n"
            "start = time.perf_counter()\n"
            "import hqmq_compile\n"
            "print(time.perf_counter() - start)"
        )
        if float(output) < 0.3:
            return
    pytest.fail(f"importing hqmq_compile takes {float(output):.2f} s more than torch")


def test_works_without_extras(tmp_path):
    """Config and codec work where no extra can be imported."""
    for name in ("transformers", "torchao", "triton", "gguf", "numpy"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('no {name}', name='{name}')"
        )
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
        for name in re.findall(
            r"^\s*(?:from|import)\s+(hqmq_compile[\w.]*)", path.read_text(), re.M
        ):
            assert name.startswith("hqmq_compile.codec"), f"{path}: {name}"


# -- installations -----------------------------------------------------------------
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
    import hqmq_compile
    from hqmq_compile.passes import normalize

    assert Path(hqmq_compile.__file__).parent == ROOT / "hqmq_compile"
    assert Path(normalize.__file__).parent == ROOT / "passes"


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
    # An interpreter without site-packages (-S) gets these, and the .pth file of an editable install
    # is run as it is there; other packages come from here, without their .pth files.
    prologue = (
        "import sys, site\n"
        "sys.path[:] = [path for path in sys.path if path]\n"
        f"site.addsitedir({str(site)!r})\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
    )
    package, passes = run(prologue + CHECK, "-S", cwd=tmp_path).split()
    expected = site / "hqmq_compile" if how == "installed" else source / "hqmq_compile"
    assert Path(package) == expected
    assert Path(passes) == (expected / "passes" if how == "installed" else source / "passes")
    entry_points = run(
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from importlib.metadata import entry_points\n"
        "print(*(e.value for e in entry_points(group='torch_dynamo_backends', name='hqmq')))",
        "-S",
        cwd=tmp_path,
    )
    assert entry_points.strip() == "hqmq_compile.backend:hqmq"
    if how == "editable":
        return
    # In a checkout (`python -m pytest`), its package is found first, and with it its folders.
    package, passes = run(
        prologue + f"sys.path.insert(0, {str(ROOT)!r})\n" + CHECK, "-S", cwd=ROOT
    ).split()
    assert Path(package).parent == Path(passes).parent == ROOT


def _copy_checkout(target: Path) -> None:
    target.mkdir()
    for name in ("hqmq_compile", "passes", "kernels"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, target / name)


# -- torchao -----------------------------------------------------------------
TORCHAO = {
    "torchao first": "import torchao\nfrom hqmq_compile import HQMQConfig\nconfig = HQMQConfig()",
    "hqmq first": "from hqmq_compile import HQMQConfig\nconfig = HQMQConfig()\nimport torchao",
}


IS_A_TORCHAO_CONFIG = """
import json
from torchao.core.config import AOBaseConfig, config_from_dict, config_to_dict

assert isinstance(config, AOBaseConfig) and issubclass(HQMQConfig, AOBaseConfig)
changed = {"kernel": "gluon", "layers": {3: {"key": {"secondary": 21}}, 0: None}, "window": 8}
for name in HQMQConfig.presets():
    for change in ({}, changed, {"med3x": None}):
        one = HQMQConfig.preset(name, **change)
        data = config_to_dict(one)
        assert data == one.to_dict() == json.loads(one.to_json())
        again = config_from_dict(json.loads(json.dumps(data)))
        assert again == one and type(again) is HQMQConfig, (again, one)
"""

QUANTIZE_COMPILES_THE_MODEL_ONCE = """
import torch, hqmq_compile.backend
from torchao.quantization import quantize_

calls = []

class Model(torch.nn.Module):
    def __init__(self, part=None):
        super().__init__()
        self.part, self.a, self.b = part, torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def compile(self, **kwargs):
        calls.append((self, kwargs))

model = Model(Model())
weight = model.a.weight
quantize_(model, config)
((target, kwargs),) = calls
assert target is model and model.a.weight is weight
assert kwargs == {"backend": hqmq_compile.backend.hqmq, "options": {"config": config}}
quantize_(model, config)
assert len(calls) == 1
quantize_(model, HQMQConfig.preset("3bit"))
assert len(calls) == 2
quantize_(model, config, lambda module, name: name == "part")
assert calls[-1][0] is model.part and len(calls) == 3
"""


@needs_torchao
@pytest.mark.parametrize("order", TORCHAO)
def test_torchao_knows_the_config(order):
    run("\n".join((TORCHAO[order], IS_A_TORCHAO_CONFIG, QUANTIZE_COMPILES_THE_MODEL_ONCE)))


def test_torchao_is_known_to_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.core.config", None)
    with pytest.raises(ImportError, match="torchao"):
        torchao_integration.register()
