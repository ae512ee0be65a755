"""In a step in which all generations decode, the host waits for the device once: for the sampled tokens. With asynchronous
scheduling the device has the next step by then. A short prompt adds no wait since megatron-core 0.17.
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron.engine.decode_graphs import DecodeGraphs
from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, Sampling
from rollout_workers.inference.sampling import Draw
from rollout_workers.inference.torch_draws import Drawn
from tests.support.device_reads import DeviceReads
from tests.support.engine_stage import CPU, ENDLESS, MEGATRON_SCHEDULES, SCHEDULES_ASYNC, SHAPE, prompts, weights

BLOCK = 8


@pytest.fixture(params=["never", "always", pytest.param("async", marks=SCHEDULES_ASYNC)])
def core(request: pytest.FixtureRequest) -> Iterator[EngineCore]:
    changed = (
        {"cuda_graphs": "always", "async_scheduling": True} if request.param == "async" else {"cuda_graphs": request.param}
    )
    worker = WorkerConfig.model_validate({"kv_cache_gb": 0.01, "kv_block_tokens": BLOCK, "max_running": 8} | changed)
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
        metadata = context.non_graph_attn_metadata["mha_metadata"]
        held = [*vars(context).values(), *vars(metadata).values(), *metadata.state_data.values()]
        yield from (each for each in held if isinstance(each, Tensor))
    if core.graphs is not None:
        inputs = core.graphs._inputs
        yield from (inputs.tokens, inputs.lengths, inputs.blocks, inputs.last, core.graphs._logits)
    yield context.memory_buffer
    yield from model.parameters()


def submit_some(core: EngineCore, first: int = 0) -> list[Generation]:
    sampling = Sampling(max_tokens=40, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), seed=None)
    submitted = [
        Generation(id=id, prompt=prompt, sampling=sampling, finish=print) for id, prompt in enumerate(prompts(5), first)
    ]
    for each in submitted:
        core.submit(each)
    return submitted


def test_a_decode_step_reads_only_the_sampled_tokens(core: EngineCore) -> None:
    submit_some(core)
    for _ in range(3):
        core.step()
    for _ in range(2 * BLOCK):  # every generation begins another block meanwhile
        with DeviceReads(on_device(core)) as reads:
            core.step()
        found = [place for place in reads.places if "torch_draws.py" not in place]
        assert not found
        assert len(reads.places) == 2, "tokens and log-probabilities; in Triton's draws they are one copy"


@pytest.mark.parametrize("core", ["always", pytest.param("async", marks=SCHEDULES_ASYNC)], indirect=True)
def test_a_step_that_computes_prompts_as_a_graph_reads_only_the_sampled_tokens(core: EngineCore) -> None:
    submit_some(core)
    for _ in range(3):
        core.step()
    assert core.graphs is not None
    books = () if MEGATRON_SCHEDULES else ("/megatron/core/", "/scheduling.py")
    later = submit_some(core, first=5)[:3]  # for which there is room
    while not all(each.token_ids for each in later):
        replays = core.graphs.replays
        with DeviceReads(on_device(core)) as reads:
            core.step()
        assert core.graphs.replays > replays
        assert not [place for place in reads.places if not any(part in place for part in ("/torch_draws.py", *books))]


@pytest.mark.parametrize("core", [pytest.param("async", marks=SCHEDULES_ASYNC)], indirect=True)
def test_the_next_step_is_launched_before_tokens_are_read(core: EngineCore) -> None:
    submitted = submit_some(core)
    for _ in range(3):
        core.step()
    assert core.graphs is not None
    for _ in range(10):
        launched, known = core.graphs.replays, len(submitted[0].token_ids)
        while_reading: list[int] = []
        drawn, graphs = core._sampler._draw, core.graphs

        def draw(logits: Tensor, drawn: Draw = drawn, graphs: DecodeGraphs = graphs, seen: list[int] = while_reading) -> Drawn:
            found = drawn(logits)

            def on_host() -> tuple[list[int], list[float]]:
                seen.append(graphs.replays)
                return found.on_host()

            return Drawn(found.tokens, on_host)

        core._sampler._draw = draw
        core.step()
        core._sampler._draw = drawn
        assert while_reading == [launched + 1]
        assert len(submitted[0].token_ids) == known + 1
