"""The shipped codebooks are the output of the script, as good as they should be, and intact."""

import hashlib
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from hqmq_compile.codec import codebook
from hqmq_compile.codec.quaternion import norm

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_codebooks.py"

# size: (SHA-256 of the file, mean sin² of the angle to the nearest codeword)
SHIPPED = {
    5: ("fea5b2b1e729a0b0573a9c170fdcb2e2cd44ae86074336861353b010260b92d6", 0.06901),
    10: ("b7faa7d03dfa8c55b1e61b448e5d662cbd29d1def43ec6bd4e4d3ee0497dcdf4", 0.04527),
    21: ("c22a35e85c318525c38fde40eb438a50586645aee5eb4427420b0a2695528ead", 0.02737),
    42: ("e4b4d5978218d5311b1e789ca5a39cd699545c6254209f02218b11044ec0d301", 0.01717),
    85: ("35e719f15993adddefb37f250037013b86e3722e7d4565eac0862f46680bb967", 0.01081),
    170: ("c673e18472831363bf6ddf5c951c33a31559aa06689296a85a23acc083576035", 0.006804),
    341: ("072bf24b9c336b32a223a7098c13aa120721b2009457702da05eeadd3160ea93", 0.004289),
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_codebooks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("size", codebook.UNIVERSAL_SIZES)
def test_shipped_file(size):
    sha, error = SHIPPED[size]
    data = (codebook._FOLDER / f"universal_{size}.bin").read_bytes()
    assert hashlib.sha256(data).hexdigest() == sha
    book = codebook.load_universal(size)
    torch.testing.assert_close(norm(book), torch.ones(size))
    units = codebook.random_units(20_000, torch.Generator().manual_seed(1)).float()
    assert codebook.direction_error(units, book) == pytest.approx(error, rel=0.015)


@pytest.mark.parametrize("size", [42, 170])
def test_universal_beats_haar_by_a_decibel(size):
    units = codebook.random_units(20_000, torch.Generator().manual_seed(1)).float()
    haar = codebook.direction_error(units, codebook.secondary("haar", size))
    assert haar > 1.26 * SHIPPED[size][1]


@pytest.mark.parametrize(
    "size, sha",
    [
        (5, "71ce8f17f1e6b36e98cf88e5c9f68ef7cb8b3a81890998c5ca7c2787876aa116"),
        (10, "9e74503cd979d8f62100a8b1c9a7a02340b6c8780ff6b5ae49b29e5d0d8c4a0c"),
    ],
)
def test_training_is_reproducible_to_the_bit(script, tmp_path, size, sha):
    book = script.train(size, starts=2, iterations=8, samples=2000)
    path, digest = script.write(book, tmp_path)
    assert digest == sha
    assert path.name == f"universal_{size}.bin" and path.stat().st_size == 16 * size


def test_command_line(script, tmp_path, monkeypatch, capsys):
    args = ["--sizes", "3", "--starts", "1", "--iterations", "4", "--samples", "500", "--out"]
    monkeypatch.setattr(sys, "argv", ["make_codebooks.py", *args, str(tmp_path)])
    threads = torch.get_num_threads()
    script.main()
    torch.set_num_threads(threads)
    assert capsys.readouterr().out.startswith("S=3 sin2=0.")
    assert (tmp_path / "universal_3.bin").stat().st_size == 48
