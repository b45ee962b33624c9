"""The kernels compile for GPUs that are not here; needs Triton and its assembler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

KERNELS = {
    "attend_kernel",
    "commit_kernel",
    "dequantize_kernel",
    "encode_kernel",
    "pack_kernel",
    "reduce_kernel",
}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the other tests compile for this GPU")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled here")
def test_kernels_compile(capability, tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_for", str(capability)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert set(done.stdout.split()[1:]) == KERNELS
