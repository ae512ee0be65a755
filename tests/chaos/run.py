"""Kills writers, learners and servers at random, hundreds of times, and checks that no group was lost or trained twice.

    python -m tests.chaos.run --kills 500 --seed 1 [--server redis|valkey|PATH] [--report FILE] [--keep FOLDER]
    python -m tests.chaos.run --kills 500 --seed 1 --round 7          only this round of that run again

Exit code 1 on any violation; then the journals, the plan and the server's data stay in the folder that it prints.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from async_rl.errors import ConfigError, boundary
from buffer.server.embedded.programs import find_binary
from tests.chaos.auditor import violations
from tests.chaos.children import POINTS_LOG
from tests.chaos.evidence import Evidence
from tests.chaos.final_state import dump
from tests.chaos.plan import Plan, rounds
from tests.chaos.report import Round, as_json, table
from tests.chaos.supervisor import Supervisor


def main() -> int:
    wanted = _arguments()
    plans = [
        plan for plan in rounds(wanted.seed, wanted.kills, set_backs=wanted.set_backs) if wanted.round in (None, plan.round)
    ]
    root = Path(wanted.keep if wanted.keep is not None else tempfile.mkdtemp(prefix="chaos-"))
    binary = _binary(wanted.server)
    done: list[Round] = []
    for plan in plans:
        done.append(_play(plan, root / f"round-{plan.round:03d}", binary))
        print(f"round {plan.round}: {done[-1].sentence}", file=sys.stderr, flush=True)
    command = f"python -m tests.chaos.run --kills {wanted.kills} --seed {wanted.seed}"
    command += " --set-backs" if wanted.set_backs else ""
    command += f" --server {wanted.server}" if wanted.server else ""
    print(table(done, command=command))
    if wanted.report is not None:
        wanted.report.parent.mkdir(parents=True, exist_ok=True)
        wanted.report.write_text(json.dumps(as_json(done, command=command, server=str(binary)), indent=1))
    failed = any(each.is_violated for each in done)
    if failed:
        print(f"journals, plan and data: {root}")
    elif wanted.keep is None:
        shutil.rmtree(root)
    return 1 if failed else 0


def _play(plan: Plan, folder: Path, binary: Path) -> Round:
    if folder.exists():
        raise ConfigError(f"{folder} exists already; give --keep a new folder")
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(plan.as_json(), indent=1))
    redis = folder / "chaos" / "redis"
    redis.mkdir(parents=True)
    (redis / "server").write_text(f"{binary}\n")
    supervisor = Supervisor(plan, folder)
    try:
        outcome = supervisor.run()
        (folder / "outcome.json").write_text(json.dumps(outcome.as_json(), indent=1))
        dump(folder)
    finally:
        supervisor.close()
    return Round(
        plan=plan, outcome=outcome, violations=violations(Evidence.of(folder)), points=(folder / POINTS_LOG).read_text()
    )


def _binary(server: str | None) -> Path:
    """Return the server to use: "redis" and "valkey" are the installed one, else the bundled one; None is a run's default."""
    if server is None:
        return find_binary()
    if server in ("redis", "valkey"):
        found = shutil.which(f"{server}-server")
        return Path(found) if found else find_binary(path="")
    if not Path(server).exists():
        raise ConfigError(f"--server {server}: there is no such file; give redis, valkey or the path of a server")
    return Path(server)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int)
    parser.add_argument("--set-backs", action="store_true", help="the server also loses confirmed changes")
    parser.add_argument("--server")
    parser.add_argument("--report", type=Path, help="also write the figures as JSON")
    parser.add_argument("--keep", type=Path, help="a new folder for journals and data, kept in any case")
    return parser.parse_args()


if __name__ == "__main__":
    with boundary("chaos"):
        raise SystemExit(main())
