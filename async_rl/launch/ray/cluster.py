"""The only door to Ray: connects to a cluster, places actors, and asks which machines there are. Ray's values are untyped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from async_rl.errors import ConfigError

NAMESPACE = "async-rl"
LOCAL = "local"

_LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""For a cluster of this machine alone: Ray then listens on the loopback interface, as it does on desktops. Access to
Ray's ports is enough to run code."""

Actor = Any
"""A handle of an actor; its methods have `remote`, which returns an awaitable."""


class ActorLost(Exception):
    """An actor has ended, or its machine. The message says why, as far as Ray knows."""

    def __init__(self, cause: str, *, is_certain: bool) -> None:
        """`is_certain`: Ray knows that it has ended; it is not only out of reach."""
        super().__init__(cause)
        self.is_certain = is_certain


class ActorFailed(Exception):
    """A method of an actor has raised an exception, which is the cause."""


class Cluster:
    """A connection to a Ray cluster, which ends with this process or with `close`; actors that it has made end with it."""

    def __init__(self, address: str, *, cores: int = 1) -> None:
        """`address`: HOST:PORT of the cluster's head; `auto`: of the cluster that this machine belongs to; `local`: start one
        here. `cores`: those that processes ask for; on this machine alone they share what there are. Raises ConfigError."""
        if address == LOCAL:
            os.environ.update({name: value for name, value in _LOOPBACK_ONLY.items() if name not in os.environ})
        try:
            self._ray: Any = import_module("ray")
        except ImportError as error:
            raise ConfigError(f"Ray is not installed here ({error}); install it with: pip install 'async-rl[ray]'") from error
        try:
            self._ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=True,
                logging_level="warning",
                **({"include_dashboard": False, "num_cpus": max(cores, os.cpu_count() or 1)} if address == LOCAL else {}),
            )
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
            raise ConfigError(
                f"no Ray cluster answers at {address!r} ({str(error).splitlines()[0]}); start one (`ray start --head`), or use "
                "--address local for this machine alone"
            ) from error

    def close(self) -> None:
        self._ray.shutdown()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self, kind: type, *arguments: object, resources: Mapping[str, float], group: Any = None, index: int = 0) -> Actor:
        """Start an actor where its resources are free, or in a place of a group. It waits until they are."""
        special = {"CPU": "num_cpus", "GPU": "num_gpus"}
        options: dict[str, Any] = {special[name]: value for name, value in resources.items() if name in special}
        options["resources"] = {name: value for name, value in resources.items() if name not in special}
        if group is not None:
            strategies: Any = import_module("ray.util.scheduling_strategies")
            options["scheduling_strategy"] = strategies.PlacementGroupSchedulingStrategy(group, index)
        return self._ray.remote(kind).options(max_restarts=0, **options).remote(*arguments)

    def named(self, kind: type, name: str, *arguments: object) -> Actor:
        """Start an actor that `find` finds, on this machine, whose fate it shares; it needs no resources.

        Raises ConfigError if there is one of this name.
        """
        strategies: Any = import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(self._ray.get_runtime_context().get_node_id(), soft=False)
        options = {"name": name, "num_cpus": 0, "max_restarts": 0, "scheduling_strategy": here}
        try:
            return self._ray.remote(kind).options(**options).remote(*arguments)
        except ValueError as error:
            raise ConfigError(f"this Ray cluster already has {name}: {str(error).splitlines()[0]}") from error

    def find(self, name: str) -> Actor | None:
        try:
            return self._ray.get_actor(name)
        except ValueError:
            return None

    def reserve(self, bundles: Sequence[Mapping[str, float]]) -> Any:
        """Ask for a place on a different machine for each bundle, all at once. Returns the group."""
        return self._ray.util.placement_group([dict(bundle) for bundle in bundles], strategy="STRICT_SPREAD")

    def has_reserved(self, group: Any) -> bool:
        """Whether a group has its places."""
        return self._ray.util.placement_group_table(group)["state"] == "CREATED"

    def release(self, group: Any) -> None:
        self._ray.util.remove_placement_group(group)

    def kill(self, actor: Actor) -> None:
        self._ray.kill(actor)

    def wait(self, answer: Any) -> Any:
        """Block until an actor has answered. Raises ConfigError if it has ended meanwhile, else what it raised."""
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayActorError as error:
            raise ConfigError("the fleet has ended before it answered") from error

    async def answer(self, answer: Any) -> Any:
        """What an actor's method returned. Raises ActorLost and ActorFailed."""
        try:
            return await asyncio.wrap_future(answer.future())
        except self._ray.exceptions.RayTaskError as error:
            raise ActorFailed(_last_line(error)) from error
        except self._ray.exceptions.RayError as error:
            is_certain = not isinstance(error, self._ray.exceptions.ActorUnavailableError)
            raise ActorLost(_cause(error), is_certain=is_certain) from error

    def machines(self) -> list[Mapping[str, Any]]:
        """The machines that live: NodeID, NodeManagerAddress, Resources, ..."""
        return [node for node in self._ray.nodes() if node["Alive"]]

    def living(self) -> set[str]:
        """Their ids."""
        return {str(node["NodeID"]) for node in self.machines()}

    def addresses(self) -> set[str]:
        return {str(node["NodeManagerAddress"]) for node in self.machines()}

    def with_room(self, resources: Mapping[str, float]) -> set[str]:
        """Ids of machines that stay and have these resources free."""
        free: Mapping[str, Mapping[str, float]] = self._ray._private.state.available_resources_per_node()
        staying = self.living() - self.draining()
        return {
            machine
            for machine, there in free.items()
            if machine in staying and all(there.get(name, 0) >= number for name, number in resources.items())
        }

    def draining(self) -> set[str]:
        """Ids of machines that will be taken away, as a preemption notice or `ray drain-node` has told the cluster."""
        return set(self._ray._private.state.state.get_draining_nodes())

    @property
    def has_gpus(self) -> bool:
        return self._ray.cluster_resources().get("GPU", 0) > 0


def _cause(error: Exception) -> str:
    """Why an actor has ended, in one line of Ray's message: after what it was doing, and indented facts about it, or the last
    line of a traceback."""
    if getattr(error, "actor_init_failed", False):
        return _last_line(error)
    said = [line for line in str(error).splitlines() if line and not line[0].isspace()]
    return said[1] if len(said) > 1 else said[0]


def _last_line(error: Exception) -> str:
    """The exception at the end of a traceback, and its message."""
    return str(error).strip().splitlines()[-1]


def this_machine() -> tuple[str, str]:
    """Inside an actor: Ray's id of the machine, and its address on the cluster's network."""
    ray: Any = import_module("ray")
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
