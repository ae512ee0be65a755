"""The walkthrough of examples/ as people run it: SFT, RL from there, evaluation, and a folder that others open."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.run_processes import ASYNC_RL

SCRIPT = ROOT / "examples/walkthrough/walkthrough.sh"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_walkthrough_goes_all_the_way(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{ASYNC_RL.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", SCRIPT, tmp_path], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    taught, rewarded = (json.loads((tmp_path / run / "summary.json").read_text()) for run in ("sft", "rl"))
    assert taught["held_out_last"]["loss"] < 1 < taught["held_out_first"]["loss"]
    assert rewarded["reward_first"] < 0.7 < 0.9 < rewarded["reward_last"]

    from transformers import AutoModelForCausalLM

    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "rl" / "model")
    assert opened.config.vocab_size == 15
