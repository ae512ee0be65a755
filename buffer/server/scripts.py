"""Runs the Lua files in scripts/: one file is one atomic change on the server.

A script names the run's keys in capitals and may use what prelude.lua defines. What is sent to the server is the script, the
pieces of the prelude that it uses, and a line that gives the names to the declared keys. Only keys that a script touches are
declared: a server asks for the right to write each of them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from redis.exceptions import NoScriptError

from buffer import keys
from buffer.server.client import Server

_FOLDER = Path(__file__).parents[1] / "scripts"
_PRELUDE = "prelude"

NAMES = sorted(path.stem for path in _FOLDER.glob("*.lua") if path.stem != _PRELUDE)
"""Of all scripts."""

Argument = str | bytes | int | float


class ScriptLibrary:
    """The scripts of one run. `given` are the keys that its scripts are called for, by their names in keys.GIVEN."""

    def __init__(self, server: Server, run: str, given: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._run = run
        self._given = given if given is not None else dict[str, str]()

    async def run(self, name: str, *arguments: Argument) -> Any:
        return await self._server.ask(lambda: self._run_script(load_script(name), arguments))

    async def run_with_payload(self, name: str, hash_key: str, field: str, payload: bytes, *arguments: Argument) -> Any:
        """The script in one transaction with the bytes that it is about: HSETNX before it."""
        script = load_script(name)
        return await self._server.ask(lambda: self._run_with_payload(script, hash_key, field, payload, *arguments))

    async def _run_with_payload(self, script: Script, hash_key: str, field: str, payload: bytes, *arguments: Argument) -> Any:
        pipeline: Any = cast("Any", self._server.commands).pipeline(transaction=True)
        pipeline.hsetnx(hash_key, field, payload)
        # By its text: a server that was restarted does not know the hash, and the bytes would lie there without their record.
        pipeline.eval(script.text, len(script.keys), *self.keys_of(script), *arguments)
        _, reply = await pipeline.execute()
        return reply

    async def _run_script(self, script: Script, arguments: tuple[Argument, ...]) -> Any:
        redis, declared = cast("Any", self._server.commands), self.keys_of(script)
        try:
            return await redis.evalsha(script.sha, len(declared), *declared, *arguments)
        except NoScriptError:  # the first call, or the server was restarted
            return await redis.eval(script.text, len(declared), *declared, *arguments)

    def keys_of(self, script: Script) -> list[str]:
        """The keys that it declares, in its order."""
        return [self._given[name] if name in keys.GIVEN else keys.key(self._run, name) for name in script.keys]


class Script(NamedTuple):
    text: str
    sha: str
    keys: tuple[str, ...]
    """Names of the keys that it touches."""


@cache
def load_script(name: str) -> Script:
    own = (_FOLDER / f"{name}.lua").read_text()
    used = "".join(_used_pieces(own))
    touched = {word for word in _words(used + own) if word in keys.BY_CONSTANT}
    constants = [constant for constant in keys.BY_CONSTANT if constant in touched]
    declared = ", ".join(f"KEYS[{number}]" for number in range(1, len(constants) + 1))
    # The server's slow log shows how a script begins.
    text = f"-- {name}.lua\n" + (f"local {', '.join(constants)} = {declared}\n" if constants else "") + used + own
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text=text, sha=sha, keys=tuple(keys.BY_CONSTANT[constant] for constant in constants))


def _used_pieces(text: str) -> Iterator[str]:
    """Of the prelude, in its order: what the text names, and what that needs. A piece only uses pieces before it."""
    wanted, found = set(_words(text)), list[str]()
    for piece in reversed(_pieces()):
        if not wanted.isdisjoint(_defined(piece)):
            wanted.update(_words(piece))
            found.append(piece)
    return reversed(found)


@cache
def _pieces() -> tuple[str, ...]:
    """Each begins with `local` at the beginning of a line and ends before the next one."""
    return tuple(re.split(r"^(?=local )", (_FOLDER / f"{_PRELUDE}.lua").read_text(), flags=re.MULTILINE)[1:])


def _defined(piece: str) -> list[str]:
    is_function, names = re.match(r"local (function )?([\w, ]+)", piece).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return [names] if is_function else names.replace(" ", "").split(",")


def _words(lua: str) -> list[str]:
    """Its names, without those of fields, and without words in comments and strings."""
    code = re.sub(r"--.*|'[^'\n]*'|\"[^\"\n]*\"", " ", lua)
    return re.findall(r"(?<![.\w])[A-Za-z_]\w*", code)
