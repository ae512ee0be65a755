"""`async-rl doctor`; buffer/doctor gathers the facts, because those of Redis are among them."""

from __future__ import annotations

from typing import NoReturn

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.launch.commands import command


def doctor(line: CommandLine) -> NoReturn:
    become(command("buffer.doctor", line.words))


DOCTOR = Verb(
    words="doctor",
    help="Check whether this machine, and with a configuration its Redis and fleet, are fit for a run; exits 16 if not.",
    run=doctor,
    config="[@ FILE]",
    options=(
        Option(name="join", value="ADDRESS", help="Redis of a run that has a learner, as for `async-rl worker --join`"),
        Option(name="json", help="print one JSON document instead of lines"),
    ),
)
VERBS = (DOCTOR,)
