"""Every kind of agent with the Megatron engine on a CPU: it hands in what the engine sampled, fit to be trained on."""

import itertools
import json
import string
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from async_rl.megatron import parallel
from async_rl.megatron.model import build_model
from async_rl.models.shape import ModelShape
from async_rl.protocols import Agent, EpisodeContext, GenerationArgs, GroupAgent, InferenceInterface, Prompt
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion, Message, Rollout, RolloutGroup, Status, Task, Ticket, ToolCall
from buffer.payloads.validation import problem_with
from rollout_workers.agents import (
    BestAndWorstAgent,
    DatasetAgent,
    Game,
    GroupRewardAgent,
    HeadToHeadAgent,
    MultiTaskMember,
    PassAtEvaluationAgent,
    RewardOnlyAgent,
    SelfPlayAgent,
    ToolAgent,
    TwoPromptsAgent,
    multi_task,
)
from rollout_workers.agents.group_reward import ranked
from rollout_workers.environments.guess_number import GuessNumber
from rollout_workers.episodes.episode import play, play_group
from tests.support.engine_stage import CPU, engine
from tests.support.full_parameters import gather_full

TOKENIZER = Characters(string.printable)
SHAPE = ModelShape(
    hidden=32, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=TOKENIZER.vocab_size, max_positions=256,
    rope_theta=1e4, init_std=0.3,
)  # fmt: skip
SIBLINGS = 4


class Recording:
    """The engine, and all that it sampled."""

    returns = "logprobs"

    def __init__(self, inference: InferenceInterface) -> None:
        self._inference = inference
        self.tokenizer = inference.tokenizer
        self.said: list[tuple[list[int], Completion]] = []
        """After which ids."""

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None) -> Completion:
        completion = await self._inference.generate(prompt, args)
        self.said.append(([int(token) for token in prompt], completion))  # pyright: ignore[reportArgumentType]
        return completion


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def megatron() -> AsyncIterator[InferenceInterface]:
    parallel.initialize(device=CPU)
    weights = gather_full(build_model(SHAPE, device=CPU, dtype=torch.float32, seed=1), SHAPE)
    assert weights is not None
    defaults = GenerationArgs(max_tokens=6, temperature=1.0, top_p=1.0, top_k=0, stop=())
    async with engine(shape=SHAPE, tokenizer=TOKENIZER, sampling=defaults) as running:
        await running.swap(3, weights)
        yield running


# -- one of each kind, small enough for a model that only babbles -------------------------------------------------------
class Babble(RewardOnlyAgent):
    """Worth how far through the alphabet it gets."""

    def task(self, index: int) -> Task:
        return self.new_task(index, f"say {index}:")

    def reward(self, task: Task, response: str) -> float:
        return sum(map(ord, response)) / 1000


class Ranked(Babble, GroupRewardAgent):
    def group_reward(self, task: Task, rollouts: Sequence[Rollout], context: EpisodeContext) -> Sequence[float]:
        return ranked([rollout.reward for rollout in rollouts])


class BestOf(Babble, BestAndWorstAgent):
    pass


class Hinted(TwoPromptsAgent):
    def task(self, index: int) -> Task:
        return self.new_task(index, (Message(role="user", content=f"{index}+1"),))

    def chosen(self, task: Task) -> str | tuple[Message, ...]:
        return (Message(role="system", content="think"), *self.rejected(task))

    def rejected(self, task: Task) -> tuple[Message, ...]:
        assert not isinstance(task.prompt, str)
        return task.prompt


class Duel:
    """Two moves each, and the last word that is higher wins."""

    seats = 2

    def __init__(self) -> None:
        self.words: list[str] = []

    @property
    def seat(self) -> int:
        return len(self.words) % 2

    @property
    def is_over(self) -> bool:
        return len(self.words) == 4

    def observe(self) -> str:
        return f"heard {self.words[-1] if self.words else ''}:"

    def is_legal(self, move: str) -> bool:
        return True

    def act(self, move: str) -> None:
        self.words.append(move)

    def returns(self) -> Sequence[float]:
        return [1.0, -1.0] if self.words[2] > self.words[3] else [-1.0, 1.0]


class DuelWithItself(SelfPlayAgent):
    def task(self, index: int) -> Task:
        return self.new_task(index, "duel")

    def game(self, task: Task) -> Game:
        return Duel()


class DuelWithAnother(HeadToHeadAgent):
    def task(self, index: int) -> Task:
        return self.new_task(index, "duel")

    def game(self, task: Task) -> Game:
        return Duel()


def code(letter: str) -> int:
    """The number of a letter."""
    return ord(letter)


class Caller(ToolAgent):
    """Whatever is said calls a tool with its first letter: a model that babbles writes no JSON."""

    max_turns = 3

    def task(self, index: int) -> Task:
        return self.new_task(index, "call")

    def tools(self) -> Sequence[Callable[[str], int]]:
        return [code]

    def read(self, text: str) -> Message:
        calls = (ToolCall(name="code", arguments=json.dumps({"letter": text[:1]}), id="call_0"),)
        return Message(role="assistant", content=text, tool_calls=calls)

    def reward(self, task: Task, response: str) -> float:
        return len(response)


def dataset(folder: Path) -> DatasetAgent:
    (folder / "sums.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n')
    return DatasetAgent(name="sums", path=str(folder / "sums.jsonl"), scoring="contains")


AGENTS: dict[str, Callable[[Path], Agent]] = {
    "several turns": lambda folder: GuessNumber(name="guess", max_turns=3),
    "group reward": lambda folder: Ranked(name="ranked"),
    "best and worst": lambda folder: BestOf(name="best", candidates=3),
    "two prompts": lambda folder: Hinted(name="hinted"),
    "self-play": lambda folder: DuelWithItself(name="duel"),
    "head-to-head": lambda folder: DuelWithAnother(name="duel", opponent="rival"),
    "tools": lambda folder: Caller(name="caller"),
    "dataset": dataset,
    "mix": lambda folder: multi_task(
        [MultiTaskMember(name="a", agent=Babble(name="a")), MultiTaskMember(name="duel", agent=DuelWithItself(name="duel"))],
        name="mix",
    ),
    "pass@k": lambda folder: PassAtEvaluationAgent(agent=Babble(name="babble"), k=(1, 2)),
}


@dataclass(frozen=True, kw_only=True)
class Played:
    rollouts: Sequence[Rollout]
    said: Sequence[tuple[list[int], Completion]]


async def played(agent: Agent, model: InferenceInterface, index: int) -> Played:
    """A group of it, as a worker plays it."""
    recording = Recording(model)
    ticket = Ticket(id=f"t{index}", task_index=index, version=3, attempt=1)
    contexts = [
        EpisodeContext(ticket=ticket, sibling=sibling, seed=sibling, policies={"rival": model}) for sibling in range(SIBLINGS)
    ]
    async with AsyncExitStack() as opened:
        if isinstance(agent, Caller):
            await opened.enter_async_context(agent)
        task = agent.task(index)
        if isinstance(agent, GroupAgent):
            rollouts = await play_group(agent, task, recording, contexts, timeout_s=60)
        else:
            rollouts = [await play(agent.rollout, task, recording, context, timeout_s=60) for context in contexts]
    group = RolloutGroup(id=ticket.id, task=task, rollouts=tuple(rollouts), worker="w0")
    assert problem_with(group, vocab_size=TOKENIZER.vocab_size) is None
    return Played(rollouts=rollouts, said=recording.said)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", AGENTS)
async def test_an_agent_hands_in_what_the_engine_sampled(kind: str, megatron: InferenceInterface, tmp_path: Path):
    agent = AGENTS[kind](tmp_path)
    for index in range(2):
        found = await played(agent, megatron, index)
        assert len(found.rollouts) == SIBLINGS
        assert {rollout.failure for rollout in found.rollouts} == {None}
        for rollout in found.rollouts:
            (sample,) = rollout.samples
            sampled = sampled_in(found.said, sample.token_ids.tolist())
            assert sample.loss_mask.tolist() == [int(place in sampled) for place in range(len(sample))]
            assert sample.logprobs[sample.loss_mask == 1].tolist() == [sampled[place] for place in sorted(sampled)]
            assert {span.version for span in sample.versions} == {3}


def sampled_in(said: Sequence[tuple[list[int], Completion]], row: list[int]) -> dict[int, float]:
    """Which places of a row the engine sampled, and with which log-probability."""
    logprobs: dict[int, float] = {}
    for prompt, completion in said:
        ids, start = completion.token_ids.tolist(), len(prompt)
        if row[:start] == prompt and row[start : start + len(ids)] == ids:
            logprobs |= dict(zip(itertools.count(start), completion.logprobs.tolist(), strict=False))
    return logprobs


@pytest.mark.asyncio(loop_scope="module")
async def test_groups_say_what_their_siblings_are(megatron: InferenceInterface, tmp_path: Path):
    ranks = await played(Ranked(name="ranked"), megatron, 5)
    assert sum(rollout.reward for rollout in ranks.rollouts) == pytest.approx(2)

    pairs = await played(BestOf(name="best", candidates=4), megatron, 5)
    assert len(pairs.said) == 8
    assert [rollout.metrics["chosen"] for rollout in pairs.rollouts] == [1, 0, 1, 0]
    assert all(best.reward > worst.reward for best, worst in zip(pairs.rollouts[::2], pairs.rollouts[1::2], strict=True))

    duels = await played(DuelWithItself(name="duel"), megatron, 5)
    assert [rollout.metrics["seat"] for rollout in duels.rollouts] == [0, 1, 0, 1]
    assert duels.rollouts[0].reward + duels.rollouts[1].reward == 0
    assert {rollout.metrics["turns"] for rollout in duels.rollouts} == {2}


@pytest.mark.asyncio(loop_scope="module")
async def test_tools_are_answered_between_the_turns(megatron: InferenceInterface, tmp_path: Path):
    found = await played(Caller(name="caller"), megatron, 5)
    for rollout in found.rollouts:
        told = [message for message in rollout.conversation if message.role == "tool"]
        assert len(told) == 2
        assert rollout.metrics["turns"] == 3
        first = rollout.conversation[1].content[:1]
        assert told[0].content == (str(ord(first)) if first else told[0].content)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_greedy_answer_is_greedy(megatron: InferenceInterface):
    agent = PassAtEvaluationAgent(agent=Babble(name="babble"), k=(1, 3))
    greedy = {(await played(agent, megatron, 5)).rollouts[0].conversation[-1].content for _ in range(3)}
    samples = {rollout.conversation[-1].content for rollout in (await played(agent, megatron, 5)).rollouts[1:]}
    assert len(greedy) == 1
    assert len(samples) > 1
    estimates = await agent.evaluate(range(3), megatron, samples=3)
    assert set(estimates) == {"greedy", "pass@1", "pass@3"}


@pytest.mark.asyncio(loop_scope="module")
async def test_an_opponent_leaves_nothing_to_train_on(megatron: InferenceInterface):
    found = await played(DuelWithAnother(name="duel", opponent="rival"), megatron, 5)
    assert len(found.said) == 2 * SIBLINGS  # the rival's two moves went elsewhere
    assert [rollout.metrics["seat"] for rollout in found.rollouts] == [0, 1, 0, 1]
    assert {rollout.status for rollout in found.rollouts} == {Status.OK}
