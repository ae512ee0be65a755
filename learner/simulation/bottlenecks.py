"""What would limit a fleet first: how much of each shared resource it uses, and how many workers would fill it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from async_rl.config import Config
from learner.simulation.control_traffic import redis_share
from learner.simulation.prediction import MOST_WORKERS, Machines, Prediction
from learner.simulation.rates import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    name: str
    used: float
    """Share of its capacity. Above 1: it limits the fleet."""
    full_at: int | None
    """Workers that fill it at the predicted rates of steps and groups; None: none that are simulated do."""


def resources(config: Config, rates: Rates, machines: Machines, found: Prediction) -> tuple[Resource, ...]:
    """Return what the workers and the learner share, the fullest first."""
    between_pushes = max(found.step_s * config.wire.push_every_steps, config.wire.push_every_s)

    def pushing(workers: int) -> float:
        return rates.to_push_s(workers, machines.link_gb_s) / between_pushes

    def redis(workers: int) -> float:
        return redis_share(workers, groups_per_s=found.rolled_out_per_s, pushes_per_s=found.pushes_per_s)

    shares: dict[str, Callable[[int], float]] = {"learner's pushes": pushing, "core of Redis": redis}
    if (room := _room(config)) is not None:
        shares["buffer memory"] = lambda _: found.buffer_bytes / room
    listed = [
        Resource(name=name, used=share(found.workers), full_at=_full_at(share, found.workers)) for name, share in shares.items()
    ]
    return tuple(sorted(listed, key=lambda resource: -resource.used))


def _room(config: Config) -> float | None:
    """Return the bytes that payloads may have; None: a server of your own holds them."""
    if config.payload_folder is not None:
        return config.redis.payloads_max_mb * 2**20
    return None if config.redis.url else config.redis.max_memory_mb * 2**20


def _full_at(share: Callable[[int], float], workers: int) -> int | None:
    """Return the smallest fleet from this size on that uses the resource wholly."""
    few, many = workers - 1, workers
    while share(many) < 1:
        few, many = many, 2 * many
        if few >= MOST_WORKERS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if share(middle) >= 1 else (middle, many)
    return many
