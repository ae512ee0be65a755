"""`async-rl simulate`; learner/simulation does the work."""

from __future__ import annotations

from typing import NoReturn

from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.cli.role_process import become
from async_rl.launch.commands import command


def run(line: CommandLine) -> NoReturn:
    become(command("learner.simulation", line.words))


def _seconds(name: str, help: str) -> Option:
    return Option(name=name, value="S", read=float, least=0, help=help)


VERBS = (
    Verb(
        words="simulate",
        run=run,
        config="@ FILE",
        help="Predict step time, ages, idle shares, memory and pushes of a fleet, and what would limit it first.",
        details="Rates come from a recorded run (--from), or --train-s, --worker-tok-s and --answer-tokens (docs/simulate.md).",
        options=(
            Option(name="from", value="FOLDER", help="folder of a run that was recorded, whose rates are taken"),
            Option(name="workers", value="N", read=int, least=1, most=16384, help="rollout workers (worker.processes)"),
            Option(
                name="search",
                value="STEPS",
                read=float,
                least=0.001,
                help="find the smallest fleet that trains so many steps an hour",
            ),
            _seconds("train-s", "the learner's seconds for a step"),
            Option(
                name="worker-tok-s",
                value="N",
                read=float,
                least=0.001,
                help="tokens a second that an engine samples with a full batch",
            ),
            Option(
                name="token-s", value="S", read=float, least=0, help="seconds of a token in an engine with one generation (0)"
            ),
            Option(name="answer-tokens", value="N", read=float, least=1, help="sampled tokens of a rollout, mean"),
            _seconds("wait-s", "further time that an episode waits for tools and rewards, median; lognormal, deviation 1 (0)"),
            _seconds("push-s", "seconds of a push to the recorded workers, or to one"),
            Option(
                name="link-gb-s",
                value="N",
                read=float,
                least=0.001,
                help="GB/s of the learner's network; default: workers read the learner's memory",
            ),
            Option(
                name="cores",
                value="N",
                read=int,
                least=0,
                help="cores that learner and workers share; 0: each has its own (this machine's if models compute on a CPU)",
            ),
            Option(name="json", help="print one JSON object"),
        ),
    ),
)
