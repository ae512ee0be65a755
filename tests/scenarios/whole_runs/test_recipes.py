"""Every recipe is checked and rehearsed: with its real sizes in the plan, and with a small model on this CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.config.loading import load_file
from async_rl.errors import ConfigError
from async_rl.models.hf_config import read_shape, written_config
from async_rl.models.shape import Experts, ModelShape
from tests.support.repository import ROOT
from tests.support.run_history import last_step
from tests.support.run_processes import finished

QWEN3 = {"head_dim": 128, "vocab_size": 151936, "max_positions": 40960, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
SHAPES = {
    "Qwen/Qwen3-0.6B": ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, ffn=3072, **QWEN3),
    "Qwen/Qwen3-1.7B": ModelShape(hidden=2048, layers=28, heads=16, kv_heads=8, ffn=6144, **QWEN3),
    "Qwen/Qwen3-4B-Base": ModelShape(hidden=2560, layers=36, heads=32, kv_heads=8, ffn=9728, **QWEN3),
    "Qwen/Qwen3-30B-A3B-Base": ModelShape(
        hidden=2048, layers=48, heads=32, kv_heads=4, ffn=6144, tied_embeddings=False,
        experts=Experts(number=128, per_token=8, ffn=768, layers=tuple(range(48))), **QWEN3,
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ModelShape(
        hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab_size=128256, max_positions=131072,
        rope_theta=5e5,
    ),
}  # fmt: skip
GPUS = {
    "gsm8k_qwen3_0.6b": "1x80",
    "gsm8k_llama3.2_1b_lora": "1x24",
    "ppo_critic_qwen3_1.7b": "2x80",
    "dapo_math_qwen3_4b": "8x80",
    "dapo_math_qwen3_30b_a3b": "24x80",
}
"""What the recipes' pages say."""


@pytest.fixture(autouse=True)
def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_recipe_is_rehearsed() -> None:
    assert {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")} == GPUS.keys()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["two steps", "ten steps"])
@pytest.mark.parametrize("recipe", GPUS)
def test_a_recipe_fits_its_hardware_and_can_be_rehearsed(tmp_path: Path, recipe: str, full: bool) -> None:
    path = ROOT / "configs" / "recipes" / f"{recipe}.yaml"
    name = load_file(Config, path).model.name
    shape = SHAPES[name]
    words = ["@", path, "--model.folder", described(tmp_path / "real", shape), "--run.folder", tmp_path / "runs"]
    checked = finished(tmp_path, "config", "check", *words, "--gpus", GPUS[recipe])
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "memory: the run fits on" in checked.stdout

    if not full:  # few tokens in the vocabulary take a third of the time
        words[3] = described(tmp_path / "short", replace(shape, vocab_size=512))
    done = finished(tmp_path, "rehearse", *words, *(["--steps", 10] if full else []))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"a tokenizer of bytes stands in for that of {name}" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    assert last_step(load_file(Config, folder / "config.yaml")) == (10 if full else 2)
    exported = read_shape(folder / "exported")
    assert exported.vocab_size == (shape.vocab_size if full else 512)
    assert (exported.experts is None) == (shape.experts is None)


def test_a_model_of_sizes_and_few_positions_is_rehearsed_as_it_is(tmp_path: Path) -> None:
    done = finished(tmp_path, "rehearse", "@", "configs/quickstart.yaml", "--run.folder", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsal: 2 steps, an evaluation and a checkpoint worked" in done.stdout


def test_what_does_not_fit_is_not_rehearsed(tmp_path: Path) -> None:
    model = described(tmp_path / "real", SHAPES["Qwen/Qwen3-0.6B"])
    words = ["@", "configs/recipes/gsm8k_qwen3_0.6b.yaml", "--model.folder", model, "--run.folder", tmp_path / "runs"]
    done = finished(tmp_path, "rehearse", *words, "--gpus", "1x16")
    assert done.returncode == ConfigError.exit_code
    assert "GPU 0 has 16 GB, and the learner and worker 0" in done.stdout
    assert not (tmp_path / "runs").exists()


def described(folder: Path, shape: ModelShape) -> Path:
    """A folder with the model's config.json and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written_config(shape, dtype="bfloat16")))
    return folder
