"""Games of several seats: who is trained, what every seat hears, and what it earns."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from async_rl.config.rollout import EnvironmentConfig
from async_rl.protocols import EpisodeContext, GroupAgent, InferenceInterface
from async_rl.testing import ScriptedInference
from async_rl.types import Message, Rollout, Status, Ticket
from rollout_workers.environments.nim import Nim, NimHeadToHead, NimSelfPlay
from rollout_workers.registry import build_agent

TICKET = Ticket(id="t0", task_index=0, version=0, attempt=1)


def context(sibling: int = 0, **policies: InferenceInterface) -> EpisodeContext:
    return EpisodeContext(ticket=TICKET, sibling=sibling, seed=sibling, policies=policies)


def heap(text: str) -> int:
    """What the last thing that was heard says."""
    return int(re.findall(r"(\d)=", text)[-1])


def master(text: str) -> str:
    """Leaves a multiple of four whenever it can, which wins."""
    return str(heap(text) % 4 or 1)


def novice(text: str) -> str:
    return "1"


def with_stones(agent: NimSelfPlay | NimHeadToHead, stones: int):
    task = agent.task(0)
    return replace(task, prompt=f"nim{stones}=", data={"stones": stones})


def test_nim_is_won_by_taking_the_last_stone():
    game = Nim(5)
    assert (game.seat, game.observe()) == (0, "nim5=")
    assert [game.is_legal(move) for move in ("1", "3", "4", "0", "", "12", "x")] == [True, True] + [False] * 5
    game.act("3")
    assert (game.seat, game.observe()) == (1, "nim2=")
    assert not game.is_legal("3")
    game.act("1")
    assert (game.seat, game.observe(), game.is_over) == (0, "1=", False)
    game.act("1")
    assert (game.is_over, game.returns()) == (True, [1, -1])


def test_nim_in_words_reads_the_number_that_ends_an_answer():
    game = Nim(5, in_words=True)
    (asked,) = game.observe()
    assert isinstance(asked, Message)
    assert "There are 5 stones" in asked.content
    moves = {"4 would lose, so I take 1.": True, "I take 0": False, "all 5": False, "none": False, "3": True}
    assert {move: game.is_legal(move) for move in moves} == moves
    game.act("Of these 5 I take 3")
    game.act("1")
    (left,) = game.observe()
    assert isinstance(left, Message)
    assert left.content == "1 stones are left. It is your move."
    assert NimSelfPlay(name="nim", chat=True).generation_args(NimSelfPlay(name="nim").task(0)).max_tokens is None


# -- self-play --------------------------------------------------------------------------------------------------------
async def self_play(answer, siblings: int, stones: int = 7) -> Sequence[Rollout]:
    agent = NimSelfPlay(name="nim")
    assert isinstance(agent, GroupAgent)
    contexts = [context(sibling) for sibling in range(siblings)]
    return await agent.rollout_group(with_stones(agent, stones), ScriptedInference(answer), contexts)


async def test_every_seat_is_trained_on_its_own_row_and_reward():
    rollouts = await self_play(master, 4)
    assert [(rollout.reward, rollout.metrics["seat"]) for rollout in rollouts] == [(1, 0), (-1, 1)] * 2
    first, second = rollouts[:2]
    assert [message.content for message in first.conversation] == ["nim7=", "3", "3=", "3"]
    assert [message.content for message in second.conversation] == ["nim4=", "1"]
    assert [rollout.num_sampled for rollout in (first, second)] == [2, 1]
    assert first.samples[0].loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 1]  # <bos> n i m 7 = 3 3 = 3
    assert {rollout.status for rollout in rollouts} == {Status.OK}


async def test_a_group_must_fill_its_tables():
    with pytest.raises(ValueError, match=r"2 seats needs a batch\.group_size that is a multiple of it, got 3"):
        await self_play(master, 3)


async def test_an_illegal_move_forfeits_and_pays_nobody_else():
    rollouts = await self_play(lambda text: "x" if heap(text) == 4 else master(text), 2)
    assert [rollout.reward for rollout in rollouts] == [0, -1]


async def test_a_seat_that_never_moved_is_part_of_the_baseline_only():
    first, second = await self_play(lambda text: "9", 2)
    assert (first.reward, first.status, first.num_sampled) == (-1, Status.OK, 1)
    assert (second.reward, second.status, second.samples) == (0, Status.MASKED, ())


async def test_a_full_context_forfeits_and_is_truncated():
    agent = NimSelfPlay(name="nim")
    inference = ScriptedInference(novice, context_tokens=9)
    rollouts = await agent.rollout_group(with_stones(agent, 9), inference, [context(0), context(1)])
    assert [(rollout.reward, rollout.status) for rollout in rollouts] == [(-1, Status.TRUNCATED), (0, Status.OK)]


async def test_a_game_that_breaks_leaves_the_other_tables_alone():
    moves = 0

    def breaks_once(text: str) -> str:
        nonlocal moves
        moves += 1
        if moves == 1:
            raise RuntimeError("spilled coffee")
        return master(text)

    rollouts = await self_play(breaks_once, 4)
    assert [rollout.status for rollout in rollouts] == [Status.FAILED, Status.FAILED, Status.OK, Status.OK]
    assert rollouts[1].failure is not None
    assert "spilled coffee" in rollouts[1].failure.message


async def test_alone_a_sibling_takes_one_of_the_seats():
    agent = NimSelfPlay(name="nim")
    rollouts = [await agent.rollout(with_stones(agent, 7), ScriptedInference(master), context(sibling)) for sibling in range(3)]
    assert [rollout.metrics["seat"] for rollout in rollouts] == [0, 1, 0]


# -- head-to-head -----------------------------------------------------------------------------------------------------
async def test_siblings_take_the_seats_in_turn_against_the_named_policy():
    agent = NimHeadToHead(name="nim", opponent="novice")
    trained, opponent = ScriptedInference(master), ScriptedInference(novice, version=9)
    rollouts = [await agent.rollout(with_stones(agent, 8), trained, context(sibling, novice=opponent)) for sibling in range(2)]
    assert [(rollout.metrics["seat"], rollout.reward) for rollout in rollouts] == [(0, 1), (1, 1)]
    for rollout in rollouts:
        assert {span.version for sample in rollout.samples for span in sample.versions} == {0}
    assert opponent.prompts


async def test_without_a_name_the_opponent_is_the_model_itself():
    agent, inference = NimHeadToHead(name="nim"), ScriptedInference(master)
    rollout = await agent.rollout(with_stones(agent, 7), inference, context())
    assert (rollout.reward, rollout.num_sampled) == (1, 2)
    assert len(inference.prompts) == 3


async def test_an_opponent_that_is_not_configured_is_named():
    agent = NimHeadToHead(name="nim", opponent="judge")
    with pytest.raises(ValueError, match=r"opponent 'judge' is not one of the configured policies \(novice\)"):
        await agent.rollout(agent.task(0), ScriptedInference(master), context(novice=ScriptedInference(novice)))


@pytest.mark.parametrize("name", ["nim", "nim_self_play"])
def test_the_games_are_found_by_name(name: str):
    agent = build_agent(EnvironmentConfig(type=name), seed=3)
    assert agent.task(5) == agent.task(5)
    assert agent.task(5).environment == name
