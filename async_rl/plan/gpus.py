"""Whether a memory plan fits on given GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_rl.config import Config
from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError
from async_rl.plan.memory import AUTO_CACHE, CACHE, RECEIVED, MemoryPlan, Part, total
from async_rl.plan.worker import CONTEXT_BYTES, auto_cache_on_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of a machine."""

    count: int
    gb: float
    """Memory of each, in units of 2^30 bytes, as in their names."""

    @staticmethod
    def parse(text: str) -> Gpus:
        """Read `8x80`: 8 GPUs of 80 GB each. Raises ConfigError."""
        found = re.fullmatch(r"([1-9]\d*)x(\d+(?:\.\d+)?)(?:GB)?", text.strip(), re.IGNORECASE)
        if found is None or float(found[2]) <= 0:
            raise ConfigError(f"--gpus {text}: give the number of GPUs and the GB of each, as in 8x80")
        return Gpus(count=int(found[1]), gb=float(found[2]))


def problems(plan: MemoryPlan, gpus: Gpus, config: AnyRun) -> list[str]:
    """Return what does not fit, each in one sentence with the setting to change; nothing if the run fits."""
    return [*_problems(plan, gpus, config)]


def _problems(plan: MemoryPlan, gpus: Gpus, config: AnyRun) -> Iterator[str]:
    if plan.learner_gpus > gpus.count:
        yield (
            f"learner.parallel: the learner needs {plan.learner_gpus} GPUs, and there are {gpus.count}; lower tensor, "
            "pipeline, context or processes"
        )
        return
    if isinstance(config, Config) and plan.worker_gpus > gpus.count:
        yield (
            f"worker.engines ({config.worker.engines}) x worker.tensor ({config.worker.tensor}) need {plan.worker_gpus} GPUs, "
            f"and there are {gpus.count}; lower one of them"
        )
        return
    if isinstance(config, Config) and plan.has_auto_cache:
        try:
            plan = with_cache(plan, gpus, config.worker.gpu_share)
        except ConfigError as error:
            yield str(error)
            return
    for gpu, parts in enumerate(placed(plan, gpus)):
        processes, used = len(parts), sum(total(each) for each in parts.values())
        needed = used + processes * CONTEXT_BYTES
        if needed > gpus.gb * 2**30:
            names = " and ".join(parts) + (" need" if len(parts) > 1 else " needs")
            yield f"GPU {gpu} has {gpus.gb:g} GB, and {names} {needed / 2**30:.1f} GB; {_way_out(parts, config)}"
            return


def with_cache(plan: MemoryPlan, gpus: Gpus, share: float) -> MemoryPlan:
    """Return the plan with the cache that `kv_cache_gb: auto` makes on these GPUs. Raises ConfigError if it is too small."""
    assert plan.engine is not None
    keeps_no_copy = gpus.count == 1 and plan.reads_in_place
    engine = replace(plan.engine, received=0) if keeps_no_copy else plan.engine
    size = auto_cache_on_gpu(engine, share=share, total=int(gpus.gb * 2**30))
    parts = tuple(Part(name=CACHE, bytes=size) if part.name == AUTO_CACHE else part for part in plan.worker)
    return replace(plan, worker=parts)


def placed(plan: MemoryPlan, gpus: Gpus) -> list[dict[str, tuple[Part, ...]]]:
    """Return the processes on each GPU with their parts. Workers take the GPUs behind the learner's, and share all if there are
    too few.
    """
    found: list[dict[str, tuple[Part, ...]]] = [{} for _ in range(gpus.count)]
    for rank in range(plan.learner_gpus):
        found[rank]["the learner"] = plan.learner
    has_room = plan.learner_gpus + plan.workers * plan.worker_gpus <= gpus.count
    first = plan.learner_gpus if has_room else 0
    names = [*(f"worker {number}" for number in range(plan.workers)), *(["the evaluator"] if plan.has_evaluator else [])]
    for worker, name in enumerate(names):
        for offset in range(plan.worker_gpus):
            here = found[(first + worker * plan.worker_gpus + offset) % gpus.count]
            in_place = "the learner" in here and plan.reads_in_place
            parts = tuple(part for part in plan.worker if not (in_place and part.name == RECEIVED))
            here[name] = parts
    return found


def _way_out(parts: dict[str, tuple[Part, ...]], config: AnyRun) -> str:
    """Return the settings that reduce the largest part."""
    owner, largest = max(((owner, part) for owner, each in parts.items() for part in each), key=lambda found: found[1].bytes)
    learner = config.learner
    if isinstance(config, Config) and owner != "the learner":
        worker = config.worker
        return {
            CACHE: f"lower worker.gpu_share (now {worker.gpu_share:g})"
            if worker.kv_cache_gb == "auto"
            else f"lower worker.kv_cache_gb (now {worker.kv_cache_gb:g})",
            "activations": f"lower worker.prompt_tokens_per_step (now {worker.prompt_tokens_per_step})",
            "logits": "lower worker.groups_in_flight",
        }.get(largest.name, f"raise worker.tensor (now {worker.tensor}), and for experts worker.expert (now {worker.expert})")
    divide = f"raise learner.parallel.tensor (now {learner.parallel.tensor})"
    if largest.name == "logits":
        return f"lower learner.logits_gb (now {learner.logits_gb:g})"
    if largest.name == "activations":
        smaller_rows = f"lower batch.bin_tokens (now {config.batch.bin_tokens}) or {divide}"
        return f"set learner.recompute: full, or {smaller_rows}" if learner.recompute != "full" else smaller_rows
    if largest.name == "optimizer" and not learner.optimizer.offload:
        return f"set learner.optimizer.offload: true, or {divide} or learner.parallel.processes"
    return f"{divide} or learner.parallel.pipeline"
