"""Runs the Lua files in scripts/: one file is one atomic change on the server.

A script names the run's keys in capitals and may use what prelude.lua defines. The text sent to the server is a line that
assigns the declared keys to these names, the parts of the prelude that the script uses, and the script. Only keys that a
script touches are declared: the server requires write permission for each of them.
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
"""Names of all scripts."""

Argument = str | bytes | int | float


class ScriptLibrary:
    """Runs scripts on the keys of one run. `given` maps names of keys.GIVEN to the keys that the caller chooses."""

    def __init__(self, server: Server, run: str, given: Mapping[str, str] | None = None) -> None:
        self._server = server
        self._run = run
        self._given = given if given is not None else dict[str, str]()

    async def run(self, name: str, *arguments: Argument) -> Any:
        return await self._server.ask(lambda: self._run_script(load_script(name), arguments))

    async def run_with_payload(self, name: str, hash_key: str, field: str, payload: bytes, *arguments: Argument) -> Any:
        """Run a script in one transaction behind the HSETNX that stores its payload."""
        script = load_script(name)
        return await self._server.ask(lambda: self._run_with_payload(script, hash_key, field, payload, *arguments))

    async def _run_with_payload(self, script: Script, hash_key: str, field: str, payload: bytes, *arguments: Argument) -> Any:
        pipeline: Any = cast("Any", self._server.commands).pipeline(transaction=True)
        pipeline.hsetnx(hash_key, field, payload)
        # Sent as text: with an unknown SHA a restarted server would store the payload and fail the script.
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
        """Return the keys that a script declares, in its order."""
        return [self._given[name] if name in keys.GIVEN else keys.key(self._run, name) for name in script.keys]


class Script(NamedTuple):
    text: str
    sha: str
    keys: tuple[str, ...]
    """Names of the keys that the script touches."""


@cache
def load_script(name: str) -> Script:
    own = (_FOLDER / f"{name}.lua").read_text()
    used = "".join(_used_parts(own))
    touched = {word for word in _identifiers(used + own) if word in keys.BY_CONSTANT}
    constants = [constant for constant in keys.BY_CONSTANT if constant in touched]
    declared = ", ".join(f"KEYS[{number}]" for number in range(1, len(constants) + 1))
    # The comment names the script in the server's slow log.
    text = f"-- {name}.lua\n" + (f"local {', '.join(constants)} = {declared}\n" if constants else "") + used + own
    sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
    return Script(text=text, sha=sha, keys=tuple(keys.BY_CONSTANT[constant] for constant in constants))


def _used_parts(text: str) -> Iterator[str]:
    """Return the parts of the prelude that `text` needs, directly or not, in order. A part only uses parts before it."""
    wanted, found = set(_identifiers(text)), list[str]()
    for part in reversed(_prelude_parts()):
        if not wanted.isdisjoint(_defined(part)):
            wanted.update(_identifiers(part))
            found.append(part)
    return reversed(found)


@cache
def _prelude_parts() -> tuple[str, ...]:
    """Split the prelude; each part begins with `local` at the start of a line."""
    return tuple(re.split(r"^(?=local )", (_FOLDER / f"{_PRELUDE}.lua").read_text(), flags=re.MULTILINE)[1:])


def _defined(part: str) -> list[str]:
    is_function, names = re.match(r"local (function )?([\w, ]+)", part).groups()  # pyright: ignore[reportOptionalMemberAccess]
    return [names] if is_function else names.replace(" ", "").split(",")


def _identifiers(lua: str) -> list[str]:
    """Return the identifiers in Lua code, without fields, comments and strings."""
    code = re.sub(r"--.*|'[^'\n]*'|\"[^\"\n]*\"", " ", lua)
    return re.findall(r"(?<![.\w])[A-Za-z_]\w*", code)
