"""`config check` finds what would end a run later, says what it could not check, and begins nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from async_rl.cli.main import dispatch
from async_rl.errors import ConfigError
from async_rl.models.hf_config import written_config
from async_rl.models.shape import ModelShape
from tests.support.run_processes import finished, read_config, write_config

SHAPE = ModelShape(
    hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, ffn=3072, vocab_size=151936, max_positions=40960,
    rope_theta=1e6, qk_norm=True,
)  # fmt: skip
"""Qwen3-0.6B."""


def test_a_run_that_would_start_is_all_right(tmp_path: Path) -> None:
    path = write_config(tmp_path, "fine")
    done = finished(tmp_path, "config", "check", "@", path, "--gpus", "2x24")
    assert done.returncode == 0, done.stdout + done.stderr
    for expected in (
        "ok           learner.objective: async_default",
        "ok           learner.parallel: a single rank",
        "ok           memory, GPU of the learner: ",
        "ok           tokenizer: 15 tokens",
        "ok           environment 'Paced': its first prompt has 9 tokens",
        "ok           worker.kv_cache_gb: 0.25 GB hold a sequence of 512 tokens",
        "ok: at most",
    ):
        assert expected in done.stdout, done.stdout
    assert not read_config(path).run_folder.exists(), "nothing is begun"


def test_all_that_would_end_a_run_later_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(written_config(SHAPE, dtype="bfloat16")))
    path = write_config(
        tmp_path,
        "wrong",
        learner={"objective": "ppo", "parallel": {"tensor": 3}},
        worker={"tensor": 3},
        evaluation={"every": 1},
    )
    given = ["--model.size", "null", "--model.folder", tmp_path / "model", "--device", "auto"]
    missing = ["--environments", json.dumps([{"type": "counting"}, {"type": "dataset", "args": {"path": "rows.jsonl"}}])]
    done = finished(tmp_path, "config", "check", "@", path, *given, *missing, "--gpus", "1x24")
    assert done.returncode == ConfigError.exit_code
    wrong = [line for line in done.stdout.splitlines() if line.startswith("wrong")]
    for expected in (
        "learner.objective: ppo needs a critic",
        "learner.parallel.tensor (3) must divide the model's kv_heads (8)",
        "worker.tensor (3) must divide the model's kv_heads (8)",
        "rows.jsonl",
    ):
        assert any(expected in line for line in wrong), done.stdout
    assert f"{len(wrong)} things are wrong, see above" in done.stderr
    assert "Traceback" not in done.stdout + done.stderr

    alone = ["--learner.objective", "grpo", "--learner.parallel.tensor", "1", "--worker.tensor", "1"]
    done = finished(tmp_path, "config", "check", "@", path, *given, *alone, "--gpus", "1x8")
    assert "one sequence of 40960 tokens needs" in done.stdout
    assert "GPU 0 has 8 GB, and the learner and worker 0" in done.stdout
    assert "not checked  learner.precision" in done.stdout, "this machine has no GPU"

    fits = [*alone, "--model.max_sequence", "2048", "--worker.kv_cache_gb", "4"]
    done = finished(tmp_path, "config", "check", "@", path, *given, *fits, "--gpus", "1x80")
    assert done.returncode == 0, done.stdout


def test_gpus_that_cannot_be_read_are_refused_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as in 8x80"):
        dispatch(["config", "check", "@", str(write_config(tmp_path, "gpus")), "--gpus", "many"])
