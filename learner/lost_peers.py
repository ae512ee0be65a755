"""Translate the errors of a lost rank: when one rank dies, all end and are restarted together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from async_rl.errors import ServiceStopped


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """Raise ServiceStopped instead of torch's errors. gloo raises plain RuntimeErrors, recognised by their text."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):
            raise
        raise ServiceStopped(f"learner rank {dist.get_rank()} lost its connection to the other ranks") from error
