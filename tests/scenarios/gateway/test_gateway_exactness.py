"""Agents talk through the gateway with the real engine while its weights change: rows are what was sampled, token by token.

The agents do what agents do: call tools, ask for several answers, go back and take another turn, rewrite what was said,
and repeat messages in the spelling of their SDK.
"""

import asyncio
import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import ClientSession

from async_rl.config.rollout import GatewayConfig, WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Prompt
from async_rl.tokenization.tokenizers import HuggingFace
from async_rl.types import Completion, Sample, ToolCall
from rollout_workers.chat.tool_calls import write
from rollout_workers.gateway import HttpGateway, open_gateway
from rollout_workers.inference.engine import MegatronEngine
from tests.support.full_parameters import gather_full
from tests.support.packed_outputs import completion_logprobs
from tests.support.small_tokenizer import make_tokenizer

CPU = torch.device("cpu")
TEMPERATURE = 0.8
EPISODES, TURNS, SWAPS = 6, 5, 5
CALLS = [write([ToolCall(name="add", arguments=json.dumps({"a": number}))]) for number in range(60)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Weights = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFace:
    return HuggingFace(make_tokenizer(tmp_path_factory.mktemp("tokenizer"), words=CALLS))


@dataclass
class Recorder:
    """The engine, remembering what it was asked and what it returned; new weights come between its answers."""

    engine: MegatronEngine
    swaps: list[tuple[int, Weights]]
    tokenizer: HuggingFace
    recorded: list[tuple[list[int], Completion]] = field(default_factory=list)
    asked: int = 0

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        self.asked += 1
        if self.asked % 6 == 0 and self.swaps:
            await self.engine.swap(*self.swaps.pop(0))
        completion = await self.engine.generate(prompt, args)
        self.recorded.append(([token for token in prompt if isinstance(token, int)], completion))
        return completion


class RandomAgent:
    def __init__(self, http: ClientSession, base_url: str, chance: random.Random) -> None:
        self._http = http
        self._url = base_url + "/chat/completions"
        self._chance = chance
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": self._words()}]

    async def talk(self) -> None:
        for turn in range(TURNS):
            body = {
                "messages": self._messages,
                "tools": TOOLS,
                "max_tokens": self._chance.randint(1, 24),
                "n": self._chance.choice([1, 1, 2]),
                "stop": self._chance.choice([None, ["e"], ["</tool_call>"]]),
                "tool_choice": self._chance.choice(["auto", "auto", "none"]),
            }
            async with self._http.post(self._url, json=body) as response:
                answered = await response.json()
            assert response.status == 200, answered
            self._reply(self._chance.choice(answered["choices"])["message"])
            self._change_history(turn)

    def _reply(self, said: dict[str, Any]) -> None:
        calls = said.get("tool_calls", [])
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, indent=self._chance.choice([None, 2]))
        content = said["content"] if said["content"] is not None else self._chance.choice(["", None])
        self._messages = [
            *self._messages,
            {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})},
        ]
        self._messages += [{"role": "tool", "tool_call_id": call["id"], "content": self._words()} for call in calls]
        if not calls:
            self._messages.append({"role": "user", "content": self._words()})

    def _change_history(self, turn: int) -> None:
        """By chance, but each of them at least once."""
        what = {0: "branch", 2: "fork"}.get(turn, self._chance.choice(["branch", "fork", *["go on"] * 4]))
        if what == "branch":  # back to an earlier question
            users = [position for position, message in enumerate(self._messages[:-1]) if message["role"] == "user"]
            self._messages = self._messages[: self._chance.choice(users) + 1]
        elif what == "fork":  # other words for what was asked first
            self._messages[0] = {**self._messages[0], "content": f"{turn} {self._words()}"}

    def _words(self) -> str:
        return " ".join(self._chance.choices(["search", "two", "é", "<tool_call>", "", "\n"], k=3))


async def talked(gateway: HttpGateway, recorder: Recorder, http: ClientSession, chance: random.Random) -> tuple[Sample, ...]:
    args = GenerationArgs(temperature=TEMPERATURE)
    async with gateway.session(recorder, args) as session:  # pyright: ignore[reportArgumentType]
        await RandomAgent(http, session.base_url, chance).talk()
    return session.samples()


@pytest.mark.parametrize("kv", ["keep", "recompute"])
async def test_rows_are_what_was_sampled_and_the_learner_s_model_agrees(tokenizer: HuggingFace, kv: str):
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    shape = ModelShape(
        hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=tokenizer.vocab_size,
        max_positions=2048, rope_theta=1e4, init_std=0.3,
    )  # fmt: skip
    weights = [weights_of(shape, version) for version in range(SWAPS + 1)]
    worker = WorkerConfig.model_validate({"kv_cache_gb": 0.05, "kv_block_tokens": 16, "kv_on_swap": kv})
    defaults = GenerationArgs(max_tokens=24, temperature=1.0, top_p=1.0, top_k=0, stop=())
    engine = MegatronEngine(shape, tokenizer, worker, defaults, device=CPU, seed=seed)
    async with (
        engine,
        open_gateway(GatewayConfig(), context_tokens=shape.max_positions, run_token="") as gateway,
        ClientSession() as http,
        asyncio.TaskGroup() as tasks,
    ):
        await engine.swap(0, weights[0])
        recorder = Recorder(engine, list(enumerate(weights))[1:], tokenizer)
        episodes = [
            tasks.create_task(talked(gateway, recorder, http, random.Random(seed + number))) for number in range(EPISODES)
        ]
    rows = [row for episode in episodes for row in episode.result()]

    assert sum(row.num_sampled for row in rows) == sum(len(completion.token_ids) for _, completion in recorder.recorded)
    for prompt, completion in recorder.recorded:
        assert any(is_trained_in(row, prompt, completion) for row in rows)
    assert any(len(completion.versions) > 1 for _, completion in recorder.recorded), "no swap came in the middle"
    assert gateway.counters.forks >= EPISODES
    assert len(rows) >= EPISODES + gateway.counters.forks + EPISODES, "nobody branched"

    differences = [difference for row in rows for difference in logprob_differences(shape, weights, row, kv)]
    assert max(differences) < 1e-4


def is_trained_in(row: Sample, prompt: Sequence[int], completion: Completion) -> bool:
    start, stop = len(prompt), len(prompt) + len(completion.token_ids)
    spans = [(span.version, max(span.start, start), min(span.stop, stop)) for span in row.versions]
    return (
        row.token_ids[:stop].tolist() == [*prompt, *completion.token_ids.tolist()]
        and bool(row.loss_mask[start:stop].all())
        and np.array_equal(row.logprobs[start:stop], completion.logprobs)
        and [(version, begin - start, end - start) for version, begin, end in spans if begin < end]
        == [(span.version, span.start, span.stop) for span in completion.versions]
    )


def weights_of(shape: ModelShape, seed: int) -> Weights:
    parallel.initialize(device=CPU)
    full = gather_full(build_model(shape, device=CPU, dtype=torch.float32, seed=seed), shape)
    assert full is not None
    return full


def logprob_differences(shape: ModelShape, weights: Sequence[Weights], row: Sample, kv: str) -> list[float]:
    """Of every token against a fresh forward pass of its row under the weights that sampled it.

    With kept keys and values, what follows a swap in the middle of a generation saw a prefix that no single version
    computes; those tokens are left out.
    """
    differences: list[float] = []
    for position, span in enumerate(row.versions):
        went_on = position > 0 and row.versions[position - 1].stop == span.start
        if went_on and kv == "keep":
            continue
        model = build_model(shape, device=CPU, dtype=torch.float32, seed=0)
        load_full(model, shape, weights[span.version])
        before, sampled = row.token_ids[: span.start].tolist(), row.token_ids[span.start : span.stop]
        found = completion_logprobs(model, before, sampled, temperature=TEMPERATURE)
        differences += np.abs(found - row.logprobs[span.start : span.stop]).tolist()
    return differences
