"""Loads the Lua files in scripts/: one file is one atomic change on the server.

A script names the run's keys in capitals and may use what prelude.lua defines. The text sent to the server is a line that
assigns the declared keys to these names, the parts of the prelude that the script uses, and the script. Only keys that a
script touches are declared: the server requires write permission for each of them.

A script whose first argument is `fence`, as its first line says, is the learner's: before its own code it is refused to all
but the latest learner.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from buffer import keys

_FOLDER = Path(__file__).parents[1] / "scripts"
_PRELUDE = "prelude"
_LEARNER_ONLY = "local lost = fence_lost(ARGV[1])\nif lost then return lost end\neven_when_full()\n"

NAMES = sorted(path.stem for path in _FOLDER.glob("*.lua") if path.stem != _PRELUDE)
"""Names of all scripts."""


class Script(NamedTuple):
    text: str
    sha: str
    keys: tuple[str, ...]
    """Names of the keys that the script touches."""


@cache
def load_script(name: str) -> Script:
    own = (_FOLDER / f"{name}.lua").read_text()
    if own.startswith("-- fence"):
        own = _LEARNER_ONLY + own
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
