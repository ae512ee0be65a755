"""Writes a Hugging Face folder: sharded safetensors, index, config.json and tokenizer; or one of PEFT's, with adapters.

It is written under a temporary name and renamed when complete.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from async_rl.config.learner import LoraConfig
from async_rl.config.run import ModelConfig
from async_rl.config.tokenizer import CharacterTokenizer, TokenizerConfig
from async_rl.durable.whole_file import sync_folder, write_whole
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.tensors import from_canonical
from async_rl.megatron.parameters.adapters import adapters
from async_rl.models.hf_config import written_config
from async_rl.models.safetensors import divide
from async_rl.models.shape import ModelShape
from async_rl.tokenization.character_files import write_character_files

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderExtras:
    """Files of a Hugging Face folder besides weights and config.json."""

    tokenizer: TokenizerConfig | None = None
    """Tokenizer whose files are copied or written."""
    generation: Mapping[str, Any] | None = None
    """Contents of generation_config.json."""


def write_folder(
    folder: Path,
    shape: ModelShape,
    weights: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    extras: FolderExtras,
) -> None:
    """`weights` are full parameters under canonical names. Raises ConfigError when they are no causal language model, or when
    the folder exists or cannot be written.
    """
    if shape.head != "tokens":
        raise ConfigError(f"a model whose head is {shape.head!r} cannot be exported: Hugging Face's families predict tokens")
    config = written_config(shape, dtype=str(dtype).removeprefix("torch."))
    with whole_folder(folder) as partial:
        _write_weights(partial, from_canonical(weights, shape), dtype, shard_bytes)
        write_extras(partial, config, extras)


def write_adapter(
    folder: Path,
    shape: ModelShape,
    lora: LoraConfig,
    trained: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    base: ModelConfig,
    tokenizer: TokenizerConfig,
) -> None:
    """Write adapters, full ones under canonical names, as PEFT does. Raises ConfigError when the folder exists or cannot be
    written.
    """
    tensors = {
        f"base_model.model.{each.theirs}.{kind}.weight": trained[row.name].to(dtype).contiguous()
        for each in adapters(shape, lora)
        for kind, row in (("lora_A", each.a), ("lora_B", each.b))
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.name if base.name else str(base.place.absolute()),
        "revision": base.revision if base.revision else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": list(lora.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with whole_folder(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", {"format": "pt"})
        _write_json(partial / "adapter_config.json", config)
        _write_tokenizer(partial, tokenizer)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write into, which gets its name when it is complete."""
    if folder.exists():
        raise ConfigError(f"{folder} exists already; name a folder that does not")
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.rename(folder)
        sync_folder(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # frees the space if the disk is full
        raise ConfigError(f"{folder} cannot be written: {error}") from error


def write_extras(folder: Path, config: Mapping[str, Any], extras: FolderExtras) -> None:
    generation = dict(extras.generation) if extras.generation is not None else {}
    tokens = {key: value for key, value in generation.items() if key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "config.json", {**config, **tokens})
    if generation:
        _write_json(folder / "generation_config.json", generation)
    if extras.tokenizer is not None:
        _write_tokenizer(folder, extras.tokenizer)


def _write_tokenizer(folder: Path, tokenizer: TokenizerConfig) -> None:
    if isinstance(tokenizer, CharacterTokenizer):
        write_character_files(folder, tokenizer.alphabet)
        return
    for name in TOKENIZER_FILES:
        if (tokenizer.place / name).is_file():
            shutil.copy2(tokenizer.place / name, folder / name)


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int) -> None:
    sizes = {name: math.prod(tensor.shape) * dtype.itemsize for name, tensor in tensors.items()}
    parts = divide(sizes, shard_bytes)
    places: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors" if len(parts) > 1 else "model.safetensors"
        save_file({name: tensors[name].to(dtype).contiguous() for name in names}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(names, file)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(places.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")
