"""A gang on a Ray cluster: members that are placed together, end together, and are started again together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from async_rl.launch.fleet_plan import GangPlan
from async_rl.launch.ray.cluster import Actor, Cluster
from async_rl.launch.ray.member import FleetMember, MemberPlace
from async_rl.supervision import Restarted, RestartPolicy
from async_rl.supervision.processes.restarting import RestartedSpec

LEFT_ALONE_S = 5.0
"""Seconds that the other members get to end by themselves after one ended well."""

LOST = -int(signal.SIGKILL)
"""Status of a member whose actor or machine died: the kernel has killed its process."""

WAITING = "waits for a machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What all members of a fleet share."""

    config_yaml: str
    secrets: Mapping[str, str]
    is_on_several_machines: bool
    policy: RestartPolicy
    logs: Path
    """Folder of logs, which this machine reads if all share the run's folder."""


class Gang(Restarted):
    """Runs the members of a plan, each on a machine of its own. When one ends, so do all.

    waits for:    free resources for all members; the end of one
    unblocked by: the cluster (another gang ends, a machine joins); exit of a member's process; loss of its machine
    """

    def __init__(
        self,
        cluster: Cluster,
        plan: GangPlan,
        settings: FleetSettings,
        on_start: Callable[[str, int], None],
        on_end: Callable[[str, int, int], None],
    ) -> None:
        log = settings.logs / f"{plan.name}.log" if plan.members[0].has_log else None
        super().__init__(RestartedSpec(name=plan.name, log=log, policy=settings.policy, grace_s=plan.grace_s))
        self._cluster, self._plan, self._settings = cluster, plan, settings
        self._on_start, self._on_end = on_start, on_end
        self._actors: list[Actor] = []
        self._group: Any = None
        self._is_moving = False
        self.places: Sequence[MemberPlace] = ()
        """Where the members are; empty while they wait for machines."""

    @property
    def where(self) -> str:
        return ", ".join(f"{place.host} ({place.address})" for place in self.places) or WAITING

    @property
    def needs(self) -> str:
        """What a member needs of its machine."""
        return ", ".join(f"{name}: {number:g}" for name, number in self.resources.items() if number)

    @property
    def resources(self) -> Mapping[str, float]:
        return self._plan.members[0].resources

    @property
    def num_machines(self) -> int | None:
        """The machines that an elastic gang has, and those that are free for it; None: it is being placed."""
        if not self.places and self._group is not None and self._cluster.has_reserved(self._group):
            return None
        return len({place.machine for place in self.places} | self._cluster.with_room(self.resources))

    async def _run_once(self) -> int:
        while True:
            self._is_moving = False
            status = await self._run_anywhere()
            if not self._is_moving or self._draining.is_set():
                return status

    async def _run_anywhere(self) -> int:
        members = self._plan.members
        if len(members) > 1 or self._plan.is_elastic:
            self._group = self._cluster.reserve([member.resources for member in members])
        settings = self._settings
        self._actors = [
            self._cluster.place(
                FleetMember,
                member,
                settings.config_yaml,
                settings.secrets,
                settings.is_on_several_machines,
                resources=member.resources,
                group=self._group,
                index=index,
            )
            for index, member in enumerate(members)
        ]
        try:
            return await self._run_placed()
        finally:
            self.places = ()
            self._discard()

    async def _run_placed(self) -> int:
        answer = self._cluster.answer
        places = await asyncio.gather(*(answer(actor.place.remote()) for actor in self._actors))
        if any(place is None for place in places):
            return LOST
        self.places = places
        self._on_start(self.spec.name, places[0].pid)
        running = [asyncio.ensure_future(answer(actor.run.remote())) for actor in self._actors]
        done, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if others and all(task.result() == 0 for task in done):
            await asyncio.wait(others, timeout=LEFT_ALONE_S)
        statuses = [task.result() if task.result() is not None else LOST for task in running if task.done()]
        status = next((each for each in statuses if each != 0), 0)
        for task in running:
            task.cancel()
        self._on_end(self.spec.name, places[0].pid, status)
        return status

    def terminate(self) -> None:
        self._draining.set()
        self._ask_to_end()

    def kill(self) -> None:
        self._draining.set()
        self._discard()

    def move(self) -> None:
        """Let the members drain, and start them again on machines that stay."""
        self._is_moving = True
        self._ask_to_end()

    def resize(self, plan: GangPlan) -> None:
        """Let the members drain, and start those of another plan."""
        self._plan = plan
        self.move()

    def _ask_to_end(self) -> None:
        if not self.places:  # an actor without a machine hears nothing
            self._discard()
        for actor in self._actors:
            actor.terminate.remote()

    def _discard(self) -> None:
        """End the actors, and with them what is left of their processes."""
        actors, self._actors = self._actors, []
        for actor in actors:
            self._cluster.kill(actor)
        group, self._group = self._group, None
        if group is not None:
            self._cluster.release(group)


def starts(cluster: Cluster, plan: GangPlan, settings: FleetSettings) -> partial[Gang]:
    """How the supervisor starts the gang of a plan."""
    return partial(Gang, cluster, plan, settings)
