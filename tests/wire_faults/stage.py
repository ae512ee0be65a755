"""The environment of a trial: a Redis, a spawner of processes, and the events that they report, in order."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from async_rl.config import WireConfig
from buffer import open_buffer
from buffer.board import RedisBoard
from tests.support.repository import module_command, module_environment
from tests.support.wire_board import board_of, config_of
from tests.wire_faults.facts import FACTS, Fact
from tests.wire_faults.network import LEARNER, Direction, in_network_of_its_own
from tests.wire_faults.strike import STRIKES

PATIENCE_S = 120.0
"""Waiting longer than this for anything is a failure."""


class NeverHappened(Exception):
    pass


class Stage:
    """One run: its learners and workers, by name. A name may live several times."""

    def __init__(self, url: str, folder: Path, wire: WireConfig, spawner: asyncio.subprocess.Process, board: RedisBoard):
        self.folder, self.wire, self.board = folder, wire, board
        self.run = folder.name
        self.facts: list[Fact] = []
        self.pids: dict[str, int] = {}
        """Of each name's newest life."""
        self._url = url
        self._spawner = spawner
        self._news = asyncio.Condition()

    async def hear(self, facts: asyncio.StreamReader) -> None:
        """Service."""
        while line := await facts.readline():
            async with self._news:
                fact = Fact.of(line.decode())
                self.facts.append(fact)
                if fact.what == "started":
                    self.pids[fact.more["name"]] = fact.more["pid"]
                self._news.notify_all()
        raise NeverHappened(f"all processes ended; {self.folder / 'spawner.log'} may say why")

    # -- what the stage does -------------------------------------------------------------------------------------------

    async def start(self, name: str, role: str, *, remote: bool = False, **more: Any) -> None:
        wire = self.wire.model_dump()
        order = {"do": "start", "role": role, "name": name, "url": self._url, "run": self.run, "wire": wire, **more}
        since = len(self.facts)
        self._order({**order, "remote": remote, "log": str(self.folder / f"{name}.log")})
        await self.see(f"{name} begins", lambda fact: fact.who == name and fact.what == "begins", since=since)

    def signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    async def strike(self, name: str, by: str, at: str, after_s: float = 0.0) -> Fact:
        """Have `name` send itself a signal at a moment of the protocol, and wait for it."""
        since = len(self.facts)
        await self.board.post(STRIKES, {"who": name, "pid": self.pids[name], "at": at, "after_s": after_s, "signal": by})
        return await self.see(f"{name} is struck at {at}", lambda fact: fact.who == name and fact.what == "struck", since=since)

    def cut(self, name: str, direction: Direction) -> None:
        self._order({"do": "cut", "name": name, "direction": direction})

    def heal(self, name: str, direction: Direction) -> None:
        self._order({"do": "heal", "name": name, "direction": direction})

    async def resign(self) -> None:
        """Give up a dead learner's lease: the trials test the wire, not the lease."""
        async with open_buffer(config_of(self._url, self.run)) as buffer:
            fence = next(fact.more["fence"] for fact in reversed(self.facts) if "fence" in fact.more)
            await buffer.resign(fence)

    # -- what it waits for ---------------------------------------------------------------------------------------------

    async def see(self, what: str, is_it: Callable[[Fact], bool], *, since: int = 0, within_s: float = PATIENCE_S) -> Fact:
        """The first such fact from number `since` on."""
        looked_at = since

        def found() -> Fact | None:
            nonlocal looked_at
            while looked_at < len(self.facts):
                looked_at += 1
                if is_it(fact := self.facts[looked_at - 1]):
                    return fact
            return None

        try:
            async with asyncio.timeout(within_s), self._news:
                while (fact := found()) is None:
                    await self._news.wait()
                return fact
        except TimeoutError:
            raise NeverHappened(f"{what}: not within {within_s:g} s") from None

    async def ended(self, name: str, *, within_s: float = PATIENCE_S) -> int:
        pid = self.pids[name]
        fact = await self.see(f"{name} ends", lambda fact: fact.what == "ended" and fact.more["pid"] == pid, within_s=within_s)
        return fact.more["code"]

    async def all_serve(self, version: int, *names: str, since: int) -> None:
        """Until each has served that version or a newer one."""
        for name in names:
            await self.see(
                f"{name} serves version {version} or a newer one",
                lambda fact, name=name: fact.who == name and fact.what == "serves" and fact.more["version"] >= version,
                since=since,
            )

    @property
    def live_version(self) -> int:
        return max((fact.more["version"] for fact in self.facts if fact.who == "buffer"), default=-1)

    def _order(self, order: Mapping[str, Any]) -> None:
        assert self._spawner.stdin is not None
        self._spawner.stdin.write((json.dumps(order) + "\n").encode())


@asynccontextmanager
async def open_stage(url: str, folder: Path, wire: WireConfig) -> AsyncIterator[Stage]:
    folder.mkdir(parents=True)
    command, environment = in_network_of_its_own(module_command("tests.wire_faults.spawner"))
    if environment:
        wire = wire.model_copy(update={"host": LEARNER, "insecure": True})
    facts_in, facts_out = os.pipe()
    with (folder / "spawner.log").open("wb") as log:
        spawner = await asyncio.create_subprocess_exec(
            *["bash", "-c", f'exec "$@" {FACTS}>&{facts_out}', "bash", *command],
            env=module_environment(**environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=(facts_out,),
        )
    os.close(facts_out)
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(facts_in, "rb")
    )
    try:
        async with board_of(url, folder.name) as board, asyncio.TaskGroup() as services:
            stage = Stage(url, folder, wire, spawner, board)
            hearing = services.create_task(stage.hear(reader))
            yield stage
            hearing.cancel()
    finally:
        with suppress(ProcessLookupError):
            spawner.kill()  # and all processes that it started
        await spawner.wait()
        transport.close()
