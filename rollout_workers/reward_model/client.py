"""Score answers with a served reward model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from async_rl.config.exposure import read_token
from async_rl.types import Message, Task

PATIENCE_S = 60.0


class ServedReward:
    """A scoring function: `await ServedReward("http://127.0.0.1:8900")(task, response)`. An exception fails the episode.

    If the server requires a token, name the file that holds it: `http://HOST:PORT#token_file=FILE`.
    """

    def __init__(self, url: str) -> None:
        address, _, file = url.partition("#token_file=")
        self._url = address.rstrip("/")
        token = read_token(file, key="token_file")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def __call__(self, task: Task, response: str) -> float:
        return await self.score(task.prompt, response)

    async def score(self, prompt: str | Sequence[Message], response: str | Sequence[Message]) -> float:
        import aiohttp  # late: other scorings do not need it

        asked = {"prompt": _written(prompt), "response": _written(response)}
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as session,
            session.post(f"{self._url}/score", json=asked, headers=self._headers) as answer,
        ):
            if answer.status != 200:
                raise ValueError(f"the reward model at {self._url} refused: {await answer.text()}")
            return float((await answer.json())["score"])


def _written(said: str | Sequence[Message]) -> Any:
    return said if isinstance(said, str) else [{"role": message.role, "content": message.content} for message in said]
