"""reasoning-gym, Gymnasium and TextArena, as the examples have them."""

import random
import re
import threading
from queue import SimpleQueue

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.testing import ScriptedInference
from async_rl.types import Status
from rollout_workers.episodes.episode import play
from rollout_workers.registry import build_agent
from tests.adapters.adapter_stage import contexts

REASON = "{} is not installed: make test-adapters"


async def test_the_example_of_reasoning_gym_is_played(example):
    pytest.importorskip("reasoning_gym", reason=REASON.format("reasoning-gym"))
    async with example("reasoning_gym") as stage:
        task, _ = await stage.play(index=3)
        assert stage.agent.reward(task, task.answer) == 1.0
        assert stage.agent.reward(task, "no number") == 0.0
        assert stage.agent.task(503).prompt == task.prompt, "after all puzzles the first one comes again"


async def test_the_example_of_gymnasium_is_played(example):
    pytest.importorskip("gymnasium", reason=REASON.format("gymnasium"))
    async with example("gymnasium") as stage:
        _, rollouts = await stage.play()
        for rollout in rollouts:
            opening = rollout.conversation[0].content
            assert opening.endswith("row 0, column 0")
            [row] = rollout.samples
            assert row.num_sampled >= rollout.metrics["turns"]


async def test_discrete_actions_of_gymnasium_need_no_code():
    pytest.importorskip("gymnasium", reason=REASON.format("gymnasium"))
    section = EnvironmentConfig(
        type="gymnasium", args={"id": "FrozenLake-v1", "options": {"is_slippery": False}, "chat": False}
    )
    agent = build_agent(section, seed=3)
    path = iter(["2", "I go 2", "nowhere", "7", "1", "1", "1", "2"])  # right, right, twice nonsense, down, ...
    inference = ScriptedInference(lambda text: next(path), context_tokens=2000)
    rollout = await agent.rollout(agent.task(0), inference, contexts(1)[0])
    assert (rollout.status, rollout.reward, rollout.metrics) == (Status.OK, 1.0, {"turns": 8, "no_action": 2})
    told = [message.content for message in rollout.conversation]
    assert told.count("Answer with a number from 0 to 3.") == 2


async def test_a_simulator_that_hangs_fails_its_episode_and_is_closed_once_it_returns():
    gymnasium = pytest.importorskip("gymnasium", reason=REASON.format("gymnasium"))
    stuck, release = threading.Event(), threading.Event()
    closed_on: SimpleQueue[str] = SimpleQueue()

    class Stuck(gymnasium.Env):
        action_space = observation_space = gymnasium.spaces.Discrete(3)

        def reset(self, **options):
            return 0, {}

        def step(self, action):
            stuck.set()
            release.wait()
            return 0, 0.0, True, False, {}

        def close(self):
            closed_on.put(threading.current_thread().name)

    gymnasium.register(id="Stuck-v0", entry_point=lambda **options: Stuck(), disable_env_checker=True)
    agent = build_agent(EnvironmentConfig(type="gymnasium", name="stuck", args={"id": "Stuck-v0"}), seed=3)
    assert closed_on.get_nowait() == "MainThread", "one was made to see its actions"
    inference = ScriptedInference(lambda text: "1")
    rollout = await play(agent.rollout, agent.task(0), inference, contexts(1)[0], timeout_s=0.2)
    assert rollout.failure is not None
    assert rollout.failure.boundary == "deadline"
    assert stuck.is_set()
    assert closed_on.empty()
    release.set()
    assert closed_on.get(timeout=30) == "environment stuck"


@pytest.mark.parametrize(
    ("type_name", "args", "sentence"),
    [
        ("reasoning_gym", {"dataset": "chain_some"}, "cannot make 'chain_some'"),
        ("reasoning_gym", {"dataset": "chain_sum", "options": {"min_term": 2}}, "unexpected keyword argument 'min_term'"),
        ("gymnasium", {"id": "FrozenLack-v1"}, "Did you mean: `FrozenLake`"),
        ("gymnasium", {"id": "Pendulum-v1"}, r"the actions of Pendulum-v1 are Box.*define read\(text\)"),
        ("textarena", {"id": "TicTacTo-v0"}, "cannot begin 'TicTacTo-v0' with 2 players"),
        ("textarena", {"id": "TicTacToe-v0", "players": 3}, "with 3 players"),
    ],
)
def test_mistakes_are_one_sentence(type_name: str, args: dict, sentence: str):
    pytest.importorskip(type_name, reason=REASON.format(type_name))
    with pytest.raises(ConfigError, match=sentence):
        build_agent(EnvironmentConfig(type=type_name, args=args), seed=3)


async def test_the_example_of_textarena_is_played(example):
    pytest.importorskip("textarena", reason=REASON.format("textarena"))
    async with example("textarena") as stage:
        _, rollouts = await stage.play(siblings=4)
        assert [rollout.metrics["seat"] for rollout in rollouts] == [0, 1, 0, 1]
        assert all("You are Player 0" in rollout.conversation[0].content for rollout in rollouts[::2])
        assert [rollout.reward for rollout in rollouts[::2]] == [-rollout.reward for rollout in rollouts[1::2]]


async def test_a_whole_game_of_textarena_is_told_once_to_each_seat(example):
    pytest.importorskip("textarena", reason=REASON.format("textarena"))

    def first_free_square(text: str) -> str:
        return re.findall(r"Available Moves: '\[(\d)\]'", text)[-1]

    async with example("textarena") as stage:
        model = ScriptedInference(first_free_square, tokenizer=stage.engine.tokenizer, context_tokens=10_000)
        outside = random.getstate()
        winner, loser = await stage.agent.rollout_group(stage.agent.task(0), model, contexts(2))
        assert (winner.reward, loser.reward) == (1.0, -1.0), "squares 0, 2, 4 and 6 hold a diagonal"
        told = "".join(message.content for message in winner.conversation if message.role == "user")
        assert told.count("Current Board") == winner.metrics["turns"]
        assert "[Player 1] [1]" in told
        assert "[Player 0]" not in told, "what it did itself stands in its answers"
        assert random.getstate() == outside


def test_what_a_game_draws_depends_on_nothing_but_its_task():
    pytest.importorskip("textarena", reason=REASON.format("textarena"))
    agent = build_agent(EnvironmentConfig(type="textarena", args={"id": "KuhnPoker-v0"}), seed=3)

    def story(noise: int) -> list[str]:
        game, told = agent.game(agent.task(0)), []
        while not game.is_over:
            told.append(game.observe()[0].content)
            random.seed(f"{noise}/{len(told)}")  # somebody else's
            game.act("[check]")
        return told

    assert len(story(1)) > 4, "several hands"
    assert story(1) == story(2)
