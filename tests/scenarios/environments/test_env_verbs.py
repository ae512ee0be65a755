"""`async-rl env ls | attach | detach | weight` over a run in Redis, as a person types them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from async_rl.replay_protocol import Limits
from async_rl.types import VersionRecord
from buffer.__main__ import main
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from tests.support.run_processes import finished

CONFIG = """
run: {{name: {name}, folder: {folder}}}
redis: {{url: "{url}", connect_timeout_s: 100}}
model: {{size: {{hidden: 8, layers: 1, heads: 1}}}}
environments: [{{type: even_digits, weight: 3}}]
environments_from: [mine.py, elsewhere]
batch: {{groups_per_step: 4}}
"""
T = TypeVar("T")
LIMITS = Limits(max_age=2, groups_per_step=4, lease_s=60.0, max_attempts=2)
MINE = """
from async_rl.testing import EchoAgent
class Mine(EchoAgent): pass
class Broken(EchoAgent):
    def task(self, index): return 1 / 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Env:
    """`async-rl env`, pointed at a run."""

    config: Path

    def __call__(self, *words: str) -> str:
        """What the buffer's process says, in this one."""
        with contextlib.redirect_stdout(io.StringIO()) as page:
            assert not main(["env", *words, "@", str(self.config)]), "None or 0 is success"
        return page.getvalue()

    def process(self, *words: str, code: int = 0) -> str:
        """The whole command, in the folder of its configuration: its output, or what it says of a mistake."""
        done = finished(self.config.parent, "env", *words, "@", self.config)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def rows(self) -> dict[str, dict[str, float]]:
        return {row["name"]: row for row in json.loads(self("ls", "--json"))["environments"]}


@pytest.fixture
def env(redis_server: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.format(name=run_name, folder=tmp_path, url=redis_server))
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return Env(config=config)


@pytest.fixture
def ask(redis_server: str, run_name: str) -> Callable[[Callable[[RedisBuffer], Awaitable[T]]], T]:
    """Something of the run's buffer."""

    async def asked(what: Callable[[RedisBuffer], Awaitable[T]]) -> T:
        server = Server(redis_server, patience_s=100)
        try:
            return await what(RedisBuffer(server, run_name))
        finally:
            await server.close()

    return lambda what: asyncio.run(asked(what))


async def begin(buffer: RedisBuffer) -> None:
    """A learner came, and five tasks were given."""
    fence = await buffer.acquire("learner", LIMITS)
    await buffer.recover(fence, None)
    await buffer.publish(fence, VersionRecord(version=0, timeline="t", step=0, digest=""))
    await buffer.reserve("w", version=0, count=5, wait_s=0)


def test_the_mix_of_a_run_is_changed_from_the_command_line(env: Env, ask: Any, tmp_path: Path):
    ask(begin)
    assert "from task 5 on, at once: even_digits 75.0%, Mine 25.0%" in env.process("attach", "mine.py:Mine")
    rows = env.rows()
    assert (rows["Mine"]["share"], rows["Mine"]["type"]) == (0.25, f"{tmp_path}/mine.py:Mine"), "wherever a worker was started"
    assert "in even steps until task 105: even_digits 50.0%, Mine 50.0%" in env("weight", "Mine", "3", "--ramp", "100")
    rows = env.rows()
    assert 1 < rows["Mine"]["weight"] < 1.2
    assert rows["Mine"]["later"] == 3
    assert "from task 5 on, at once: Mine 100.0%" in env("detach", "even_digits")
    page = env("ls")
    assert "the next task is number 5" in page
    assert "even_digits" in page


def test_its_share_of_a_batch_becomes_a_limit_of_the_run(env: Env, ask: Any):
    ask(begin)
    env("attach", "guess_number", "--name", "games", "--max-share", "0.3")
    assert ask(RedisBuffer.limits).quotas == {"games": 2}
    env("detach", "games")
    assert ask(RedisBuffer.limits).quotas == {}


def test_what_cannot_be_made_here_is_said_before_anything_changes(env: Env):
    assert "takes no argument 'lengths' (did you mean 'length'?)" in env.process(
        "attach", "counting", "--args", '{"lengths": 3}', code=2
    )
    assert "Broken cannot pose its first task (ZeroDivisionError: division by zero)" in env.process(
        "attach", "mine.py:Broken", code=2
    )
    allowed = "`environments_from: [subprocess]` in that file allows it"
    assert allowed in env.process("attach", "subprocess:Popen", "--args", '{"args": ["touch", "ran"]}', "--unchecked", code=2)
    assert list(env.rows()) == ["even_digits"]
    assert not (env.config.parent / "ran").exists()
    assert "Theirs" in env.process("attach", "elsewhere:Theirs", "--unchecked")
