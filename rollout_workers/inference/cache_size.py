"""The size of an engine's KV cache on the device that it runs on (`worker.kv_cache_gb`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.models.shape import ModelShape
from async_rl.plan.worker import auto_cache_on_cpu, auto_cache_on_gpu, engine_memory


def cache_gb(
    worker: WorkerConfig, shape: ModelShape, *, device: torch.device, element: int, in_place: bool = False, num_parcels: int = 0
) -> float:
    """Return the GB of the cache; `auto` is decided from what is free now, so the engine must have its weights. `in_place`: see
    open_engine.reads_in_place. `num_parcels`: see engine_memory.

    Ranks of an engine agree on the least memory among theirs. Raises ConfigError if it has no room for one sequence.
    """
    if worker.kv_cache_gb != "auto":
        return worker.kv_cache_gb
    on_cpu = device.type == "cpu"
    needs = engine_memory(
        shape, worker, element=element, running=worker.max_running, on_cpu=on_cpu, in_place=in_place, num_parcels=num_parcels
    )
    if on_cpu:
        return auto_cache_on_cpu(shape, worker, needs, element) / 2**30
    torch.cuda.empty_cache()  # what was needed to build the model is free too
    memory = torch.tensor(torch.cuda.mem_get_info(device))
    if worker.tensor > 1:
        parallel.all_reduced(memory, parallel.tensor_group(), dist.ReduceOp.MIN)
    free, total = memory.tolist()
    return auto_cache_on_gpu(needs, share=worker.gpu_share, total=total, free=free) / 2**30
