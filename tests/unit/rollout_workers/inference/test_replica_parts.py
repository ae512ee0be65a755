"""The pure parts of engines in several processes: who gets a prompt, which GPUs, what travels, who must agree."""

import socket
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config import CharacterTokenizer, Config
from async_rl.config.evaluation import EvaluationConfig
from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ConfigError, ServiceStopped
from async_rl.launch.commands import WORKER_INDEX
from async_rl.launch.local import specs as process_specs
from async_rl.models.engine_limits import check_worker_ranks
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import Experts, ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.transport.plan import Box, plan_layout
from async_rl.transport.receiving.placement import Placement
from async_rl.transport.receiving.received_weights import ReceivedWeights
from async_rl.transport.wire.shared_memory import ParcelMemory
from async_rl.types import Completion, StopReason, VersionSpan
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.generation import resolve
from rollout_workers.inference.open_engine import reads_in_place, worker_gpus
from rollout_workers.inference.replicas import EngineFleet
from rollout_workers.inference.replicas.frames import Generate, RequestDone, SharedParcels, SocketPipe, StepOrder, Submit
from rollout_workers.inference.replicas.lockstep import LockstepCore, follow
from rollout_workers.inference.replicas.routing import SLACK, Router
from rollout_workers.inference.replicas.shared_weights import SharedVersion, SharedWeights, WeightReader
from rollout_workers.inference.rollout_engine import placement_of

CPU = torch.device("cpu")
TOKENIZER_CONFIG = CharacterTokenizer(alphabet="abc")
TOKENIZER = open_tokenizer(TOKENIZER_CONFIG)
SHAPE = ModelShape(
    hidden=16, layers=1, heads=2, kv_heads=2, head_dim=8, ffn=16, vocab_size=TOKENIZER.vocab_size, max_positions=32,
    rope_theta=1e4,
)  # fmt: skip


# -- who gets a prompt ----------------------------------------------------------------------------------------------------


def test_prompts_that_share_no_block_go_to_the_least_loaded() -> None:
    router = Router(replicas=3, block_tokens=4)
    assert [router.choose([5, 6, 7]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    router.ended(1)
    assert router.choose([5, 6, 7]) == 1


def test_whoever_knows_the_beginning_of_a_prompt_gets_it_until_it_is_far_ahead() -> None:
    router = Router(replicas=2, block_tokens=4)
    first_turn = [1, 2, 3, 4, 5]
    assert router.choose([9] * 8) == 0
    assert router.choose(first_turn) == 1
    second_turn = [*first_turn, 6, 7, 8, 9]
    assert [router.choose(second_turn) for _ in range(SLACK + 1)] == [1] * (SLACK + 1)
    assert router.choose(second_turn) == 0, "more than SLACK ahead"
    assert router.choose(first_turn) == 0, "which knows it now too, and has less to do"


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=12), st.booleans()), max_size=200), st.integers(1, 5))
def test_no_replica_is_ever_far_ahead_when_it_is_given_more(history: list[tuple[list[int], bool]], replicas: int) -> None:
    router, running = Router(replicas=replicas, block_tokens=2), []
    for prompt, ends in history:
        least = min(router.loads)
        running.append(router.choose(prompt))
        assert router.loads[running[-1]] <= least + SLACK + 1
        if ends:
            router.ended(running.pop(0))
    assert sum(router.loads) == len(running)


# -- which GPUs -------------------------------------------------------------------------------------------------------------


def config(device: str = "cuda", *, learner: int = 1, processes: int = 1, engines: int = 1, tensor: int = 1) -> Config:
    return Config.model_validate(
        {
            "device": device,
            "model": {"size": {"hidden": 16, "layers": 1, "heads": 2}},
            "environments": [{"type": "even_digits"}],
            "learner": {"parallel": {"processes": learner}},
            "worker": {"processes": processes, "engines": engines, "tensor": tensor},
        }
    )


@pytest.mark.parametrize(
    ("sizes", "visible", "expected"),
    [
        ({"processes": 3}, 4, [[1], [2], [3]]),
        ({"processes": 2, "learner": 2, "engines": 1, "tensor": 2}, 8, [[2, 3], [4, 5]]),
        ({"processes": 2, "learner": 2, "engines": 2, "tensor": 2}, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ({"processes": 3}, 2, [[0], [1], [0]]),
        ({"processes": 1}, 1, [[0]]),
    ],
)
def test_workers_of_one_machine_divide_its_gpus(sizes: Mapping[str, int], visible: int, expected: list[list[int]]) -> None:
    """Each environment is the one that `async-rl run` gives that worker."""
    run = config(**sizes)
    workers = [spec for spec in process_specs(run, {}) if spec.name.startswith("worker")]
    assert [worker_gpus(run, spec.environment, visible) for spec in workers] == expected


@pytest.mark.parametrize(
    ("sizes", "wire", "visible", "expected"),
    [
        pytest.param({}, {}, 1, True, id="one GPU for all"),
        pytest.param({}, {}, 2, False, id="a GPU of its own"),
        pytest.param({"processes": 2}, {}, 2, False, id="one worker of two shares the learner's"),
        pytest.param({}, {"shared_memory": False}, 1, False, id="nothing is read in place"),
    ],
)
def test_engines_beside_the_learner_on_the_only_gpu_read_weights_in_place(
    sizes: Mapping[str, int], wire: Mapping[str, bool], visible: int, expected: bool
) -> None:
    run = config(**sizes)
    run = run.model_copy(update={"wire": run.wire.model_copy(update=wire), "evaluation": EvaluationConfig(every=5)})
    started = [spec for spec in process_specs(run, {}) if spec.name.startswith(("worker", "evaluator"))]
    assert {reads_in_place(run, spec.environment, visible) for spec in started} == {expected}
    assert not reads_in_place(run, {}, visible), "whoever starts a worker alone may have its learner elsewhere"


def test_weights_that_such_an_engine_cannot_read_in_place_come_to_host_memory() -> None:
    gpu = torch.device("cuda", 0)
    for in_place, memory in ((True, CPU), (False, gpu)):
        engine = MegatronEngine(
            SHAPE, TOKENIZER, WorkerConfig(), GenerationArgs(), device=gpu, seed=1, dtype=torch.bfloat16, in_place=in_place
        )
        assert placement_of(engine).memory_of(0) == memory


def test_engines_of_several_gpus_receive_weights_there() -> None:
    gpus = tuple(torch.device("cuda", number) for number in range(2, 6))
    for num_parcels, memory in ((4, gpus), (0, (CPU,))):
        engines = EngineFleet(
            SHAPE, TOKENIZER, TOKENIZER_CONFIG, WorkerConfig(engines=2, tensor=2), GenerationArgs(),
            devices=gpus, seed=0, environment={}, dtype=torch.bfloat16, num_parcels=num_parcels,
        )  # fmt: skip
        assert placement_of(engines) == Placement(devices=memory, is_shared=True)
        assert engines.device == memory[0]


def test_a_worker_started_alone_begins_at_the_first_gpu() -> None:
    assert worker_gpus(config(learner=4, engines=2), {}, 8) == [0, 1]


def test_workers_on_a_cpu_are_not_told_of_gpus() -> None:
    assert all(WORKER_INDEX not in spec.environment for spec in process_specs(config("cpu", processes=2), {}))


def test_too_few_gpus_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"worker\.engines \(2\) x worker\.tensor \(2\) need 4 GPUs, and this process sees 2"):
        worker_gpus(config(engines=2, tensor=2), {}, 2)


def test_experts_that_the_ranks_of_an_engine_cannot_divide_are_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"expert \(2\) must divide tensor \(3\)"):
        WorkerConfig(tensor=3, expert=2)
    with pytest.raises(ConfigError, match=r"worker\.expert \(2\) must divide the number of experts in a layer \(1\)"):
        check_worker_ranks(SHAPE, 2, 2)
    check_worker_ranks(replace(SHAPE, experts=Experts(number=6, per_token=2, ffn=8, layers=(0,))), 2, 2)


# -- what travels -----------------------------------------------------------------------------------------------------------


def test_messages_arrive_as_they_were_sent() -> None:
    completion = Completion(
        token_ids=np.array([5, 6], np.int32),
        logprobs=np.array([-0.1, -2.5], np.float32),
        versions=(VersionSpan(version=3, start=0, stop=2),),
        stop_reason=StopReason.STOP,
        text="ab",
    )
    args = GenerationArgs(max_tokens=4, temperature=0.0, stop=("a",), seed=2**63 - 1)
    request = Generate(id=1, prompt=(1, 2), args=args)
    order = Submit(id=2, prompt=(3,), sampling=resolve(args, prompt_length=1, context_tokens=9))
    near, far = socket.socketpair()
    with near, far:
        sender, receiver = SocketPipe(near), SocketPipe(far)
        for message in (request, order, RequestDone(id=1, completion=completion)):
            sender.send(message)
        assert (receiver.receive(), receiver.receive()) == (request, order)
        arrived = receiver.receive().completion
        near.shutdown(socket.SHUT_WR)
        assert receiver.receive() is None
    for name in ("token_ids", "logprobs"):
        assert getattr(arrived, name).dtype == getattr(completion, name).dtype
        assert getattr(arrived, name).tolist() == getattr(completion, name).tolist()
    assert (arrived.versions, arrived.text) == (completion.versions, completion.text)
    assert arrived.stop_reason is StopReason.STOP


SPECS = [ParameterSpec(name="a", shape=(3,), dtype="bfloat16"), ParameterSpec(name="b", shape=(6, 5), dtype="float32")]
GIVEN = {"a": torch.arange(3).bfloat16(), "b": torch.randn(6, 5)}


class Received:
    """`GIVEN` in two parcels; other processes can open the second only if `all_shared`."""

    def __init__(self, *, all_shared: bool) -> None:
        matrix = Box.whole(SPECS[1])
        layout = plan_layout(SPECS, {0: [Box.whole(SPECS[0]), matrix.cut(0, 3)], 1: [matrix.cut(3, 6)]})
        self.memories = [
            ParcelMemory(parcel.num_bytes, CPU, shared=all_shared or not number) for number, parcel in enumerate(layout.parcels)
        ]
        for memory, parcel in zip(self.memories, layout.parcels, strict=True):
            for each in parcel.slices:
                rows = GIVEN[each.box.name][each.box.start[0] :][: each.box.rows].contiguous()
                memory.data[each.offset : each.offset + each.num_bytes] = rows.view(torch.uint8).flatten()
        self.weights = ReceivedWeights(layout, [each.data for each in self.memories], memories=self.memories)


def opened(shared: SharedWeights, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Read what a rank reads."""
    layout, addresses = shared.describe(weights)
    return SharedVersion(SharedParcels(layout=layout.to_json(), addresses=addresses), WeightReader(CPU))()


def test_ranks_read_the_weights_of_their_worker() -> None:
    shared, partly, wholly = SharedWeights(SPECS), Received(all_shared=False), Received(all_shared=True)
    for weights in (GIVEN, partly.weights, wholly.weights):
        found = opened(shared, weights)
        assert set(found) == set(GIVEN)
        assert all(torch.equal(found[name], tensor) for name, tensor in GIVEN.items())
    shared.close()


def test_received_weights_are_read_where_they_lie() -> None:
    received, shared = Received(all_shared=True), SharedWeights(SPECS)
    found = opened(shared, received.weights)
    received.weights["a"][:] = 7
    assert found["a"].tolist() == [7, 7, 7]


def test_weights_that_a_rank_cannot_open_end_it_with_the_way_out() -> None:
    layout, _ = SharedWeights(SPECS).describe(Received(all_shared=True).weights)
    told = SharedParcels(layout=layout.to_json(), addresses=["/proc/1/fd/4093", "/proc/1/fd/4094"])
    with pytest.raises(ServiceStopped, match=r"cannot open the weights .*/proc/1/fd/4093.*wire\.shared_memory: false"):
        SharedVersion(told, WeightReader(CPU))()


# -- who must agree ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_came_to_other_tokens_stops_before_it_computes_with_them() -> None:
    settings = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8)
    core = LockstepCore(
        shape=SHAPE, tokenizer=TOKENIZER, worker=settings, device=CPU, dtype=torch.float32, seed=7, layer_spec="local"
    )
    leader, follower = socket.socketpair()
    with leader, follower:
        orders = SocketPipe(leader)
        orders.send(Submit(id=0, prompt=(5,), sampling=resolve(GenerationArgs(), prompt_length=1, context_tokens=32)))
        orders.send(StepOrder(state=0))
        try:
            with pytest.raises(ServiceStopped, match="other tokens"):
                follow(core, SocketPipe(follower), WeightReader(CPU))
            assert core.metrics.steps == 0
        finally:
            core.close()


def test_tensor_ranks_that_do_not_divide_the_model_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"worker\.tensor \(4\) must divide the model's kv_heads \(2\) and ffn \(16\)"):
        EngineFleet(
            SHAPE, TOKENIZER, TOKENIZER_CONFIG, WorkerConfig(tensor=4), GenerationArgs(),
            devices=[CPU] * 4, seed=0, environment={},
        )  # fmt: skip
