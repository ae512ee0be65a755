"""async_rl: asynchronous off-policy RL post-training. This package holds the words that the three roles share.

`from async_rl import Task, Rollout, ...`: the public names are listed in `__init__.pyi` and imported on first use. Base classes
and decorators for environments and agents come from `rollout_workers`.
"""

from async_rl.imports.lazy import lazy_names
from async_rl.imports.old_names import install

__version__ = "0.1.0"

__getattr__, __dir__ = lazy_names(__name__, __file__)
install()
