"""Folders written by transformers, opened as Megatron models: the same logits, and the same names back."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from async_rl.config import ModelConfig
from async_rl.errors import ConfigError
from async_rl.megatron import parallel
from async_rl.megatron.hf import from_canonical, load_folder
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters import load_full
from async_rl.model_shape import ModelShape, model_shape

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 5e4,
}  # fmt: skip


def oracle(family: str, *, tied: bool) -> PreTrainedModel:
    """A random model whose norms and biases are random too: their defaults would hide a mix-up."""
    torch.manual_seed(0)
    if family == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    elif family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=tied))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied, head_dim=16))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


@pytest.fixture(params=[("llama", False), ("qwen2", True), ("qwen3", False)], ids=lambda param: param[0])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    family, tied = request.param
    model = oracle(family, tied=tied)
    model.save_pretrained(tmp_path)
    return model, tmp_path


def shape_of(folder: Path) -> ModelShape:
    return model_shape(ModelConfig(folder=folder), vocab_size=10)


def test_logits_equal_those_of_transformers(saved: tuple[PreTrainedModel, Path]) -> None:
    theirs, folder = saved
    shape = shape_of(folder)
    parallel.initialize(device=CPU)
    ours = build_model(shape, device=CPU, dtype=torch.float32, seed=0)
    load_full(ours, shape, load_folder(folder, shape, torch.float32))
    sequences = [torch.randint(0, shape.vocab_size, (length,)) for length in (1, 9, 30)]
    with torch.no_grad():
        found = forward_packed(ours, *pack(sequences))
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


def test_several_files_are_one_model(saved: tuple[PreTrainedModel, Path]) -> None:
    model, folder = saved
    shape = shape_of(folder)
    whole = load_folder(folder, shape, torch.float32)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    divided = load_folder(folder, shape, torch.float32)
    assert all(torch.equal(divided[name], tensor) for name, tensor in whole.items())


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
