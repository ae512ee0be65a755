"""Folders written by transformers, opened as Megatron models: the same logits, and the same names back."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from async_rl.config import ModelConfig
from async_rl.errors import CheckpointError, ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.export import FolderExtras, write_folder
from async_rl.megatron.huggingface.tensors import from_canonical, load_folder
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.checkpoint_weights import save_checkpoint
from async_rl.megatron.parameters.full_parameters import check_complete, load_full
from async_rl.megatron.parameters.table import OUTPUT, VALUE_BIAS, VALUE_WEIGHT
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.models.stored_weights import StoredWeights
from tests.support.model_families import MODELS, write_model

CPU = torch.device("cpu")


@pytest.fixture(params=MODELS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    return write_model(request.param, tmp_path), tmp_path


def shape_of(folder: Path) -> ModelShape:
    return model_shape(ModelConfig(folder=folder), vocab_size=10)


def test_logits_equal_those_of_transformers(saved: tuple[PreTrainedModel, Path]) -> None:
    theirs, folder = saved
    shape = shape_of(folder)
    parallel.initialize(device=CPU)
    ours = build_model(shape, device=CPU, dtype=torch.float32, seed=0)
    load_full(ours, shape, load_folder(folder, shape, torch.float32))
    sequences = [torch.randint(0, shape.vocab_size, (length,)) for length in (1, 9, 60)]
    with torch.no_grad():
        found = forward_packed(ours, *pack(sequences)).logits()
        want = torch.cat([theirs(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_names_and_values_survive_the_way_back(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    shape = shape_of(folder)
    original = load_file(folder / "model.safetensors")
    back = from_canonical(load_folder(folder, shape, torch.float32), shape)
    assert back.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000], ids=["one-file", "parts"])
def test_what_is_written_opens_as_the_same_model(saved: tuple[PreTrainedModel, Path], tmp_path: Path, shard_bytes: int) -> None:
    original, folder = saved
    shape, written = shape_of(folder), tmp_path / "written"
    weights, extras = load_folder(folder, shape, torch.float32), FolderExtras(generation={"eos_token_id": 7})
    write_folder(written, shape, weights, dtype=torch.float32, shard_bytes=shard_bytes, extras=extras)
    assert (len(list(written.glob("*.safetensors"))) > 1) == (shard_bytes < 1 << 30)
    assert shape_of(written) == shape
    opened = AutoModelForCausalLM.from_pretrained(written)
    assert opened.generation_config.eos_token_id == opened.config.eos_token_id == 7
    tokens = torch.arange(53)[None]
    with torch.no_grad():
        # some of transformers' experts round differently where tensors lie elsewhere in memory
        torch.testing.assert_close(opened(tokens).logits, original(tokens).logits, atol=1e-5, rtol=1e-5)


only_llama = pytest.mark.parametrize("saved", ["llama"], indirect=True)


@only_llama
def test_several_files_are_one_model(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    shape = shape_of(folder)
    whole = load_folder(folder, shape, torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    divided = load_folder(folder, shape, torch.float32)
    assert divided.keys() == whole.keys()
    assert all(torch.equal(divided[name], tensor) for name, tensor in whole.items())


@only_llama
def test_what_is_wrong_with_a_folder_is_said(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    shape = shape_of(folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file({key: tensor for key, tensor in weights.items() if key != name}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=f"lacks 1 tensors, the first is {name}"):
        load_folder(folder, shape, torch.float32)
    save_file(weights | {name: torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"contradict its config\.json"):
        load_folder(folder, shape, torch.float32)
    (folder / "model.safetensors").write_bytes(json.dumps({"not": "weights"}).encode())
    with pytest.raises(ConfigError, match="cannot read"):
        load_folder(folder, shape, torch.float32)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        load_folder(folder, shape, torch.float32)


@only_llama
def test_an_index_that_says_nothing_is_refused(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    for content in ("{", "{}", "[]"):
        (folder / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ConfigError, match="does not say which file has which tensor"):
            load_folder(folder, shape_of(folder), torch.float32)


@only_llama
def test_nothing_is_read_to_see_that_a_folder_is_complete(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    shape = shape_of(folder)

    class Unread(StoredWeights):
        @property
        def sizes(self) -> Mapping[str, tuple[int, ...]]:
            return load_folder(folder, shape, torch.float32).sizes

        def __getitem__(self, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} is read")

        def __iter__(self) -> Iterator[str]:
            return iter(self.sizes)

        def __len__(self) -> int:
            return len(self.sizes)

    check_complete(shape, Unread())
    with pytest.raises(ValueError, match="1 parameters differ, the first is output_layer"):
        check_complete(replace(shape, tied_embeddings=not shape.tied_embeddings), Unread())


@only_llama
def test_what_cannot_be_written_is_said(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, folder = saved
    shape = shape_of(folder)
    weights = load_folder(folder, shape, torch.float32)

    def write(to: Path, **changed: Any) -> None:
        write_folder(to, replace(shape, **changed), weights, dtype=torch.float32, shard_bytes=1 << 30, extras=FolderExtras())

    with pytest.raises(ConfigError, match="exists already"):
        write(folder)
    with pytest.raises(ConfigError, match="no Hugging Face family"):
        write(tmp_path / "other", qkv_bias=True, qk_norm=True)
    with pytest.raises(ConfigError, match="head is 'scalar'"):
        write(tmp_path / "other", head="scalar")
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write(tmp_path / "file" / "inside")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(tmp_path / "file" / "inside", shape, weights)


@only_llama
def test_a_head_that_folders_do_not_have_begins_anew(saved: tuple[PreTrainedModel, Path]) -> None:
    _, folder = saved
    shape = replace(shape_of(folder), head="scalar")
    found = load_folder(folder, shape, torch.float32)
    assert OUTPUT not in found
    assert 0 < found[VALUE_WEIGHT].abs().max() < 0.2
    assert found[VALUE_BIAS].tolist() == [0]
