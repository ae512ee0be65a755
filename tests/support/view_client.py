"""A running `async-rl view`, and requests to it that no browser would send."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.support.run_processes import Program, program
from tests.support.waiting import until


@dataclass(frozen=True, kw_only=True)
class Viewed:
    url: str
    """With the token."""
    program: Program

    @property
    def token(self) -> str:
        return self.url.partition("?token=")[2]

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and body; without the token unless the headers have it."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()
        finally:
            connection.close()

    def json(self, path: str) -> Any:
        status, _, body = self.ask(path, Authorization=f"Bearer {self.token}")
        assert status == 200, body
        return json.loads(body)


@contextmanager
def viewed(folder: Path, *arguments: object, warm: bool = True) -> Iterator[Viewed]:
    """`async-rl view ARGUMENTS`, once it has printed its address."""
    with program(folder, "view", *arguments, warm=warm) as running:
        yield view_of(running)


def view_of(running: Program) -> Viewed:
    """The page whose address a program prints."""
    found = until(lambda: re.search(r"http\S+token=\S+", running.output), "its address is printed", while_alive=running)
    return Viewed(url=found[0], program=running)
