"""Models in and out: a Hugging Face folder becomes a checkpoint, a checkpoint a folder that others open."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.cli.grammar import read
from async_rl.cli.model import EXPORT, shard_bytes
from async_rl.config.loading import load
from async_rl.errors import AsyncRLError, CheckpointError, ConfigError
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint, save_checkpoint
from async_rl.megatron.parameters.table import VALUE_BIAS, VALUE_WEIGHT
from async_rl.models.hf_config import read_shape
from async_rl.models.safetensors import divide
from learner.models.__main__ import main
from learner.objective import load_objective
from learner.ranks.rank_group import RankGroup
from tests.support.full_parameters import gather_full
from tests.support.full_weights import weights_of
from tests.support.learner_rank import OBJECTIVE, config, shape
from tests.support.run_processes import finished
from tests.support.small_models import write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "folder")


def described(folder: Path) -> list[str]:
    tokenizer = json.dumps({"type": "huggingface", "folder": str(folder)})
    return [
        "--run.name",
        "none",
        "--model.folder",
        str(folder),
        "--tokenizer",
        tokenizer,
        "--environments",
        "[{type: counting}]",
    ]


def test_what_is_imported_and_exported_again_is_the_same_model(folder: Path, tmp_path: Path, capsys: Any) -> None:
    main(["import", str(folder), "--to", str(tmp_path / "checkpoints")])
    (checkpoint,) = candidates(tmp_path / "checkpoints")
    shape = read_shape(folder)
    found = load_checkpoint(checkpoint, read_manifest(checkpoint), shape, torch.float32)
    for name, tensor in load_folder(folder, shape, torch.float32).items():
        assert torch.equal(found[name], tensor), name

    written = tmp_path / "written"
    main(["export", *described(folder), "--checkpoint", str(tmp_path / "checkpoints"), "--to", str(written)])
    assert "step 0 as qwen3" in capsys.readouterr().out
    original, again = load_file(folder / "model.safetensors"), load_file(written / "model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, written)]
    assert len({tuple(tokenizer.encode("12=")) for tokenizer in tokenizers}) == 1
    assert AutoModelForCausalLM.from_pretrained(written).generation_config.eos_token_id == 0


def test_a_run_goes_to_megatron_lm_and_comes_back(folder: Path, tmp_path: Path, capsys: Any) -> None:
    main(["import", str(folder), "--to", str(tmp_path / "checkpoints")])
    words = ["--checkpoint", str(tmp_path / "checkpoints"), "--format", "megatron", "--to", str(tmp_path / "megatron")]
    main(["export", *described(folder), *words])
    assert "step 0 as qwen3" in capsys.readouterr().out
    like = ["--like", str(tmp_path / "megatron/huggingface")]
    main(["import", str(tmp_path / "megatron"), "--format", "megatron", "--to", str(tmp_path / "back"), *like])
    assert "iteration 0 of" in capsys.readouterr().out
    original, again = load_file(folder / "model.safetensors"), load_file(tmp_path / "back/model.safetensors")
    assert again.keys() == original.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in original.items())
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "back")]
    assert len({tuple(tokenizer.encode("12=")) for tokenizer in tokenizers}) == 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").generation_config.eos_token_id == 0
    assert "exists already" in refused("export", *described(folder), *words)


def test_a_large_model_is_imported_part_by_part(folder: Path, tmp_path: Path) -> None:
    shape = read_shape(folder)
    weights = load_folder(folder, shape, torch.float32)
    written = save_checkpoint(tmp_path / "checkpoints", shape, weights, shard_bytes=20_000)
    manifest = read_manifest(written)
    assert len(manifest.files) > 1
    found = load_checkpoint(written, manifest, shape, torch.float32)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_learner_begins_from_what_was_imported(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", seed=1)
    main(["import", str(other), "--to", str(tmp_path / "checkpoints")])
    rank_group = RankGroup(load(described(folder)), OBJECTIVE, read_shape(folder))
    assert rank_group.load(tmp_path / "checkpoints") == {}
    found = weights_of(rank_group)
    rank_group.stop()
    for name, tensor in load_folder(other, read_shape(other), torch.float32).items():
        assert torch.equal(found[name], tensor), name


def test_what_was_imported_may_learn_to_give_values_too(folder: Path, tmp_path: Path) -> None:
    main(["import", str(folder), "--to", str(tmp_path / "checkpoints")])
    words = ["--learner.objective", "ppo", "--learner.critic", "{type: shared}", "--batch.drop_no_signal", "false"]
    rank_group = RankGroup(load([*described(folder), *words]), load_objective("ppo"), read_shape(folder))
    assert rank_group.load(tmp_path / "checkpoints") == {}
    found = gather_full(rank_group.model.chunks, rank_group.model.shape)
    rank_group.stop()
    assert found is not None
    assert 0 < found.pop(VALUE_WEIGHT).abs().max() < 0.2
    assert found.pop(VALUE_BIAS).tolist() == [0]
    weights = load_folder(folder, read_shape(folder), torch.float32)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_run_is_exported_in_parts_and_in_another_precision(tmp_path: Path) -> None:
    rank_group = RankGroup(config(), OBJECTIVE, shape(config()))
    rank_group.save(tmp_path / "runs/made-up/checkpoints", step=3, extra={}, keep=2).result()
    weights = weights_of(rank_group)
    rank_group.stop()
    size = config().model.model_dump_json(exclude_none=True)
    alphabet = "0123456789abcdefg"  # with the special tokens, as many as the rank_group's vocabulary
    words = ["--model", size, "--tokenizer.alphabet", alphabet, "--environments", "[{type: counting}]"]
    words += ["--run.folder", str(tmp_path / "runs"), "--run.name", "made-up"]
    written = tmp_path / "written"
    words += ["--to", str(written), "--dtype", "bfloat16", "--max-shard-size", "20kB"]
    ended = finished(tmp_path, "model", "export", *words)
    assert ended.returncode == 0, ended.stderr
    assert "step 3 as llama" in ended.stdout
    assert len(list(written.glob("model-*-of-*.safetensors"))) > 1
    assert AutoTokenizer.from_pretrained(written).encode("0a") == [1, 4, 14]
    opened = AutoModelForCausalLM.from_pretrained(written)
    assert opened.dtype == torch.bfloat16
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    assert torch.equal(opened.model.layers[1].mlp.down_proj.weight, weights[name].bfloat16())


def test_inspecting_says_what_a_model_is_and_needs(folder: Path, tmp_path: Path, capsys: Any) -> None:
    main(["inspect", str(folder)])
    said = capsys.readouterr().out
    assert all(text in said for text in ("qwen3", "2 layers, hidden 32", "float32", "2 GPUs", "tensor 2"))
    main(["import", str(folder), "--to", str(tmp_path / "checkpoints"), "--dtype", "bfloat16"])
    capsys.readouterr()
    main(["inspect", str(tmp_path)])  # a run's folder
    said = capsys.readouterr().out
    assert all(text in said for text in ("step 0", "in 2 layers, no updates yet", "in 1 file"))


def test_inspecting_takes_no_torch(folder: Path) -> None:
    code = "import sys; from learner.models.__main__ import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-P", "-c", code, "inspect", folder], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "False"


def refused(*words: str) -> str:
    with pytest.raises(AsyncRLError) as caught:
        main(words)
    assert isinstance(caught.value, ConfigError | CheckpointError)
    return str(caught.value)


def test_every_mistake_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    empty, to = str(tmp_path / "empty"), ["--to", str(tmp_path / "new")]
    assert "neither a Hugging Face folder" in refused("inspect", empty)
    assert "--to FOLDER" in refused("import", str(folder))
    assert "cannot read" in refused("import", empty, *to)
    assert "no checkpoint in" in refused("export", *described(folder), *to)
    assert "no checkpoint in" in refused("export", *described(folder), *to, "--checkpoint", empty)
    assert "'huge' is no size" in refused("export", *described(folder), *to, "--max-shard-size", "huge")
    assert "choose one of" in refused("import", str(folder), *to, "--dtype", "int4")
    (tmp_path / "reward.yaml").write_text(
        f"{{method: rm, model: {{folder: {folder}}}, data: {{path: pairs.jsonl}}, run: {{name: judge}}}}"
    )
    assert "trains a reward model" in refused("export", "@", str(tmp_path / "reward.yaml"), *to)
    main(["import", str(folder), *to])
    assert "holds step-00000000 already" in refused("import", str(folder), *to)
    (file,) = (tmp_path / "new/step-00000000").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    assert "cannot be read" in refused("export", *described(folder), "--checkpoint", str(tmp_path / "new"), "--to", empty)
    assert not Path(empty).exists()


def test_a_model_that_is_not_supported_is_named(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_act": "gelu", "attention_bias": True}))
    said = refused("inspect", str(folder))
    assert "hidden_act 'gelu'" in said
    assert "attention_bias" in said


def test_parts_are_as_large_as_allowed() -> None:
    assert divide({"a": 4, "b": 6, "c": 11, "d": 1}, most=10) == [["a", "b"], ["c"], ["d"]]
    sizes = {text: shard_bytes(read(EXPORT, ["--max-shard-size", text])) for text in ("4GB", "1.5 mb", "20k", "77")}
    assert list(sizes.values()) == [4_000_000_000, 1_500_000, 20_000, 77]
