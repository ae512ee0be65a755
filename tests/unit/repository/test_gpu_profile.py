"""gpu_profile.py without a GPU: what it is asked for and cannot do is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.repository import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["train:8192"], "'train:8192' is neither decode:BATCH:CONTEXT nor train:ROW:SEQUENCES:RECOMPUTE"),
        (["train:8192:4:none", "decode:64:512"], "torch sees no GPU"),
    ],
)
def test_it_says_what_it_cannot_profile(asked: list[str], said: str) -> None:
    command = [sys.executable, "-W", "error", "benchmarks/gpu_profile.py", *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
