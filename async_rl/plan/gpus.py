"""Whether a memory plan fits on given GPUs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from async_rl.config import Config
from async_rl.config.training import AnyRun
from async_rl.errors import ConfigError
from async_rl.plan.memory import AUTO_CACHE, CACHE, RECEIVED, MemoryPlan, Part, total
from async_rl.plan.worker import CONTEXT_BYTES, auto_cache_on_gpu

MORE_GPUS = "take more GPUs, or larger ones"


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
    cached = plan
    if isinstance(config, Config) and plan.has_auto_cache:
        try:
            cached = with_cache(plan, gpus, config.worker.gpu_share)
        except ConfigError as error:
            yield str(error)
            return
    for gpu, parts in enumerate(placed(cached, gpus)):
        if (needed := _needed(parts)) > gpus.gb * 2**30:
            names = " and ".join(parts) + (" need" if len(parts) > 1 else " needs")
            ways = _smaller_share(plan, gpus, config) or _way_out(parts, plan, gpus, config)
            yield f"GPU {gpu} has {gpus.gb:g} GB, and {names} {needed / 2**30:.1f} GB; {ways}"
            return


def _needed(parts: Mapping[str, tuple[Part, ...]]) -> int:
    """Bytes of all processes on a GPU."""
    return sum(total(each) + CONTEXT_BYTES for each in parts.values())


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


def _smaller_share(plan: MemoryPlan, gpus: Gpus, config: AnyRun) -> str:
    """Return the settings with which a smaller `auto` cache makes the run fit; empty if there is none."""
    if not isinstance(config, Config) or not plan.has_auto_cache:
        return ""
    now = config.worker.gpu_share
    if share := _fitting_share(plan, gpus, below=now):
        return f"lower worker.gpu_share to {share:g} (now {now:g})"
    if plan.has_evaluator and (share := _fitting_share(replace(plan, has_evaluator=False), gpus, below=now)):
        return f"set evaluation.every: 0, and lower worker.gpu_share to {share:g} (now {now:g})"
    return ""


def _fitting_share(plan: MemoryPlan, gpus: Gpus, *, below: float) -> float:
    """Return the largest `worker.gpu_share`, in steps of 0.01, with which everything fits; 0 if none does."""
    for percent in range(math.ceil(100 * below) - 1, 0, -1):
        try:
            cached = with_cache(plan, gpus, percent / 100)
        except ConfigError:
            break
        if all(_needed(parts) <= gpus.gb * 2**30 for parts in placed(cached, gpus)):
            return percent / 100
    return 0.0


def _way_out(parts: Mapping[str, tuple[Part, ...]], plan: MemoryPlan, gpus: Gpus, config: AnyRun) -> str:
    """Return the settings that reduce the largest part."""
    owner, largest = max(((owner, part) for owner, each in parts.items() for part in each), key=lambda found: found[1].bytes)
    if isinstance(config, Config) and owner != "the learner":
        worker = config.worker
        return {
            CACHE: f"lower worker.gpu_share (now {worker.gpu_share:g})"
            if worker.kv_cache_gb == "auto"
            else f"lower worker.kv_cache_gb (now {worker.kv_cache_gb:g})",
            "activations": f"lower worker.prompt_tokens_per_step (now {worker.prompt_tokens_per_step})",
            "logits": "lower worker.groups_in_flight",
        }.get(largest.name, _smaller_engine(config) if gpus.count > 1 else MORE_GPUS)
    return _smaller_learner(largest.name, config, can_divide=gpus.count > plan.learner_gpus)


def _smaller_engine(config: Config) -> str:
    worker = config.worker
    return f"raise worker.tensor (now {worker.tensor}), and for experts worker.expert (now {worker.expert})"


def _smaller_learner(largest: str, config: AnyRun, *, can_divide: bool) -> str:
    learner = config.learner
    if largest == "logits":
        return f"lower learner.logits_gb (now {learner.logits_gb:g})"
    recompute = ["set learner.recompute: full"] if learner.recompute != "full" else []
    offload = ["set learner.optimizer.offload: true"] if not learner.optimizer.offload else []
    ways = {
        "activations": [*recompute, f"lower batch.bin_tokens (now {config.batch.bin_tokens})"],
        "optimizer": offload,
    }.get(largest, [])
    if can_divide:
        other = "processes" if largest == "optimizer" else "pipeline"
        ways = [*ways, f"raise learner.parallel.tensor (now {learner.parallel.tensor}) or learner.parallel.{other}"]
    adapters = ["train adapters (learner.lora)"] if learner.lora is None else []
    return ", or ".join(ways or [*recompute, *offload, *adapters] or [MORE_GPUS])
