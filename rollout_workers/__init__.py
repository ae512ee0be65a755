"""Rollout workers: from tickets to scored groups of rollouts. `worker.py` first, then `episodes/`.

`from rollout_workers import Environment, ...`: the names for authors of environments and agents are listed in `__init__.pyi`
and imported on first use.
"""

from async_rl.imports.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
