"""The other ranks of a learner, when one of them is gone: all end, and start again together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from async_rl.errors import ServiceStopped


@contextmanager
def naming_lost_peers() -> Iterator[None]:
    """One sentence instead of torch's traceback. gloo's errors are plain RuntimeErrors that say where they come from."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):
            raise
        raise ServiceStopped(f"learner rank {dist.get_rank()} hears no more of the other ranks") from error
