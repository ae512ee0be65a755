"""An environment behind a socket is the same environment: token by token, failure by failure."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError
from async_rl.protocols import EpisodeContext, GenerationArgs, GroupAgent, InferenceInterface, Prompt
from async_rl.testing import ScriptedInference
from async_rl.types import Completion, Rollout, Task, Ticket, VersionSpan
from rollout_workers.episodes.episode import play, play_group, pose_task
from rollout_workers.episodes.task_mix import TaskSource
from rollout_workers.registry import build_agent
from rollout_workers.remote.client import RemoteAgent
from rollout_workers.remote.server import EnvironmentServer
from rollout_workers.remote.wire import pack
from tests.scenarios.environments import remote_environments as environments
from tests.support.run_processes import stood_still
from tests.support.waiting import PATIENCE_S

HERE = environments.__name__


class Model(ScriptedInference):
    """Weights flip in the middle of every answer."""

    async def generate(self, prompt: Prompt, args: GenerationArgs | None = None, **_: Any) -> Completion:
        done = await super().generate(prompt, args)
        half, length = len(done.token_ids) // 2, len(done.token_ids)
        spans = [VersionSpan(version=v, start=a, stop=b) for v, a, b in ((3, 0, half), (4, half, length)) if a < b]
        logprobs = -np.arange(1, length + 1, dtype=np.float32) / 7
        return Completion(
            token_ids=done.token_ids,
            logprobs=logprobs,
            versions=tuple(spans),
            stop_reason=done.stop_reason,
            text=done.text,
        )


def context(index: int = 0, sibling: int = 0, policies: Mapping[str, InferenceInterface] | None = None) -> EpisodeContext:
    ticket = Ticket(id="t0", task_index=index, version=0, attempt=1, mix="abc")
    return EpisodeContext(ticket=ticket, sibling=sibling, seed=10 * sibling, policies=policies if policies is not None else {})


@asynccontextmanager
async def served(type_name: str, *, seed: int = 5, **options: Any) -> AsyncIterator[RemoteAgent]:
    server = EnvironmentServer(section=EnvironmentConfig(type=type_name), **options).listening()
    async with server as url, RemoteAgent(name="far", seed=seed, url=url) as agent:
        yield agent


async def posed(agent: Any, index: int = 0) -> Task:
    task = await pose_task(TaskSource(environment=EnvironmentConfig(type="far"), agent=agent, index=index))
    assert isinstance(task, Task), task
    return task


async def played(agent: Any, model: InferenceInterface, timeout_s: float = PATIENCE_S, **more: Any) -> Rollout:
    return await play(agent.rollout, await posed(agent), model, context(**more), timeout_s=timeout_s)


def plain(rollout: Rollout) -> Any:
    """With arrays as lists, so that they compare; numbers keep every bit."""
    return json.loads(json.dumps(asdict(rollout), default=lambda array: array.tolist()))


async def test_an_episode_is_the_same_here_and_there():
    here = build_agent(EnvironmentConfig(type="guess_number", name="far", args={"highest": 99}), seed=5)
    said = iter(["50", "25", "12", "6"] * 2)
    model = Model(lambda text: next(said))
    section = EnvironmentConfig(type="guess_number", args={"highest": 99})
    async with EnvironmentServer(section=section).listening() as url, RemoteAgent(name="far", seed=5, url=url) as there:
        assert [await posed(there, index) for index in range(3)] == [await posed(here, index) for index in range(3)]
        assert not isinstance(there, GroupAgent)
        mine, theirs = await played(here, model), await played(there, model)
    assert plain(theirs) == plain(mine)
    assert theirs.samples[0].logprobs.dtype == np.float32
    assert {span.version for span in theirs.samples[0].versions} == {3, 4}


async def test_siblings_are_played_together():
    async with served(f"{HERE}:Siblings") as agent:
        assert isinstance(agent, GroupAgent)
        contexts = [context(sibling=sibling) for sibling in range(3)]
        rollouts = await play_group(agent, await posed(agent, 7), Model(lambda text: "7"), contexts, timeout_s=PATIENCE_S)
    assert [rollout.reward for rollout in rollouts] == [0, 2, 4]


async def test_each_run_has_an_agent_of_its_own_that_is_opened_once():
    async with (
        EnvironmentServer(section=EnvironmentConfig(type=f"{HERE}:Keeps")).listening() as url,
        RemoteAgent(name="a", seed=1, url=url) as one,
        RemoteAgent(name="a", seed=2, url=url) as other,
    ):
        mine = [(await posed(one, index)).prompt for index in range(20)]
        theirs = [(await posed(other, index)).prompt for index in range(20)]
        assert (await played(one, Model(lambda text: "22"))).reward == 2
        assert mine != theirs
        assert sorted(environments.entered) == ["a/1", "a/2"]
    assert environments.entered == []


async def test_the_deadline_here_ends_the_episode_there():
    environments.cancelled.clear()
    async with served(f"{HERE}:Hangs") as agent:
        rollout = await played(agent, Model(lambda text: "1"), timeout_s=3)
        assert rollout.failure is not None
        assert rollout.failure.boundary == "deadline"
        async with asyncio.timeout(PATIENCE_S):
            await environments.cancelled.wait()


async def test_a_generation_that_is_given_up_there_is_cancelled_here():
    given_up = asyncio.Event()

    async def answer(text: str) -> str:
        if "n" in text:
            try:
                await asyncio.Future[str]()
            finally:
                given_up.set()
        await given_up.wait()  # while the episode goes on
        return "0"

    async with served(f"{HERE}:Impatient") as agent:
        assert (await played(agent, Model(answer))).reward == 1


async def test_a_server_that_goes_away_is_a_failed_episode():
    generating = asyncio.Event()

    async def answer(text: str) -> str:
        generating.set()
        return await asyncio.Future[str]()

    async with leaving_server() as (agent, leave):
        playing = asyncio.create_task(played(agent, Model(answer)))
        await generating.wait()
        await leave()
        rollout = await playing
        assert rollout.failure is not None
        assert (rollout.failure.boundary, rollout.failure.kind) == ("environment", "EnvironmentServerFailed")
        again = await play(
            agent.rollout, Task(key="k", environment="far", prompt="1="), Model(str), context(), timeout_s=PATIENCE_S
        )
        assert again.failure is not None
        assert "the environment server at http://127.0.0.1" in again.failure.message


@asynccontextmanager
async def leaving_server() -> AsyncIterator[tuple[RemoteAgent, Any]]:
    server = EnvironmentServer(section=EnvironmentConfig(type=f"{HERE}:Hangs")).listening()
    url = await server.__aenter__()
    async with RemoteAgent(name="far", url=url) as agent:
        yield agent, lambda: server.__aexit__(None, None, None)


async def test_failures_keep_their_boundary_and_their_words():
    async with served(f"{HERE}:Refuses") as agent:
        raised = await played(agent, Model(str))
        assert raised.failure is not None
        assert (raised.failure.boundary, raised.failure.kind) == ("environment", "LookupError")
        assert "no such room (remote_environments.py:" in raised.failure.message

    def breaks(text: str) -> str:
        raise OSError("the engine is gone")

    async with served(f"{HERE}:Chatty") as agent:
        broken = await played(agent, Model(breaks))
        assert broken.failure is not None
        assert broken.failure.boundary == "inference"
        assert "OSError: the engine is gone" in broken.failure.message


async def test_a_full_context_is_told_to_the_agent_there():
    async with served(f"{HERE}:Chatty") as agent:
        rollout = await played(agent, Model(lambda text: "1", context_tokens=40))
    assert rollout.status == "truncated"
    assert 36 <= len(rollout.samples[0]) <= 40


async def test_policies_are_asked_by_their_names():
    async with served(f"{HERE}:Judged") as agent:
        rollout = await played(agent, Model(lambda text: "0"), policies={"judge": Model(lambda text: "8")})
    assert rollout.reward == 8


async def test_who_does_not_know_the_token_may_not_play(tmp_path: Path):
    file = tmp_path / "token"
    async with EnvironmentServer(section=EnvironmentConfig(type="counting"), token="right").listening() as url:
        for written in ("wrong\n", None):
            file.write_text(written if written is not None else "")
            with pytest.raises(ConfigError, match="does not know this token"):
                async with RemoteAgent(name="far", url=url, token_file=str(file) if written is not None else ""):
                    pass
        file.write_text("right\n")
        async with RemoteAgent(name="far", url=url, token_file=str(file)) as agent:
            assert (await posed(agent)).environment == "far"
        async with ClientSession() as stranger:
            for path in ("/play", "/task", "/hello"):
                assert (await stranger.get(f"{url}{path}")).status == 401


async def test_a_server_beyond_this_machine_needs_a_token():
    with pytest.raises(ConfigError, match="give --token-file"):
        async with EnvironmentServer(section=EnvironmentConfig(type="counting")).listening(host="0.0.0.0"):
            pass


async def test_another_schema_is_refused_at_the_first_word():
    async def hello(request: web.Request) -> web.Response:
        return web.Response(body=pack({"schema": 99}))

    application = web.Application()
    application.add_routes([web.get("/hello", hello)])
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    with pytest.raises(ConfigError, match="speaks schema 99 and this worker 1"):
        async with RemoteAgent(name="far", url=url):
            pass
    await runner.cleanup()
    with pytest.raises(ConfigError, match="`async-rl env serve` starts a server"):
        async with RemoteAgent(name="far", url=url):
            pass


@pytest.mark.parametrize("rubbish", [b"", b"\x93", b"\x80", pack({"schema": 7}), pack({"schema": 1, "task": 3}), b"x" * 1000])
async def test_rubbish_is_refused_and_the_server_goes_on(rubbish: bytes):
    async with EnvironmentServer(section=EnvironmentConfig(type="counting")).listening() as url, ClientSession() as session:
        async with session.ws_connect(f"{url}/play") as socket:
            await socket.send_bytes(rubbish)
            async with asyncio.timeout(PATIENCE_S):
                assert (await socket.receive()).data is not None
        assert (await session.get(f"{url}/task")).status == 400
        async with RemoteAgent(name="far", url=url) as agent:
            assert (await played(agent, Model(lambda text: "1"))).failure is None


async def test_no_more_episodes_than_the_server_may_play():
    async with served(f"{HERE}:Hangs", max_episodes=0) as agent:
        rollout = await played(agent, Model(str))
    assert rollout.failure is not None
    assert "refuses to play (503)" in rollout.failure.message


WITHOUT_THE_REST = """
import runpy, sys
sys.modules.update(dict.fromkeys(["torch", "megatron", "redis", "transformers", "safetensors", "xxhash", "zstandard"]))
sys.argv = ["remote", *sys.argv[1:]]
runpy.run_module("rollout_workers.remote", run_name="__main__", alter_sys=True)
"""


@contextmanager
def server_process(*words: str) -> Iterator[str]:
    """A server in a process that has none of the run's heavy libraries; the words that it prints."""
    line = [sys.executable, "-P", "-c", WITHOUT_THE_REST, *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0, process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_process_is_checked_from_elsewhere():
    with server_process("counting", "--args", '{"length": 4}') as said:
        url = said.partition("url: ")[2].strip().rstrip("}")
        arguments = json.dumps({"url": url})
        line = [sys.executable, "-P", "-m", "rollout_workers.checking", "remote", "--episodes", "1", "--args", arguments]
        done = subprocess.run(line, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0 or stood_still(done), done.stdout + done.stderr
    assert "remote/0/0, answered by right: ok, reward 1" in done.stdout
