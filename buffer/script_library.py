"""Runs the Lua files in scripts/: one file is one atomic change on the server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from redis.exceptions import NoScriptError

from buffer.redis_client import Server

_FOLDER = Path(__file__).parent / "scripts"
_PRELUDE = "prelude"

NAMES = sorted(path.stem for path in _FOLDER.glob("*.lua") if path.stem != _PRELUDE)
"""Of all scripts."""

Argument = str | bytes | int | float


class ScriptLibrary:
    """Scripts over one set of keys; all of them are declared in every call."""

    def __init__(self, server: Server, keys: Sequence[str], *, prelude: str = "") -> None:
        self._server = server
        self._keys = [key.encode() for key in keys]
        self._prelude = prelude

    async def run(self, name: str, *arguments: Argument) -> Any:
        return await self._server.ask(lambda: self._run(load_script(name, self._prelude), arguments))

    async def run_with_payload(self, name: str, hash_key: str, field: str, payload: bytes, *arguments: Argument) -> Any:
        """The script in one transaction with the bytes that it is about: HSETNX before it."""
        script = load_script(name, self._prelude)
        return await self._server.ask(lambda: self._run_with_payload(script, hash_key, field, payload, arguments))

    async def _run_with_payload(
        self, script: Script, hash_key: str, field: str, payload: bytes, arguments: Sequence[Argument]
    ) -> Any:
        pipeline: Any = cast("Any", self._server.commands).pipeline(transaction=True)
        pipeline.hsetnx(hash_key, field, payload)
        # By its text: a server that was restarted does not know the hash, and the bytes would lie there without their record.
        pipeline.eval(script.text, len(self._keys), *self._keys, *arguments)
        _, reply = await pipeline.execute()
        return reply

    async def _run(self, script: Script, arguments: Sequence[Argument]) -> Any:
        redis = cast("Any", self._server.commands)
        try:
            return await redis.evalsha(script.sha, len(self._keys), *self._keys, *arguments)
        except NoScriptError:  # the first call, or the server was restarted
            return await redis.eval(script.text, len(self._keys), *self._keys, *arguments)


class Script(NamedTuple):
    text: str
    sha: str


@cache
def load_script(name: str, prelude: str) -> Script:
    parts = [(_FOLDER / f"{part}.lua").read_text() for part in (prelude, name) if part]
    text = f"-- {name}.lua\n{''.join(parts)}"  # the server's slow log shows how it begins
    return Script(text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
