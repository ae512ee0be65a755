"""`async-rl view`; buffer/view serves the page of async_rl/view."""

from __future__ import annotations

from typing import NoReturn

from async_rl.cli.grammar import PORT, CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.launch.commands import command


def view(line: CommandLine) -> NoReturn:
    become(command("buffer.view", line.words))


VIEW = Verb(
    words="view",
    operands="[FOLDER]",
    help="Show a run, live or ended, on a web page.",
    run=view,
    options=(
        Option(name="host", value="ADDRESS", help="address to listen on (127.0.0.1)"),
        PORT,
        Option(name="token-file", value="FILE", help="file with the token that the page requires (a new one at each start)"),
        Option(name="demo", help="show a run that is made up, to try the page"),
    ),
    details="""\
FOLDER is the run's folder; @ run/config.yaml names it too. Prints an address, with a token, to open in a browser. The page only
reads: its folder, and its Redis while the run lives. From another machine: ssh -L PORT:127.0.0.1:PORT""",
)
VERBS = (VIEW,)
