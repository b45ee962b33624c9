"""Where the kernel tests run: on a GPU, or on the CPU under Triton's interpreter.

The interpreter is chosen when Triton is imported, for the whole process, and `kernel="auto"` would
then use it everywhere. So without a GPU these tests run in a process of their own, which
`test_interpreted.py` starts; by hand: `TRITON_INTERPRET=1 pytest tests/kernels`.
"""

import os
from pathlib import Path

import torch

OWN_PROCESS = {"test_interpreted.py", "test_compiles.py"}

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [
        path.name
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name not in OWN_PROCESS
    ]
