"""`async-rl model export`: write a checkpoint as a Hugging Face folder, or as one of Megatron-LM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from async_rl.checkpoints.manifest import Manifest, found_in, read_asked
from async_rl.cli.grammar import CommandLine
from async_rl.cli.model import MEGATRON, NEWEST, PEFT, shard_bytes, target
from async_rl.cli.train import load_any
from async_rl.config.training import AnyRun, TrainingConfig
from async_rl.errors import ConfigError
from async_rl.megatron.base_weights import base_weights
from async_rl.megatron.huggingface.export import FolderExtras, write_adapter, write_folder
from async_rl.megatron.parameters.checkpoint_weights import facts_of_adapters, load_checkpoint, load_trained
from async_rl.megatron.torch_dist.arguments import not_said
from async_rl.models.families import family_of
from async_rl.models.from_config import model_shape
from async_rl.models.hf_config import read_dtype
from async_rl.models.shape import ModelShape
from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import Characters, open_tokenizer
from learner.models.inspecting import count, size_of


def export(line: CommandLine) -> None:
    to, most = Path(target(line)), shard_bytes(line)
    config = load_any(line.config)
    if isinstance(config, TrainingConfig) and config.head != "tokens":
        raise ConfigError(
            f"{config.run.name} trains a reward model, and Hugging Face's families predict tokens: serve it as a reward, with "
            "`async-rl reward serve`"
        )
    checkpoint, manifest = _chosen(config, line.text("checkpoint"))
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    if line.text("format") == PEFT:
        _export_adapter(line, config, shape, checkpoint, manifest)
        return
    dtype: torch.dtype = getattr(torch, _dtype(line, config))
    weights = load_checkpoint(checkpoint, manifest, shape, dtype, base=config.model.folder)
    extras = FolderExtras(tokenizer=config.tokenizer, generation=_generation(config, tokenizer))
    if is_megatron := line.text("format") == MEGATRON:
        from async_rl.megatron.torch_dist.writing import write_checkpoint  # torch's distributed checkpoints take seconds

        write_checkpoint(to, shape, weights, dtype=dtype, iteration=manifest.step, extras=extras)
    else:
        write_folder(to, shape, weights, dtype=dtype, shard_bytes=most, extras=extras)
    written = sorted(to.rglob("*.distcp") if is_megatron else to.glob("*.safetensors"))
    size, files = size_of(sum(path.stat().st_size for path in written)), count(len(written), "file")
    precision = str(dtype).removeprefix("torch.")
    print(f"{to}: step {manifest.step} as {family_of(shape).name}, {size} of {precision} in {files}")
    if is_megatron and (missing := not_said(shape)):
        print(f"Megatron-LM has no arguments for {' and '.join(missing)}: code of your own must build this model there")


def _export_adapter(line: CommandLine, config: AnyRun, shape: ModelShape, checkpoint: Path, manifest: Manifest) -> None:
    to, facts = Path(target(line)), facts_of_adapters(manifest)
    if facts is None:
        raise ConfigError(f"--format peft: {checkpoint} has no adapters, because all weights were trained; leave it out")
    if config.model.folder is None or facts.folder is None:
        raise ConfigError(
            "--format peft: these adapters belong to random weights (model.size), which others do not have; leave it out"
        )
    base_weights(facts, shape, torch.float32, folder=config.model.folder)  # refuses weights that they were not trained on
    dtype = line.text("dtype", "float32")
    trained = load_trained(checkpoint, manifest, shape, torch.float32)
    write_adapter(to, shape, facts.lora, trained, dtype=getattr(torch, dtype), base=config.model, tokenizer=config.tokenizer)
    number = count(len(trained) // 2, "adapter")
    print(f"{to}: step {manifest.step} as {number} of rank {facts.lora.rank} for {config.model.folder}, {dtype}")


def _chosen(config: AnyRun, word: str | None) -> tuple[Path, Manifest]:
    """Return the named checkpoint, or the newest of a folder, by default of the run's."""
    folder = config.run_folder if word is None or word == NEWEST else Path(word)
    found = found_in(folder)
    if not found:
        raise ConfigError(f"there is no checkpoint in {folder}")
    return found[0], read_asked(found[0])


def _dtype(line: CommandLine, config: AnyRun) -> str:
    """Choose the precision: --dtype, else that of model.folder, else float32. Checkpoints hold float32."""
    asked = line.text("dtype")
    if asked is None and config.model.folder is not None:
        asked = read_dtype(config.model.folder)
    return asked if asked is not None else "float32"


def _generation(config: AnyRun, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return generation_config.json: that of model.folder if there is one, else the tokenizer's special tokens."""
    path = config.model.folder / "generation_config.json" if config.model.folder is not None else None
    if path is not None and path.is_file():
        return json.loads(path.read_text())
    if isinstance(tokenizer, Characters):
        return {"eos_token_id": tokenizer.end_id, "bos_token_id": tokenizer.bos_id, "pad_token_id": tokenizer.pad_id}
    return {"eos_token_id": tokenizer.end_id}
