"""In a step in which all generations decode, the host waits for the device once: for the sampled tokens."""

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from async_rl.config.rollout import WorkerConfig
from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, Sampling
from tests.support.device_reads import DeviceReads
from tests.support.engine_stage import CPU, ENDLESS, MEGATRON_SCHEDULES, SHAPE, prompts, weights

BLOCK = 8


@pytest.fixture(params=["never", "always"])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    worker = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=BLOCK, max_running=8, cuda_graphs=request.param)
    made = EngineCore(
        shape=SHAPE, tokenizer=ENDLESS, worker=worker, device=CPU, dtype=torch.float32, seed=1, layer_spec="local"
    )
    made.swap(0, weights(1))
    yield made
    made.close()


def on_device(core: EngineCore) -> Iterator[Tensor]:
    """What lies on the GPU if there is one: before 0.17 all of the context, since then its view for the device."""
    context = core._engine.context
    model: nn.Module = core._engine.controller.inference_wrapped_model.model
    if MEGATRON_SCHEDULES:
        yield from (context.gpu_view._buf, context.active_logit_idxs, core._engine.controller._sampled_tokens_cuda)
    else:
        metadata = context.active_attn_metadata["mha_metadata"]
        held = [*vars(context).values(), *vars(metadata).values(), *metadata.state_data.values()]
        yield from (each for each in held if isinstance(each, Tensor))
    if core.graphs is not None:
        inputs = core.graphs._inputs
        yield from (inputs.tokens, inputs.lengths, inputs.blocks, core.graphs._logits)
    yield context.memory_buffer
    yield from model.parameters()


def test_a_decode_step_reads_only_the_sampled_tokens(core: EngineCore) -> None:
    numbers = itertools.count()
    for prompt in prompts(5):
        sampling = Sampling(max_tokens=40, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), seed=None)
        core.submit(Generation(id=next(numbers), prompt=prompt, sampling=sampling, finish=print))
    core.step()
    core.step()
    for _ in range(2 * BLOCK):  # every generation begins another block meanwhile
        with DeviceReads(on_device(core)) as reads:
            core.step()
        found = [place for place in reads.places if "torch_draws.py" not in place]
        assert not found
        assert len(reads.places) == 2, "tokens and log-probabilities; in Triton's draws they are one copy"
