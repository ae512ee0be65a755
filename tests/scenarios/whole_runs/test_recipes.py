"""Every recipe is checked and rehearsed: with its real sizes in the plan, and with a small model on this CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import constants

from async_rl.cli.train import resolve_any
from async_rl.config.training import TrainingConfig
from async_rl.errors import ConfigError
from async_rl.launch.preflight import checked
from async_rl.models.hf_config import read_shape, written_config
from async_rl.models.shape import Experts, ModelShape
from async_rl.plan.gpus import Gpus
from async_rl.telemetry import read_last_row
from learner.checking import checks as learner_checks
from learner.training.checking import checks as training_checks
from rollout_workers.checking.configuration import checks as worker_checks
from tests.support.repository import ROOT
from tests.support.run_processes import finished

AFTER_SFT = "Qwen/Qwen3-0.6B-Base"
"""The model of recipes that go on from the folder that another one writes."""
QWEN3 = {"head_dim": 128, "vocab_size": 151936, "max_positions": 40960, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
SHAPES = {
    "Qwen/Qwen3-0.6B": ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, ffn=3072, **QWEN3),
    AFTER_SFT: ModelShape(hidden=1024, layers=28, heads=16, kv_heads=8, ffn=3072, **{**QWEN3, "max_positions": 32768}),
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
    "gsm8k_qwen3_4b_lora": "1x80",
    "gsm8k_llama3.2_1b_lora": "1x24",
    "calculator_qwen3_1.7b": "1x80",
    "nim_self_play_qwen3_1.7b": "1x80",
    "gsm8k_sft_qwen3_0.6b": "1x80",
    "gsm8k_rl_after_sft_qwen3_0.6b": "1x80",
    "gsm8k_eval": "1x80",
    "ppo_critic_qwen3_1.7b": "2x80",
    "dapo_math_qwen3_4b": "8x80",
    "dapo_math_qwen3_30b_a3b": "24x80",
}
"""What the recipes' pages say."""
TRAINED = [recipe for recipe in GPUS if recipe != "gsm8k_eval"]


@pytest.fixture(autouse=True)
def without_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_recipe_is_here() -> None:
    assert {path.stem for path in (ROOT / "configs" / "recipes").glob("*.yaml")} == GPUS.keys()


@pytest.mark.parametrize("recipe", GPUS)
def test_a_recipe_fits_its_hardware(tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `config check` asks the roles, without a process for each."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    words, _, _ = described_recipe(tmp_path, recipe)
    config, gpus = resolve_any([str(word) for word in words]).config, Gpus.parse(GPUS[recipe])
    if isinstance(config, TrainingConfig):
        asked = [*training_checks(config, gpus)]
    else:
        asked = [*learner_checks(config, gpus), *worker_checks(config)]
    results = [*checked(asked)]
    assert [result.text for result in results if result.outcome == "problem"] == []
    assert any(result.text.startswith("memory: the run fits on") for result in results), results


def test_a_recipe_can_be_rehearsed(tmp_path: Path) -> None:
    """The one with experts and the most ranks. Few tokens in the vocabulary take a third of the time."""
    rehearse(tmp_path, "dapo_math_qwen3_30b_a3b", steps=2, vocab_size=512)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TRAINED)
def test_ten_steps_of_every_recipe(tmp_path: Path, recipe: str) -> None:
    rehearse(tmp_path, recipe, steps=10)


def rehearse(folder: Path, recipe: str, *, steps: int, vocab_size: int | None = None) -> None:
    words, name, shape = described_recipe(folder, recipe, vocab_size)
    done = finished(folder, "rehearse", *words, *(["--steps", steps] if steps != 2 else []), patience_s=140.0 * steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"a tokenizer of bytes stands in for that of {name}" in done.stdout
    assert f"rehearsal: {steps} steps" in done.stdout
    (made,) = (folder / "runs").iterdir()
    last = read_last_row(made / "metrics.jsonl")
    assert last is not None
    assert last.step == steps
    exported = read_shape(made / "exported")
    assert exported.vocab_size == shape.vocab_size
    assert (exported.experts is None) == (shape.experts is None)


@pytest.mark.slow
def test_a_model_of_sizes_and_few_positions_is_rehearsed_as_it_is(tmp_path: Path) -> None:
    done = finished(tmp_path, "rehearse", "@", "configs/quickstart.yaml", "--run.folder", tmp_path / "runs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rehearsal: 2 steps, an evaluation and a checkpoint worked" in done.stdout


def test_a_training_is_rehearsed_with_its_rows_and_a_mistake_is_said_once(tmp_path: Path) -> None:
    words = ["@", "configs/train/dpo.yaml", "--run.folder", tmp_path / "runs"]
    done = finished(tmp_path, "rehearse", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok           data: 400 rows" in done.stdout
    assert "rehearsal: 2 steps, a checkpoint worked" in done.stdout

    (tmp_path / "runs" / "file").write_text("")
    model = described(tmp_path / "model", SHAPES["Qwen/Qwen3-0.6B"])
    taken = ["--model.size", "null", "--model.folder", model, "--run.folder", tmp_path / "runs" / "file"]
    done = finished(tmp_path, "rehearse", *words, *taken, "--tokenizer", "{type: characters}")
    assert done.returncode == ConfigError.exit_code
    (said,) = done.stderr.strip().splitlines()
    assert "choose another run.folder" in said


def test_what_does_not_fit_is_not_rehearsed(tmp_path: Path) -> None:
    model = described(tmp_path / "real", SHAPES["Qwen/Qwen3-0.6B"])
    words = ["@", "configs/recipes/gsm8k_qwen3_0.6b.yaml", "--model.folder", model, "--run.folder", tmp_path / "runs"]
    done = finished(tmp_path, "rehearse", *words, "--gpus", "1x16")
    assert done.returncode == ConfigError.exit_code
    assert "GPU 0 has 16 GB, and the learner and worker 0" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_an_evaluation_alone_needs_no_learner(tmp_path: Path) -> None:
    words, _, _ = described_recipe(tmp_path, "gsm8k_eval")
    done = finished(tmp_path, "config", "check", *words, "--gpus", "1x16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory, GPU of a worker: " in done.stdout
    assert "memory: the run fits on 1 GPU of 16 GB" in done.stdout
    assert "learner" not in done.stdout
    assert done.stdout.endswith("ok: for `async-rl eval` alone, as all environments are evaluation_only\n")


def described_recipe(folder: Path, recipe: str, vocab_size: int | None = None) -> tuple[list[object], str, ModelShape]:
    """What to say to a verb for it to read the recipe, the name of its model, and the model's shape."""
    path = ROOT / "configs" / "recipes" / f"{recipe}.yaml"
    model = resolve_any(["@", str(path)]).config.model
    name = model.name if model.name else AFTER_SFT
    shape = SHAPES[name] if vocab_size is None else replace(SHAPES[name], vocab_size=vocab_size)
    words: list[object] = ["@", path, "--model.folder", described(folder / "model", shape), "--run.folder", folder / "runs"]
    return words if model.name else [*words, "--tokenizer.name", name], name, shape


def described(folder: Path, shape: ModelShape) -> Path:
    """A folder with the model's config.json and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(written_config(shape, dtype="bfloat16")))
    return folder
