"""The server of the example in its own Python, and our side of its wire."""

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from async_rl.testing import ScriptedInference
from async_rl.types import Status
from rollout_workers.episodes.episode import play
from tests.adapters.adapter_stage import contexts

PYTHON = os.environ.get("OPENENV_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OPENENV_PYTHON names no Python that has OpenEnv: make test-adapters")


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """It answers on a socket that listens before it has begun, so nobody has to wait for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        number = str(listening.fileno())
        server = await asyncio.create_subprocess_exec(
            *(PYTHON, "-m", "uvicorn", "--app-dir", "examples/openenv", "--log-level", "warning", "--fd", number, "server:app"),
            pass_fds=[listening.fileno()],
        )
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.terminate()
            await server.wait()


async def test_the_example_of_openenv_is_played(example):
    async with serving() as url, example("openenv", url=url) as stage:
        _, rollouts = await stage.play(siblings=4)
        for rollout in rollouts:
            assert rollout.conversation[0].content == "Guess a number from 1 to 9."
            assert rollout.metrics["turns"] == 6 or rollout.reward == 1.0

        clever = ScriptedInference(by_halves, tokenizer=stage.engine.tokenizer, context_tokens=2000)
        [context] = contexts(1)
        won = await stage.agent.rollout(stage.agent.task(0), clever, context)
        assert (won.status, won.reward) == (Status.OK, 1.0)

        strange = replace(stage.agent, action="guesses")
        told = await strange.rollout(stage.agent.task(0), clever, context)
        assert told.metrics["no_action"] == told.metrics["turns"]
        assert "Field required" in told.conversation[2].content, "what the server has against an action is what the model hears"


async def test_a_server_that_is_gone_is_a_failed_episode(example):
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    async with example("openenv", url=url) as stage:
        [context] = contexts(1)
        rollout = await play(stage.agent.rollout, stage.agent.task(0), stage.engine, context, timeout_s=60)
        assert rollout.status is Status.FAILED
        assert rollout.failure.boundary == "environment"


def by_halves(text: str) -> str:
    lowest, highest = 1, 9
    for guess, hint in re.findall(r"(\d)\s*user: (higher|lower)", text):
        lowest, highest = (int(guess) + 1, highest) if hint == "higher" else (lowest, int(guess) - 1)
    return str((lowest + highest) // 2)
