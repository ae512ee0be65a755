"""How one process of a fleet on a cluster is started on the machine where the cluster has placed it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from async_rl.config import Config
from async_rl.launch.commands import command, environment, learner_environment, ranks_command
from async_rl.launch.fleet_plan import MemberPlan
from async_rl.supervision import ChildSpec, RestartPolicy
from async_rl.supervision.processes.ranks import RANK_VARIABLES


def member_spec(
    plan: MemberPlan,
    config: Config,
    path: Path,
    inherited: Mapping[str, str],
    *,
    address: str | None,
    policy: RestartPolicy,
    log: Path | None,
) -> ChildSpec:
    """The child process of a member. `path`: the file of `config`. `address`: of this machine, from which the learner sends its
    weights; None: from `wire.host`."""
    words = [*plan.words, "@", str(path)]
    shared = environment(config, {name: value for name, value in inherited.items() if name not in RANK_VARIABLES})
    if plan.role == "learner":
        words += ["--wire.host", address] if address is not None else []
        started, shared = ranks_command("learner", words, config, plan.ranks), learner_environment(config, shared)
    else:
        started = command(plan.role, words)
    return ChildSpec(name=plan.name, command=started, environment=shared, log=log, policy=policy)
