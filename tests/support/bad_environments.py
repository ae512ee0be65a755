"""Environments as people write them on a bad day, one mistake each."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from http.client import HTTPConnection
from urllib.parse import SplitResult, urlsplit

from async_rl.types import Task, Turn
from rollout_workers.adapters import EndpointAgent
from rollout_workers.agents import RewardOnlyAgent

_drawn = itertools.count()


class Fine(RewardOnlyAgent):
    def task(self, index: int) -> Task:
        return self.new_task(index, f"{index % 10}=", answer=str(index % 10))

    async def reward(self, task: Task, response: str) -> float:
        return float(response == task.answer)


class Connects(EndpointAgent):
    """Nothing is wrong with it: the task behind the connection that it keeps is the gateway's."""

    _connection: HTTPConnection | None = None

    def task(self, index: int) -> Task:
        return self.new_task(index, f"{index}=", answer=str(index))

    async def act(self, base_url: str, api_key: str, task: Task) -> str:
        return await asyncio.to_thread(self._ask, urlsplit(base_url), task.prompt)

    def _ask(self, url: SplitResult, prompt: object) -> str:
        if self._connection is None:
            self._connection = HTTPConnection(url.netloc)
        self._connection.request("POST", f"{url.path}/completions", json.dumps({"prompt": prompt}))
        return json.load(self._connection.getresponse())["choices"][0]["text"]

    def reward(self, task: Task, output: str) -> float:
        return float(output == task.answer)


class RemembersWhatItDrew(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(index, f"{next(_drawn)}=", answer="1")


class HashesText(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(index, f"{hash(str(index))}=", answer="1")


class PaysEverybody(Fine):
    async def reward(self, task: Task, response: str) -> float:
        return 1.0


class PaysInfinity(Fine):
    async def reward(self, task: Task, response: str) -> float:
        return float("inf")


class Raises(Fine):
    async def get_observation(self, task: Task, turns: list[Turn]) -> str | None:
        raise LookupError("no such room")


class HasNoAnswer(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(index, "3=", answer=None)  # pyright: ignore[reportArgumentType]


class NeverReturns(Fine):
    async def reward(self, task: Task, response: str) -> float:
        while True:
            time.sleep(0.01)  # noqa: ASYNC251  # that is the mistake


class NeverPoses(Fine):
    def task(self, index: int) -> Task:
        while True:
            time.sleep(0.01)


class Cannot(Fine):
    def task(self, index: int) -> Task:
        raise IndexError("the data set is empty")


class Talks(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(index, "0" * 600, answer="1")


class Speaks(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(index, "Wie viele Äpfel?", answer="7")


class Blocks(Fine):
    async def reward(self, task: Task, response: str) -> float:
        time.sleep(0.4)  # noqa: ASYNC251  # that is the mistake
        return await super().reward(task, response)


class LeavesThings(Fine):
    async def __aenter__(self) -> LeavesThings:
        line = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.process = subprocess.Popen(line)  # noqa: ASYNC220
        self.task_left = asyncio.create_task(_never())
        return self

    async def __aexit__(self, *problem: object) -> None: ...


class Repeats(Fine):
    def task(self, index: int) -> Task:
        return self.new_task(0, "3=", answer=str(random.Random(0).randrange(10)))


async def _never() -> None:
    await asyncio.Event().wait()
