"""A gang on a Ray cluster: members that are placed together, end together, and are started again together."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from async_rl.launch.fleet_plan import GangPlan, MemberPlan
from async_rl.launch.ray.cluster import Actor, ActorFailed, ActorLost, Cluster
from async_rl.launch.ray.member import FleetMember, MemberPlace
from async_rl.supervision import Restarted, RestartPolicy
from async_rl.supervision.processes.restarting import RestartedSpec

log = structlog.get_logger("async_rl.fleet")

LOOK_S = 2.0
"""Seconds between two looks at the cluster, which tells only when asked that machines are preempted or lost, and that processes
wait."""

NOTICED_WITHIN_S = 40.0
"""Seconds within which Ray notices that a machine is lost, after an actor there was out of reach."""

LEFT_ALONE_S = 5.0
"""Seconds that the other members get to end by themselves after one ended."""

LOST = -int(signal.SIGKILL)
"""Status of a member whose actor or machine died: the kernel has killed its process."""

FAILED = 1
"""Status of a member whose actor could not start its process."""

WAITING = "waits for a machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """What all members of a fleet share."""

    config_yaml: str
    secrets: Mapping[str, str]
    """Environment variables of all members."""
    defaults: Mapping[str, str]
    """Environment variables of members on machines that do not have their own."""
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
        self._is_out_of_reach = False
        self._lost_place: MemberPlace | None = None
        self.places: Sequence[MemberPlace] = ()
        """Where the members are; empty while they wait for machines."""

    @property
    def where(self) -> str:
        if self.is_waiting:
            return WAITING
        return ", ".join(f"{place.host} ({place.address})" for place in self.places) or "is started again soon"

    @property
    def is_waiting(self) -> bool:
        """Whether its members are not on their machines yet."""
        return bool(self._actors) and not self.places

    @property
    def needs(self) -> str:
        """What a member needs of its machine, as words after "machine"."""
        needed = ", ".join(f"{name}: {number:g}" for name, number in self.resources.items() if number)
        return f" with {needed} free" if needed else ""

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
        self._is_out_of_reach, self._lost_place = False, None
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
                settings.defaults,
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
            self._kill()

    async def _run_placed(self) -> int:
        members = list(zip(self._plan.members, self._actors, strict=True))
        places = await asyncio.gather(*(self._place_of(*each) for each in members))
        found = [place for place in places if place is not None]
        if len(found) < len(places):
            return 0 if self._draining.is_set() else LOST  # 0: it had not begun
        self.places = found
        self._on_start(self.spec.name, found[0].pid)
        running = [asyncio.ensure_future(self._status_of(*each)) for each in members]
        _, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        if others:
            await asyncio.wait(others, timeout=LEFT_ALONE_S)
        status = next((each for task in running if task.done() and (each := task.result()) != 0), 0)
        for task in running:
            task.cancel()
        self._lost_place = await self._find_lost(found)
        self._on_end(self.spec.name, found[0].pid, status)
        return status

    async def _place_of(self, member: MemberPlan, actor: Actor) -> MemberPlace | None:
        """Where an actor is, once it has a machine; None: it has ended before."""
        try:
            return await self._cluster.answer(actor.place.remote())
        except (ActorLost, ActorFailed) as error:
            self._tell(member, actor, error)
            return None

    async def _status_of(self, member: MemberPlan, actor: Actor) -> int:
        """How the process of an actor has ended."""
        try:
            return await self._cluster.answer(actor.run.remote())
        except ActorLost as error:
            self._tell(member, actor, error)
            self._is_out_of_reach = self._is_out_of_reach or not error.is_certain
            return LOST
        except ActorFailed as error:
            self._tell(member, actor, error)
            return FAILED

    async def _find_lost(self, places: Sequence[MemberPlace]) -> MemberPlace | None:
        """The first place whose machine is lost. If an actor is only out of reach, Ray may yet notice why."""
        until = time.monotonic() + (NOTICED_WITHIN_S if self._is_out_of_reach else 0.0)
        while True:
            living = self._cluster.living()
            lost = next((place for place in places if place.machine not in living), None)
            if lost is not None or time.monotonic() >= until or await self.drains_within(LOOK_S):
                return lost

    def _tell(self, member: MemberPlan, actor: Actor, error: Exception) -> None:
        if actor in self._actors:  # else it was to end
            log.warning(f"{member.name}: {error}")

    def _has_lost_machine(self) -> bool:
        return self._lost_place is not None

    def _end(self, status: int) -> str:
        lost = self._lost_place
        return f"has lost its machine {lost.host} ({lost.address})" if lost is not None else super()._end(status)

    def move(self) -> bool:
        """Let the members drain, and start them again on machines that stay. False: they drain already."""
        if self._is_moving or self._draining.is_set():
            return False
        self._is_moving = True
        self._ask_to_end()
        return True

    def resize(self, plan: GangPlan) -> None:
        """Let the members drain, and start those of another plan."""
        self._plan = plan
        self.move()

    def _ask_to_end(self) -> None:
        if not self.places:  # an actor without a machine hears nothing
            self._kill()
        for actor in self._actors:
            actor.terminate.remote()

    def _kill(self) -> None:
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
