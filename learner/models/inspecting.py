"""`async-rl model inspect`: describe a Hugging Face folder or a checkpoint. Does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from pathlib import Path

from async_rl.checkpoints.manifest import MANIFEST, found_in, read_asked
from async_rl.cli.grammar import CommandLine
from async_rl.config.learner import ParallelConfig
from async_rl.errors import ConfigError
from async_rl.megatron.huggingface.names import names
from async_rl.megatron.parameters.adapters import default_lora
from async_rl.megatron.parameters.table import table
from async_rl.models.families import family_of
from async_rl.models.hf_config import read_config, read_shape, refusals
from async_rl.models.safetensors import InvalidSafetensors, TensorFacts, tensors_of
from async_rl.models.shape import ModelShape
from async_rl.plan.parameters import layouts, trained_bytes


def inspect(line: CommandLine) -> None:
    path = Path(line.operands[0])
    if (path / "config.json").is_file():
        _inspect_folder(path)
    elif found := found_in(path):
        _inspect_checkpoint(found[0])
    else:
        raise ConfigError(f"{path} is neither a Hugging Face folder (config.json) nor a checkpoint ({MANIFEST}), nor holds one")


# -- a Hugging Face folder ------------------------------------------------------------------------------------------------


def _inspect_folder(folder: Path) -> None:
    found = read_config(folder)
    if problems := list(refusals(found)):
        raise ConfigError(f"{folder}: {found.get('model_type')} with {' and '.join(problems)}")
    shape = read_shape(folder)
    tensors = _tensors_of_folder(folder)
    print(f"{folder}: {family_of(shape).name}")
    for text in (*_described(shape), f"weights: {_summary(tensors.values())}", *_mismatches(shape, tensors)):
        print(f"  {text}")
    lora = default_lora(shape)
    print(
        f"\nTraining in bfloat16 needs on each GPU, without activations, for all weights and for adapters of rank {lora.rank}:"
    )
    for layout in layouts(shape):
        whole, adapted = size_of(trained_bytes(shape, layout)), size_of(trained_bytes(shape, layout, lora=lora))
        print(f"  {count(layout.ranks, 'GPU'):<6}  {whole:>8}  {adapted:>8}  {_named(layout)}")
    cache = 1000 * 4 * shape.layers * shape.kv_heads * shape.head_dim
    weights = 2 * sum(prod(row.shape) for row in table(shape))
    print(f"Sampling needs {size_of(weights)} for the weights, and {size_of(cache)} of cache for every 1000 tokens in flight.")


def _named(layout: ParallelConfig) -> str:
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "expert": layout.expert}
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data-parallel alone"


def _described(shape: ModelShape) -> Iterator[str]:
    yield (
        f"{shape.layers} layers, hidden {shape.hidden}, {shape.heads} heads of {shape.head_dim} "
        f"with {shape.kv_heads} keys and values, MLP {shape.ffn}"
    )
    numbers = {row.name: prod(row.shape) for row in table(shape)}
    total = sum(numbers.values())
    if (experts := shape.experts) is None:
        yield f"{total:,} parameters"
    else:
        idle = sum(prod(row.shape) for row in table(shape) if row.expert is not None) * (1 - experts.per_token / experts.number)
        where = count(len(experts.layers), "layer")
        shared = f", and one of {experts.shared_ffn} for all" if experts.shared_ffn is not None else ""
        yield f"{experts.number} experts of {experts.ffn} in {where}, {experts.per_token} for each token{shared}"
        yield f"{total:,} parameters, of which a token uses {total - round(idle):,}"
    tied = "the same matrix for embedding and output" if shape.tied_embeddings else "separate matrices for embedding and output"
    yield f"vocabulary {shape.vocab_size:,}, {tied}"
    if (window := shape.window) is not None:
        base = f", rope base {window.rope_theta:,.0f} there" if window.rope_theta is not None else ""
        yield f"sliding window of {window.tokens:,} tokens in {count(len(window.layers), 'layer')}{base}"
    scaling = shape.rope_scaling
    stretched = f", stretched {scaling.factor:g} times ({scaling.kind})" if scaling is not None else ""
    yield f"context {shape.max_positions:,} tokens, rope base {shape.rope_theta:,.0f}{stretched}"


def _tensors_of_folder(folder: Path) -> dict[str, TensorFacts]:
    found: dict[str, TensorFacts] = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            found |= tensors_of(path)
    except InvalidSafetensors as error:
        raise ConfigError(f"{folder}: {error}") from error
    return found


def _mismatches(shape: ModelShape, tensors: Mapping[str, TensorFacts]) -> Iterator[str]:
    wanted = {part for name in names(shape) for part in name.theirs}
    if missing := sorted(wanted - tensors.keys()):
        yield f"{count(len(missing), 'tensor')} missing, the first is {missing[0]}"
    if unused := sorted(tensors.keys() - wanted):
        yield f"{count(len(unused), 'tensor')} not used, the first is {unused[0]}"


# -- a checkpoint -----------------------------------------------------------------------------------------------------------


def _inspect_checkpoint(path: Path) -> None:
    manifest = read_asked(path)
    print(f"{path}: checkpoint of step {manifest.step}, layout: {manifest.layout}")
    for name, model in manifest.models.items():
        numbers = sum(prod(sizes) for sizes in model.parameters.values())
        layers = {found[1] for each in model.parameters if (found := _LAYER.match(each))}
        began = count(model.updates, "update") if model.updates else "no updates yet"
        of_adapters = f" of adapters of rank {model.adapters.lora.rank}" if model.adapters is not None else ""
        print(f"  {name}: {numbers:,} parameters{of_adapters} in {count(len(layers), 'layer')}, {began}")
    size = sum(facts.bytes for facts in manifest.files.values())
    print(f"  {size_of(size)} in {count(len(manifest.files), 'file')}")


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def _summary(tensors: Iterable[TensorFacts]) -> str:
    every = list(tensors)
    dtypes = Counter(facts.dtype for facts in every)
    kinds = " and ".join(dtype for dtype, _ in dtypes.most_common())
    return f"{count(len(every), 'tensor')}, {size_of(sum(facts.bytes for facts in every))} of {kinds}" if every else "none"


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def size_of(count: float) -> str:
    """Format bytes with decimal units, as Hugging Face does."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
