"""Whole runs whose rollouts come from another engine than Megatron's."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl.telemetry import read_rows
from tests.support.repository import ROOT
from tests.support.run_processes import audit, finished, program, read_config, write_config

PLAIN = f"{ROOT}/examples/own_engine/engine.py:PlainEngine"


@pytest.mark.parametrize("backend", [pytest.param("hf", id="hf"), pytest.param(PLAIN, id="own", marks=pytest.mark.slow)])
def test_what_another_engine_samples_is_what_the_learner_computes(tmp_path: Path, backend: str) -> None:
    """At age 0 the learner's log-probabilities are those of the version that sampled: weights arrived, and exactly so."""
    path = write_config(
        tmp_path,
        "other",
        model={"size": {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2}},
        staleness={"max_age": 0},
        learner={"steps": 8, "optimizer": {"learning_rate": 0.01}},
        worker={"backend": backend},
    )
    with program(tmp_path, "run", "@", path) as run:
        assert run.exit_code() == 0, run.output
    config = read_config(path)
    assert audit(path)["clean"]
    rows = [row.values for row in read_rows(config.run_folder / "metrics.jsonl") if "policy/tokens" in row.values]
    assert len(rows) == config.learner.steps
    assert max(row["policy/logprob_abs_diff_max"] for row in rows) < 1e-4
    assert sum(row["policy/tokens"] for row in rows) > 8 * 4


def test_a_backend_that_cannot_be_made_is_one_sentence_before_anything_is_connected(tmp_path: Path) -> None:
    path = write_config(tmp_path, "wrong", worker={"backend": f"{PLAIN}s"}, redis={"url": "redis://127.0.0.1:1"})
    done = finished(tmp_path, "worker", "@", path)
    assert done.returncode == 2
    assert "engine.py has no 'PlainEngines' (did you mean 'PlainEngine'?)" in done.stderr
    assert "Traceback" not in done.stderr
