"""The agent that needs only a reward, the environments that come along, and what the documentation shows."""

import asyncio
import re
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import ContextOverflow, EpisodeContext, GenerationArgs
from async_rl.testing import AnswerFunction, ScriptedInference
from async_rl.types import Message, Rollout, Status, Task, Ticket, Turn
from rollout_workers import Environment, agent_of
from rollout_workers.agents import RewardOnlyAgent, Score
from rollout_workers.environments.counting import Counting
from rollout_workers.environments.even_digits import EvenDigits
from rollout_workers.environments.guess_number import GuessNumber
from rollout_workers.registry import build_agent
from tests.support.repository import ROOT

CONTEXT = EpisodeContext(ticket=Ticket(id="t0", task_index=0, version=0, attempt=1), sibling=0, seed=0)


async def play(agent: RewardOnlyAgent, answer: AnswerFunction, index: int = 0, context_tokens: int = 512) -> Rollout:
    inference = ScriptedInference(answer, context_tokens=context_tokens)
    return await agent.rollout(agent.task(index), inference, CONTEXT)


def in_turn(*answers: str) -> Callable[[str], str]:
    left = iter(answers)
    return lambda text: next(left)


class Talk(RewardOnlyAgent):
    """Answers back what it was made with."""

    prompt: str | tuple[Message, ...] = "a="
    observations: Sequence[str] = ()

    def task(self, index: int) -> Task:
        return self.new_task(index, self.prompt)

    async def get_observation(self, task: Task, turns: Sequence[Turn]) -> str | None:
        return self.observations[len(turns) - 1] if len(turns) <= len(self.observations) else None

    async def reward(self, task: Task, response: str) -> float | Score:
        return Score(reward=len(response), parts={"length": len(response)})


def talk(*observations: str, prompt: str | tuple[Message, ...] = "a=", max_turns: int = 64) -> Talk:
    agent = Talk(name="talk")
    agent.observations, agent.prompt, agent.max_turns = observations, prompt, max_turns
    return agent


# -- the built-in environments ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("response", "reward"),
    [("24682468", 1.0), ("2468", 0.5), ("", 0.0), ("13571357", 0.0), ("2a4b6c8d", 0.5), ("246824682468", 1.0)],
)
async def test_even_digits_pays_by_the_share_of_all_places(response: str, reward: float):
    rollout = await play(EvenDigits(name="even_digits", max_tokens=8), lambda text: response)
    assert (rollout.reward, rollout.status) == (reward, Status.OK)


def test_even_digits_poses_digits_and_an_equals_sign():
    prompts = {EvenDigits(name="even_digits").task(index).prompt for index in range(20)}
    assert len(prompts) == 20
    assert all(isinstance(prompt, str) and re.fullmatch(r"\d{7}=", prompt) for prompt in prompts)


@pytest.mark.parametrize(
    ("said", "reward"), [("4567", 1.0), ("4x67", 0.5), ("5678", 0.75), ("4890", 0.75), ("4444", 0.25), ("", 0.0), ("7531", 0.0)]
)
async def test_counting_pays_each_right_step(said: str, reward: float):
    agent = Counting(name="counting", length=4)
    index = next(index for index in range(100) if agent.task(index).prompt == "3=")
    assert (await play(agent, lambda text: said, index)).reward == reward


def test_counting_goes_around_the_clock():
    agent = Counting(name="counting", length=12)
    task = next(task for task in map(agent.task, range(100)) if task.prompt == "8=")
    assert task.answer == "901234567890"


async def test_guess_number_is_won_by_bisection():
    agent = GuessNumber(name="guess_number", highest=99, max_turns=7)

    def bisect(text: str) -> str:
        low, high = 1, 99
        for guess, answer in re.findall(r"(\d+)(higher|lower)=", text.partition("=")[2]):
            low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
        return str((low + high) // 2)

    for index in range(20):
        rollout = await play(agent, bisect, index)
        assert rollout.reward == 1.0 - (rollout.metrics["turns"] - 1) / 7
        assert rollout.reward > 0


async def test_guess_number_answers_nonsense_and_ends_without_a_hit():
    rollout = await play(GuessNumber(name="guess_number"), lambda text: "x")
    assert (rollout.reward, rollout.status, rollout.metrics["turns"]) == (0.0, Status.OK, 4)
    assert Message(role="user", content="number=") in rollout.conversation


# -- episodes ---------------------------------------------------------------------------------------------------------
turn_texts = st.text(alphabet="0123456789=abc", max_size=6)


@given(answers=st.lists(turn_texts, min_size=1, max_size=5), data=st.data())
def test_a_row_holds_exactly_what_was_asked_and_answered(answers: list[str], data: st.DataObject):
    observations = data.draw(st.lists(turn_texts, min_size=len(answers) - 1, max_size=len(answers) - 1))
    agent = talk(*observations)
    inference = ScriptedInference(in_turn(*answers))
    rollout = asyncio.run(agent.rollout(agent.task(0), inference, CONTEXT))

    tokenizer, (sample,) = inference.tokenizer, rollout.samples
    ids, mask = tokenizer.render("a="), [0] * 3
    for position, answer in enumerate(answers):
        assert inference.prompts[position] == ids
        said = [*tokenizer.encode(answer), tokenizer.end_id]
        told = tokenizer.encode(observations[position]) if position < len(observations) else []
        ids, mask = ids + said + told, mask + [1] * len(said) + [0] * len(told)
    assert sample.token_ids.tolist() == ids
    assert sample.loss_mask.tolist() == mask
    assert (sample.logprobs == -0.5 * sample.loss_mask).all()
    assert rollout.metrics == {"turns": len(answers), "length": sum(mask)}
    assert rollout.reward == len(answers[-1])
    assert rollout.reward_parts == {"length": len(answers[-1])}


async def test_weights_that_change_between_turns_are_told_apart():
    agent = talk("=")
    inference = ScriptedInference(in_turn("1", "2"))

    async def flip_then_stop(task: Task, turns: Sequence[Turn]) -> str | None:
        inference.version += 1
        return "=" if len(turns) == 1 else None

    agent.get_observation = flip_then_stop
    rollout = await agent.rollout(agent.task(0), inference, CONTEXT)
    assert [(span.version, span.start, span.stop) for span in rollout.samples[0].versions] == [(0, 3, 5), (1, 6, 8)]


async def test_a_conversation_goes_on_in_the_words_of_its_template():
    asked = (Message(role="user", content="1"),)
    agent = talk("2", prompt=asked)
    inference = ScriptedInference(in_turn("3", "4"))
    rollout = await agent.rollout(agent.task(0), inference, CONTEXT)
    tokenizer = inference.tokenizer
    reply = tokenizer.render_reply(Message(role="user", content="2"), after_end=True)
    assert inference.prompts[1] == [*tokenizer.render(asked), *tokenizer.encode("3"), tokenizer.end_id, *reply]
    assert [(message.role, message.content) for message in rollout.conversation] == [
        ("user", "1"),
        ("assistant", "3"),
        ("user", "2"),
        ("assistant", "4"),
    ]


class Short(Talk):
    def generation_args(self, task: Task) -> GenerationArgs:
        return GenerationArgs(max_tokens=3)


@pytest.mark.parametrize(
    ("answer", "is_truncation", "status"),
    [("1234", True, Status.TRUNCATED), ("1234", False, Status.OK), ("12", True, Status.OK)],
)
async def test_an_answer_cut_at_its_limit_is_truncated_where_that_matters(answer: str, is_truncation: bool, status: Status):
    agent = Short(name="short")
    agent.length_is_truncation = is_truncation
    assert (await play(agent, lambda text: answer)).status is status


async def test_only_the_last_answer_decides_about_truncation():
    agent = Short(name="short")
    agent.observations = ("=",)
    assert (await play(agent, in_turn("1234", "1"))).status is Status.OK


async def test_a_full_context_ends_the_episode_with_what_was_said():
    rollout = await play(talk("=" * 50, "="), in_turn("12", "never asked"), context_tokens=40)
    assert (rollout.status, rollout.reward, rollout.metrics["turns"]) == (Status.TRUNCATED, 2.0, 1)
    assert rollout.samples[0].loss_mask.tolist() == [0, 0, 0, 1, 1, 1]


async def test_a_prompt_that_does_not_fit_is_a_failure_not_a_reward():
    with pytest.raises(ContextOverflow, match="leaves no room"):
        await play(talk(prompt="a" * 50), in_turn("never asked"), context_tokens=40)


async def test_an_endless_environment_ends_at_max_turns():
    rollout = await play(talk(*["="] * 100, max_turns=5), lambda text: "1")
    assert (rollout.metrics["turns"], rollout.status) == (5, Status.OK)


# -- what the documentation shows -------------------------------------------------------------------------------------
def python_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL)


async def test_the_example_of_the_documentation_is_the_file_and_works():
    file = ROOT / "examples" / "my_environment.py"
    assert python_blocks()[0] == file.read_text()
    agent = build_agent(EnvironmentConfig(type=f"{file}:Backwards"), seed=0)
    task = agent.task(0)
    right = await agent.rollout(task, ScriptedInference(lambda text: task.answer), CONTEXT)
    wrong = await agent.rollout(task, ScriptedInference(lambda text: "0000"), CONTEXT)
    assert (right.reward, wrong.reward) == (1.0, 0.0)


async def test_the_multi_turn_example_of_the_documentation_works():
    names: dict[str, type[Environment]] = {}
    exec(python_blocks()[1], names)
    agent = agent_of(names["AskTwice"], name="ask_twice")
    assert (await play(agent, in_turn("9", agent.task(0).answer))).reward == 0.5


def test_trying_an_environment_without_a_model_works_as_documented():
    exec(python_blocks()[2], {})
