"""Whether the processes of a fleet find each other on the machines of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from async_rl.config import Config
from async_rl.errors import ConfigError


def check(config: Config, addresses: AbstractSet[str]) -> None:
    """Refuse a configuration whose processes would not find each other on machines with these addresses. Raises ConfigError."""
    if len(addresses) == 1:
        return
    if not config.redis.url:
        raise ConfigError(
            f"redis.url is empty, but the Ray cluster has {len(addresses)} machines: name a server that all of them reach "
            "(docs/redis.md)"
        )
    if not config.wire.insecure:
        raise ConfigError(
            f"wire.insecure is false, but the Ray cluster has {len(addresses)} machines: weights travel between them, and "
            "process groups do not authenticate their members; if the network is private, set wire.insecure: true"
        )


def wire_host(config: Config, address: str) -> str | None:
    """Where a learner sends weights from, on a machine with this address; None: where `wire.host` says.

    It does not depend on how many machines there are: others may join while the learner runs.
    """
    return address if config.redis.url and config.wire.insecure else None
