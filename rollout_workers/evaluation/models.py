"""Open the model to evaluate: weights in an engine of its own, or a policy."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from async_rl.config import Config, ModelConfig
from async_rl.config.evaluation import PolicyConfig, PolicySampling
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.megatron.huggingface.tensors import load_folder
from async_rl.megatron.parallel import resolve_device, resolve_dtype
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.protocols import InferenceInterface
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.evaluation.subject import CheckpointSubject, HuggingFaceFolder, PolicySubject
from rollout_workers.inference.open_engine import open_engine
from rollout_workers.inference.rollout_engine import RolloutEngine
from rollout_workers.policies import open_policy

UNKNOWN_CONTEXT = 1 << 17
"""Context assumed for a served model, long enough never to limit; the server refuses what is too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenModel:
    """A model that can generate."""

    inference: InferenceInterface
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyEngine:
    """An engine without weights."""

    engine: RolloutEngine
    shape: ModelShape


@asynccontextmanager
async def empty_engine(config: Config, inherited: Mapping[str, str]) -> AsyncGenerator[EmptyEngine]:
    """Open the engine of `worker.backend`."""
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    async with open_engine(config, shape, tokenizer, seed=config.evaluation.seed, inherited=inherited) as engine:
        yield EmptyEngine(engine=engine, shape=shape)


@asynccontextmanager
async def open_model(
    subject: CheckpointSubject | HuggingFaceFolder | PolicySubject, config: Config, inherited: Mapping[str, str]
) -> AsyncGenerator[OpenModel]:
    if isinstance(subject, PolicySubject):
        async with open_policy(sampled_as(config, subject.config), resolve_device(config.device)) as inference:
            yield OpenModel(inference=inference, context_tokens=UNKNOWN_CONTEXT)
        return
    if isinstance(subject, HuggingFaceFolder):
        config = with_folder(config, subject)
    async with empty_engine(config, inherited) as empty:
        dtype = resolve_dtype(resolve_device(config.device))
        if isinstance(subject, HuggingFaceFolder):
            weights = load_folder(subject.path, empty.shape, dtype)
        else:
            weights = load_checkpoint(subject.path, subject.manifest, empty.shape, dtype, base=config.model.folder)
        await empty.engine.swap(0, weights)
        yield OpenModel(inference=empty.engine, context_tokens=empty.shape.context_tokens)


def with_folder(config: Config, subject: HuggingFaceFolder) -> Config:
    """The configuration with the folder's model, and its tokenizer if it has one."""
    model = ModelConfig(folder=subject.path, max_sequence=config.model.max_sequence, layer_spec=config.model.layer_spec)
    changes: dict[str, object] = {"model": model}
    if (subject.path / "tokenizer_config.json").is_file():
        changes["tokenizer"] = HuggingFaceTokenizer(type="huggingface", folder=subject.path)
    return config.model_copy(update=changes)


def sampled_as(config: Config, policy: PolicyConfig) -> PolicyConfig:
    """The policy with the run's `sampling` for what its section leaves unset, so that results can be compared."""
    chosen = policy.sampling.generation_args.over(config.sampling.generation_args)
    sampling = {name: getattr(chosen, name) for name in PolicySampling.model_fields}
    return policy.model_copy(update={"sampling": PolicySampling(**sampling)})
