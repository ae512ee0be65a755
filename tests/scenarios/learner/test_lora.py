"""A learner with `learner.lora`: what it hands out, saves, resumes and exports."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from async_rl.checkpoints.manifest import candidates, read_manifest
from async_rl.config import Config
from async_rl.config.loading import load
from async_rl.config.run import RunConfig
from async_rl.errors import CheckpointError, ConfigError
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint, save_checkpoint
from async_rl.megatron.parameters.table import VALUE_HEAD
from async_rl.models.hf_config import read_shape
from learner.batches.batch import pack_batch
from learner.checkpoints.stored_weights import stored_weights
from learner.models.__main__ import main
from learner.objective import load_objective
from learner.ranks.rank_group import RankGroup
from tests.scenarios.learner.layout_matrix import OBJECTIVE
from tests.support.full_weights import weights_of
from tests.support.learner_rank import config, shape, taken_groups, train
from tests.support.small_models import write_folder

LORA = {"rank": 4, "alpha": 8.0}


def started(under: Config) -> RankGroup:
    return RankGroup(under, OBJECTIVE, shape(under))


def served(rank_group: RankGroup) -> dict[str, Tensor]:
    """What one process hands to workers."""
    return {box.name: part.clone() for box, part in rank_group.model.held().items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_workers_receive_what_checkpoints_hold(tmp_path: Path, precision: str) -> None:
    under = config(lora=LORA, precision=precision)
    rank_group = started(under)
    before = served(rank_group)
    rows = train(rank_group, 1, 2)
    assert rows[0]["policy/kl_reference"] == 0 < rows[1]["policy/kl_reference"], "the base is the reference"
    after = served(rank_group)
    assert {name for name in after if not torch.equal(after[name], before[name])} == {
        f"decoder.layers.{layer}.{matrix}.weight"
        for layer in range(2)
        for matrix in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
    rank_group.save(tmp_path, step=2, extra={}, keep=1).result()
    (checkpoint,) = candidates(tmp_path)
    manifest = read_manifest(checkpoint)
    merged = load_checkpoint(checkpoint, manifest, shape(under), rank_group.model.dtype)
    assert merged.keys() == after.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in after.items())
    trained = sum(math.prod(sizes) for sizes in manifest.models["policy"].parameters.values())
    assert sum(facts.bytes for facts in manifest.files.values()) < 3 * 4 * trained + 20_000, "nothing of the base"
    expected = train(rank_group, 3, 4)

    resumed = started(under)
    assert resumed.load(tmp_path) == {}
    assert train(resumed, 3, 4) == expected
    with stored_weights(checkpoint, shape(under), resumed.model) as stored:  # a rollback
        assert all(torch.equal(part, after[box.name]) for box, part in stored.items())
    rank_group.stop()


def test_a_value_head_is_trained_whole_beside_adapters(tmp_path: Path) -> None:
    tree = config(lora=LORA, precision="bfloat16").model_dump(mode="json")
    tree["learner"] |= {"critic": {"type": "shared"}, "objective": "ppo"}
    tree["batch"]["drop_no_signal"] = False
    under, objective = Config.model_validate(tree), load_objective("ppo")

    def steps(rank_group: RankGroup, first: int, last: int) -> list[tuple[float, Mapping[str, float]]]:
        batches = (
            pack_batch(taken_groups(each), objective=objective, capacity=40, num_shards=1) for each in range(first, last)
        )
        return [(found.loss, found.metrics) for found in map(rank_group.step, batches)]

    rank_group = RankGroup(under, objective, shape(under))
    steps(rank_group, 1, 3)
    assert not {box.name for box in rank_group.model.held()} & {*VALUE_HEAD}
    rank_group.save(tmp_path, step=2, extra={}, keep=1).result()
    expected = steps(rank_group, 3, 5)
    resumed = RankGroup(under, objective, shape(under))
    resumed.load(tmp_path)
    assert steps(resumed, 3, 5) == expected
    assert {*VALUE_HEAD} < read_manifest(candidates(tmp_path)[0]).models["policy"].parameters.keys()
    rank_group.stop()


def refused(folder: Path, lora: dict[str, Any] | None, *, seed: int = 0) -> str:
    under = config(lora=lora).model_copy(update={"run": RunConfig(seed=seed)})
    with pytest.raises(CheckpointError) as caught:
        started(under).load(folder)
    return str(caught.value)


def test_other_adapters_or_another_base_are_refused(tmp_path: Path) -> None:
    rank_group = started(config(lora=LORA))
    rank_group.save(tmp_path / "adapters", step=1, extra={}, keep=1).result()
    save_checkpoint(tmp_path / "all", shape(config()), weights_of(rank_group))
    saved = tmp_path / "adapters"
    assert "with learner.lora.rank 4, not 8" in refused(saved, {**LORA, "rank": 8})
    assert "with learner.lora.alpha 8.0, not 4.0" in refused(saved, {**LORA, "alpha": 4.0})
    assert "down_proj], not [q_proj]" in refused(saved, {**LORA, "targets": ["q_proj"]})
    assert "adapters of other weights: those of a new model with run.seed 0" in refused(saved, LORA, seed=1)
    assert "has adapters alone: set learner.lora" in refused(saved, None)
    assert "has no adapters: remove learner.lora" in refused(tmp_path / "all", LORA)
    rank_group.stop()


def test_exports_are_the_merged_model_and_what_peft_opens(tmp_path: Path, capsys: Any) -> None:
    folder = write_folder(tmp_path / "folder", vocabulary=21)
    words = ["--run.name", "adapted", "--run.folder", str(tmp_path / "runs"), "--model.folder", str(folder)]
    words += ["--tokenizer", json.dumps({"type": "huggingface", "folder": str(folder)}), "--learner.lora", json.dumps(LORA)]
    under = load([*words, "--environments", "[{type: counting}]", "--learner.optimizer.learning_rate", "0.05"])
    rank_group = RankGroup(under, OBJECTIVE, read_shape(folder))
    train(rank_group, 1, 2)
    rank_group.save(tmp_path / "runs/adapted/checkpoints", step=2, extra={}, keep=1).result()
    rank_group.stop()
    main(["inspect", str(folder)])
    assert "for all weights and for adapters of rank 16" in capsys.readouterr().out
    main(["inspect", str(tmp_path / "runs/adapted")])
    assert "parameters of adapters of rank 4 in 2 layers, 2 updates" in capsys.readouterr().out
    again = [*words, "--environments", "[{type: counting}]"]
    main(["export", *again, "--to", str(tmp_path / "merged")])
    main(["export", *again, "--to", str(tmp_path / "peft"), "--format", "peft"])
    assert "14 adapters of rank 4" in capsys.readouterr().out

    facts = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (facts["peft_type"], facts["r"], facts["lora_alpha"]) == ("LORA", 4, 8)
    assert facts["base_model_name_or_path"] == str(folder)
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    model, merged = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("folder", "merged"))
    tokens = torch.arange(12)[None]
    original, expected = model(tokens).logits, merged(tokens).logits
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in facts["target_modules"]:
                a, b = (tensors.pop(f"base_model.model.{name}.lora_{kind}.weight") for kind in "AB")
                assert (a.shape, b.shape) == ((4, module.in_features), (module.out_features, 4))
                module.weight += facts["lora_alpha"] / facts["r"] * b @ a
    assert not tensors
    torch.testing.assert_close(model(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    assert (expected - original).abs().max() > 0.1

    moved = write_folder(tmp_path / "moved", seed=1, vocabulary=21)
    words[words.index(str(folder))] = str(moved)
    with pytest.raises(ConfigError, match=r"model\.folder: the weights in .*moved are not those"):
        main(["export", *words, "--environments", "[{type: counting}]", "--to", str(tmp_path / "other")])
