"""Load on the other core. Cores share memory and caches, so a role alone on a machine is faster than beside another one; this
slow-down is not caused by how the roles are overlapped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_BUSY_LOOP = """
import torch
torch.set_num_threads(1)
rows, up, down = torch.randn(2048, 128), torch.randn(128, 1024), torch.randn(1024, 128)
print("begun", flush=True)
while True:
    rows = torch.nn.functional.layer_norm(rows + torch.relu(rows @ up) @ down, (128,))
"""
"""Matrices have the sizes of the demo's model."""


@contextmanager
def busy_neighbour() -> Iterator[None]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    neighbour = subprocess.Popen([sys.executable, "-c", _BUSY_LOOP], env=environment, stdout=subprocess.PIPE)
    try:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        yield
    finally:
        neighbour.kill()
        neighbour.communicate()
