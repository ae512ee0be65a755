"""Kills, stops and cuts off what is at both ends of the weight wire, and proves that no torn or older version was ever served.

    python -m tests.wire_faults.run --trials 100 --seed 1 [--fault storm] [--over gloo] [--report FILE] [--keep FOLDER]

Every trial's luck comes from the seed, the fault and the trial's number. Exit code 1 on any violation; then the logs stay.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from async_rl.config import WireConfig
from async_rl.errors import boundary
from buffer.server.embedded.programs import find_binary
from tests.support.private_server import private_server
from tests.wire_faults.audit import longest_pause, noise, violations
from tests.wire_faults.report import Round, as_json, table, too_long
from tests.wire_faults.stage import open_stage
from tests.wire_faults.trials import CUTS, TRIALS, WORKERS, Played, play

OPERATION_S = 2.0
RENDEZVOUS_S = 5.0
"""After so long, a worker that could come by nothing tries again, and the learner with it."""
WIRES = {
    over: WireConfig(
        operation_timeout_s=OPERATION_S,
        rendezvous_timeout_s=RENDEZVOUS_S,
        bucket_mb=0.25,
        shared_memory=over == "memory",
    )
    for over in ("gloo", "memory")
}
TRIALS_PER_RUN = 24
"""Then learner, workers and Redis start afresh."""


def main(words: Sequence[str] = sys.argv[1:]) -> int:
    wanted = _arguments(words)
    root = Path(wanted.keep if wanted.keep is not None else tempfile.mkdtemp(prefix="wire-faults-"))
    rounds: list[Round] = []
    with private_server(find_binary()) as url:
        for over in WIRES:
            if wanted.over in (None, over):
                deck = [
                    (fault, number)
                    for fault in TRIALS
                    if not wanted.fault or fault in wanted.fault
                    for number in range(wanted.trials)
                ]
                random.Random(f"{wanted.seed}/{over}").shuffle(deck)
                while deck:
                    rounds.append(asyncio.run(_round(url, root, over, deck, seed=wanted.seed, number=len(rounds))))
    command = shlex.join(["python", "-m", "tests.wire_faults.run", *words])
    print(table(rounds, command=command, operation_s=OPERATION_S))
    if wanted.report is not None:
        wanted.report.parent.mkdir(parents=True, exist_ok=True)
        wanted.report.write_text(json.dumps(as_json(rounds, command=command, operation_s=OPERATION_S), indent=1))
    failed = any(each.violations for each in rounds) or too_long(rounds, OPERATION_S)
    if failed:
        print(f"logs: {root}")
    elif wanted.keep is None:
        shutil.rmtree(root)
    return 1 if failed else 0


async def _round(url: str, root: Path, over: str, deck: list[tuple[str, int]], *, seed: int, number: int) -> Round:
    """Trials from the deck on one stage, as many as it bears: one that fails leaves nothing to build on."""
    folder = root / f"{number:03d}-{over}"
    played: list[Played] = []
    async with open_stage(url, folder, WIRES[over]) as stage:
        opened = await stage.see("the spawner opens", lambda fact: fact.what == "open")
        for name in WORKERS:
            await stage.start(name, "worker")
        await stage.start("learner", "learner")
        await stage.all_serve(0, *WORKERS, since=0)
        while deck and len(played) < TRIALS_PER_RUN and not (played and played[-1].problem):
            fault, trial = deck.pop()
            if fault in CUTS and not opened.more["can_cut"]:
                continue
            luck = random.Random(f"{seed}/{over}/{fault}/{trial}")
            played.append(await play(fault, stage, luck))
            print(f"{over:<7} {played[-1].sentence}", file=sys.stderr, flush=True)
        published = {record.version for record in await stage.board.versions()}
        facts = list(stage.facts)
    (folder / "facts.jsonl").write_text("".join(json.dumps(asdict(fact)) + "\n" for fact in facts))
    problems = [f"{each.fault} at {each.moment}: {each.problem}" for each in played if each.problem]
    return Round(
        over=over,
        played=tuple(played),
        violations=(*problems, *violations(facts, published), *noise(folder)),
        samples=sum(fact.what == "serves" for fact in facts),
        versions=len(published),
        pause_s=longest_pause(facts),
    )


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100, help="of each fault, over each wire")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fault", choices=list(TRIALS), action="append", help="only this one; may be repeated")
    parser.add_argument("--over", choices=list(WIRES))
    parser.add_argument("--report", type=Path, help="also write the figures as JSON")
    parser.add_argument("--keep", type=Path, help="a new folder for facts and logs, kept in any case")
    return parser.parse_args(words)


if __name__ == "__main__":
    with boundary("wire-faults"):
        raise SystemExit(main())
