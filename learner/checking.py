"""`config check` for the learner: objective, priority, models, layout, precision. Builds no model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from async_rl.config import Config
from async_rl.config.learner import LearnerConfig
from async_rl.config.loading import load_with_origins
from async_rl.config.pretrained import Pretrained
from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard
from async_rl.launch.preflight import CannotCheck, answer, shape_to_check
from async_rl.megatron.layers.specs import refuse_own_norms, require_transformer_engine
from async_rl.megatron.model import check_division
from async_rl.megatron.parallel import ModelParallelSizes, resolve_device
from async_rl.plan.gpus import Gpus, problems, with_cache
from async_rl.plan.memory import CACHE, MemoryPlan, Part, evaluation_plan, memory_plan, total
from learner.model import check_sequence, compute_options
from learner.objective import load_objective
from learner.priorities import load_priority
from learner.ranks.model_set import check_model_set, initial_weights


def main(words: Sequence[str]) -> None:
    guard()
    answer(checks(load_with_origins(words[:2]).config, Gpus.parse(words[2]) if len(words) > 2 else None))


def checks(config: Config, gpus: Gpus | None) -> Iterator[Callable[[], str]]:
    if config.trains:
        yield from _training(config)
    yield lambda: memory(_planned(config))
    if gpus is not None:
        yield lambda: fit(_planned(config), gpus, config)


def _training(config: Config) -> Iterator[Callable[[], str]]:
    yield partial(_objective, config)
    if config.staleness.selector == "prioritized":
        yield partial(_priority, config)
    yield partial(_models, config)
    yield partial(check_layout, config)
    yield partial(check_precision, config)
    yield partial(_step, config)


def _objective(config: Config) -> str:
    load_objective(config.learner.objective)
    return f"learner.objective: {config.learner.objective}"


def _priority(config: Config) -> str:
    load_priority(config.replay.priority)
    return f"replay.priority: {config.replay.priority}"


def _described(config: Config) -> LearnerConfig:
    """The section, if the models that it names are here."""
    learner = config.learner
    for name in ("critic", "reference", "teacher"):
        section = getattr(learner, name)
        if isinstance(section, Pretrained) and section.name and section.folder is None:
            raise CannotCheck(f"learner.{name}: the sizes of {section.name}, whose files are not here")
    return learner


def _models(config: Config) -> str:
    _described(config)
    check_model_set(config, load_objective(config.learner.objective), shape_to_check(config))
    return "learner: the objective has the models that it needs"


def check_layout(config: AnyRun) -> str:
    parallel = config.learner.parallel
    sizes = ModelParallelSizes(**parallel.model_dump(include={"tensor", "pipeline", "virtual_stages", "context", "expert"}))
    sizes.check(parallel.ranks)
    shape = shape_to_check(config)
    check_division(shape, sizes)
    check_sequence(shape, parallel.tensor, sequence=parallel.sequence)
    if config.model.layer_spec == "transformer_engine":
        refuse_own_norms(shape)
    return f"learner.parallel: {sizes} on {parallel.ranks} GPU{'s' if parallel.ranks > 1 else ''}"


def _step(config: Config) -> str:
    batch, tokens = config.batch, shape_to_check(config).context_tokens
    return (
        f"step: {batch.groups_per_step} x {batch.group_size} rollouts of at most {tokens:,} tokens, in rows of "
        f"{batch.bin_tokens:,} (batch.bin_tokens)"
    )


def check_precision(config: AnyRun) -> str:
    learner, spec = config.learner, config.model.layer_spec
    if config.device != "cpu" and not torch.cuda.is_available():
        raise CannotCheck("learner.precision and model.layer_spec: this machine has no GPU")
    device = resolve_device(config.device)
    compute_options(learner, device, spec)
    if spec == "transformer_engine":
        require_transformer_engine()
    return f"learner.precision: {learner.precision} works on {device.type}"


def _planned(config: Config) -> MemoryPlan:
    shape = shape_to_check(config)
    if not config.trains:
        return evaluation_plan(config, shape)
    learner = _described(config)
    objective = load_objective(learner.objective)
    check_model_set(config, objective, shape)
    found = {name: model.shape(shape) for name, model in initial_weights(learner).items()}
    return memory_plan(
        config,
        shape,
        critic=found["critic"],
        reference=found["reference"] if objective.needs_reference else None,
        teacher=found["teacher"] if objective.needs_teacher else None,
    )


def memory(plan: MemoryPlan) -> str:
    """Describe the memory of a rank, a worker and the host, by part."""
    places = {"GPU of the learner": plan.learner, "GPU of a worker": plan.worker, "host": plan.host}
    return "\n".join(f"memory, {place}: {_in_gb(total(each))} GB{_listed(each)}" for place, each in places.items() if each)


def fit(plan: MemoryPlan, gpus: Gpus, config: AnyRun) -> str:
    """Raise ConfigError if the run does not fit."""
    if wrong := problems(plan, gpus, config):
        raise ConfigError("; ".join(wrong))
    fits = f"memory: the run fits on {gpus.count} GPU{'s' if gpus.count > 1 else ''} of {gpus.gb:g} GB"
    if not (isinstance(config, Config) and plan.has_auto_cache):
        return fits
    sizes = {part.name: part.bytes for part in with_cache(plan, gpus, config.worker.gpu_share).worker}
    return f"{fits}, where worker.kv_cache_gb auto is {_in_gb(sizes[CACHE])} GB"


def _listed(parts: Sequence[Part]) -> str:
    """The parts that are seen when rounded."""
    seen = [f"{part.name} {size}" for part in parts if float(size := _in_gb(part.bytes))]
    return f" ({', '.join(seen)})" if seen else ""


def _in_gb(size: float) -> str:
    return f"{size / 2**30:.2f}"


if __name__ == "__main__":
    with boundary("async-rl config check"):
        main(sys.argv[1:])
