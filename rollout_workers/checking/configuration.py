"""`config check` for the workers: tokenizer, environments with their data, prompts, engine. Loads no weights."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from async_rl.config import Config
from async_rl.config.loading import load_with_origins
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import AsyncRLError, ConfigError, boundary
from async_rl.imports.references import load_reference
from async_rl.launch.package_guard import guard
from async_rl.launch.preflight import CannotCheck, answer, shape_to_check, tokenizer_to_check
from async_rl.models.engine_limits import check_kv_cache, check_worker_ranks, uses_cuda_graphs
from async_rl.types import Failure, Task
from rollout_workers.checking.findings import cramped, too_long
from rollout_workers.environment_pool import opened
from rollout_workers.episodes.episode import pose_task
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.registry import build_agent


def main(words: Sequence[str]) -> None:
    guard()
    answer(checks(load_with_origins(words).config))


def checks(config: Config) -> Iterator[Callable[[], str]]:
    yield partial(_tokenizer, config)
    for section in config.environments:
        yield partial(_environment, config, section)
    yield partial(_engine, config)


def _tokenizer(config: Config) -> str:
    return f"tokenizer: {tokenizer_to_check(config).vocab_size:,} tokens"


def _environment(config: Config, section: EnvironmentConfig) -> str:
    label = f"environment {section.label!r}"
    try:
        return f"{label}: {_prompt(config, section)}"
    except (AsyncRLError, CannotCheck):
        raise
    except Exception as error:  # of the environment's code
        raise ConfigError(f"{label}: {type(error).__name__}: {error}") from error


def _prompt(config: Config, section: EnvironmentConfig) -> str:
    task = asyncio.run(_first_task(config, section))
    try:
        tokenizer, shape = tokenizer_to_check(config), shape_to_check(config)
    except CannotCheck:
        return "its first task can be posed; the length of its prompt is not checked"
    tokens = len(tokenizer.render(task.prompt))
    for problem in too_long([tokens], shape.context_tokens):
        raise ConfigError(f"environment {section.label!r}: {problem}")
    noted = [f"; {note}" for note in cramped([tokens], shape.context_tokens, config.sampling.max_tokens)]
    return f"its first prompt has {tokens:,} tokens{''.join(noted)}"


async def _first_task(config: Config, section: EnvironmentConfig) -> Task:
    agent = build_agent(section, config.run.seed)
    async with opened(agent):
        task = await pose_task(TaskSource(environment=section, agent=agent, index=0), config.worker.timeouts)
    if isinstance(task, Failure):
        raise ConfigError(f"environment {section.label!r}: its first task cannot be posed: {task.kind}: {task.message}")
    return task


def _engine(config: Config) -> str:
    worker = config.worker
    if worker.backend == "hf":
        raise CannotCheck("worker.backend hf: whether worker.kv_cache_gb holds a sequence")
    if worker.backend != "megatron":
        load_reference(worker.backend)
        return f"worker.backend: {worker.backend}"
    shape = shape_to_check(config)
    check_worker_ranks(shape, worker.tensor, worker.expert)
    on_gpu = config.device != "cpu"
    if worker.kv_cache_gb != "auto":
        check_kv_cache(
            shape,
            gb=worker.kv_cache_gb,
            block_tokens=worker.kv_block_tokens,
            tensor=worker.tensor,
            element=2 if on_gpu else 4,
        )
    uses_cuda_graphs(
        shape,
        wanted=worker.cuda_graphs,
        on_gpu=on_gpu,
        kernels=worker.kernels,
        layer_spec=config.model.layer_spec,
        tensor=worker.tensor,
    )
    if worker.kv_cache_gb == "auto":
        where = f"within {worker.gpu_share:g} of a GPU (worker.gpu_share)" if on_gpu else "on a CPU"
        return f"worker.kv_cache_gb: auto, {where}; at least a sequence of {shape.context_tokens:,} tokens"
    return f"worker.kv_cache_gb: {worker.kv_cache_gb:g} GB hold a sequence of {shape.context_tokens:,} tokens"


if __name__ == "__main__":
    with boundary("async-rl config check"):
        main(sys.argv[1:])
