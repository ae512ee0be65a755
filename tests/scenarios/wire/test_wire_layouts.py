"""However learner and workers divide the model, every worker serves the learner's bits and finds the learner's numbers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_rl.config import CharacterTokenizer
from async_rl.config.rollout import WorkerConfig
from async_rl.protocols import GenerationArgs, Member
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.transport.receiving.receiver import WeightReceiver
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.replicas import EngineFleet
from rollout_workers.inference.rollout_engine import placement_of
from tests.scenarios.wire.wire_layouts import (
    ALL,
    CASES,
    FEW,
    MODELS,
    PROCESSES,
    Case,
    members_of,
    saved_file,
    weights_file,
    wire_of_worker,
)
from tests.support.learner_rank import CPU, VOCABULARY, shape
from tests.support.made_once import made_once
from tests.support.warm_processes import play_ranks
from tests.support.wire_board import StageBoard, board_of

pytestmark = pytest.mark.timeout(1800)

TOKENIZER_CONFIG = CharacterTokenizer(alphabet="abcdefghijklmnopqrstuvwxyz"[: VOCABULARY - 4])
TOKENIZER = open_tokenizer(TOKENIZER_CONFIG)
LENGTH = 10
PROMPTS = [[5], [7, 11, 20, 4, 9], [6] * 9]
Engine = MegatronEngine | EngineFleet


class Worker:
    """A real engine that follows learners; it answers every version with rollouts."""

    def __init__(self, name: str, model: str, engine: Engine, board: StageBoard, root: Path) -> None:
        self.name = name
        self.differences: dict[int, list[str]] = {}
        self._model, self._engine, self._board, self._root = model, engine, board, root
        member = Member(id=name, host="localhost", version=-1, device="cpu")
        wire, placement = wire_of_worker(model), placement_of(engine)
        self._receiver = WeightReceiver(board, board.store, member, engine.specs, wire, lease_s=30.0, placement=placement)
        self._served: asyncio.Queue[int] = asyncio.Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receiver.run(self._swap))
            tasks.create_task(self._answer())

    async def _swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        pushed = load_file(weights_file(self._root, self._model, version))
        wire = wire_of_worker(self._model).dtype
        self.differences[version] = [
            name
            for name in pushed.keys() | tensors.keys()
            if name not in pushed
            or name not in tensors
            or not torch.equal(tensors[name], pushed[name].bfloat16() if wire == "bfloat16" else pushed[name])
        ]
        await self._engine.swap(version, tensors)
        self._served.put_nowait(version)

    async def _answer(self) -> None:
        while True:
            version = await self._served.get()
            completions = await asyncio.gather(*(self._engine.generate(prompt) for prompt in PROMPTS))
            rollouts = [
                {"prompt": prompt, "token_ids": found.token_ids.tolist(), "logprobs": found.logprobs.tolist()}
                for prompt, found in zip(PROMPTS, completions, strict=True)
            ]
            await self._board.post("rollouts", {"member": self.name, "version": version, "rollouts": rollouts})


def engine(case: Case, tensor: int) -> Engine:
    settings = WorkerConfig(engines=1, tensor=tensor, kv_cache_gb=0.01, kv_block_tokens=8)
    # as the learner will reckon them
    sampling = GenerationArgs(max_tokens=LENGTH, temperature=case.config.sampling.temperature, top_p=1.0, top_k=0, stop=())
    if tensor == 1:
        return MegatronEngine(shape(case.config), TOKENIZER, settings, sampling, device=CPU, seed=7)
    return EngineFleet(
        shape(case.config), TOKENIZER, TOKENIZER_CONFIG, settings, sampling, devices=[CPU] * tensor, seed=7,
        environment=os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def differences_file(root: Path, member: str) -> Path:
    """By version: what was not the learner's, bit for bit."""
    return root / f"{member}.differences.json"


async def play_all(which: str, root: Path, url: str) -> None:
    """All learners of the given cases, and the workers beside them."""
    (root / "redis").write_text(url)
    of_model = {case.model: case for case in CASES[which].values()}
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
        workers: list[Worker] = []
        for model, case in of_model.items():
            board = await stack.enter_async_context(board_of(url, model))
            for name, tensor in zip(members_of(model), MODELS[model].workers, strict=True):
                running = await stack.enter_async_context(engine(case, tensor))
                workers.append(Worker(name, model, running, board, root))
        following = [tasks.create_task(worker.run(), name=worker.name) for worker in workers]
        await asyncio.to_thread(
            play_ranks,
            "tests.scenarios.wire.wire_layouts",
            which,
            root,
            ranks=PROCESSES,
            timeout_s=8 * 60 if which == "few" else 25 * 60,
        )
        for task in following:
            task.cancel()
    for worker in workers:
        differences_file(root, worker.name).write_text(json.dumps(worker.differences))


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, redis_server: str) -> Path:
    return made_once(tmp_path_factory, "wire_layouts", lambda root: asyncio.run(play_all("few", root, redis_server)))


def check(name: str, case: Case, root: Path) -> None:
    differences = {member: json.loads(differences_file(root, member).read_text()) for member in members_of(case.model)}
    notes: list[dict[str, Any]] = json.loads((root / f"{name}.json").read_text())
    for note in notes:
        assert note["staged"] == members_of(case.model)
        for member in note["staged"]:
            assert differences[member][str(note["version"])] == [], member
        assert note["tokens"] >= len(note["staged"]) * len(PROMPTS)
        assert note["gap"] < (0.05 if case.model == "half" else 1e-5), "log-probabilities of what was sampled"
        assert note["in_memory"] == [case.shared] * len(note["senders"])
        assert note["senders"] == [*range(case.ranks)], "every rank sends a share"
    first, second = (load_file(weights_file(root, case.model, note["version"])) for note in notes)
    assert any(not torch.equal(first[parameter], second[parameter]) for parameter in first), "there was something to push"
    assert not any("value_head" in parameter for parameter in first)


@pytest.mark.parametrize("name", FEW)
def test_workers_serve_what_the_learner_has(few: Path, name: str) -> None:
    check(name, FEW[name], few)


@pytest.mark.parametrize("name", [name for name, case in FEW.items() if case.resumes])
def test_a_run_goes_on_under_another_layout_at_the_same_workers(few: Path, name: str) -> None:
    first = json.loads((few / f"{name}.json").read_text())[0]["version"]
    saved, pushed = load_file(saved_file(few, FEW[name].resumes)), load_file(weights_file(few, FEW[name].model, first))
    assert saved.keys() == pushed.keys()
    assert [parameter for parameter, tensor in saved.items() if not torch.equal(tensor, pushed[parameter])] == []


@pytest.mark.slow
def test_every_layout_of_every_model(tmp_path: Path, redis_server: str) -> None:
    asyncio.run(play_all("all", tmp_path, redis_server))
    for name, case in ALL.items():
        check(name, case, tmp_path)
