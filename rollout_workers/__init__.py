"""Rollout workers: from tickets to scored groups of rollouts. `worker.py` first, then `episodes/`.

`from rollout_workers import Environment, ...`: what people who write environments and agents need stands in `__init__.pyi`
and is imported on first use.
"""

from async_rl.imports.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
