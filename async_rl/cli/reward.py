"""`async-rl reward serve`; rollout_workers/reward_model does the work."""

from __future__ import annotations

from typing import NoReturn

from async_rl.cli.grammar import PORT, CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.cli.train import load_described
from async_rl.launch.commands import command


def serve(line: CommandLine) -> NoReturn:
    become(command("rollout_workers.reward_model", line.words), load_described(line.config))


SERVE = Verb(
    words="reward serve",
    help="Serve a trained reward model; a dataset names it as its scoring: http://...",
    run=serve,
    options=(
        Option(name="checkpoint", value="FOLDER", help="a checkpoint (default: the run's newest)"),
        Option(name="host", value="ADDRESS", help="address to listen on (127.0.0.1)"),
        PORT,
        Option(
            name="token-file", value="FILE", help="file with the token that clients must send; required beyond this machine"
        ),
        Option(name="insecure", help="serve other machines without a token: the network is private"),
    ),
)
VERBS = (SERVE,)
