"""What every warm process has imported. A warning is an error in it from then on, as under `python -W error`."""

import gc
import os
import tempfile
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch reads them when it is imported

warnings.simplefilter("error")
import async_rl.cli.curves  # noqa: E402
import async_rl.cli.main  # noqa: E402, F401
import buffer.__main__  # noqa: E402, F401
import learner.__main__  # noqa: E402, F401
import rollout_workers.__main__  # noqa: E402
import rollout_workers.agents.multi_task  # noqa: E402
import rollout_workers.environments.even_digits  # noqa: E402
import rollout_workers.evaluation.__main__  # noqa: E402, F401

# Where a library keeps a thread, Python 3.12 warns of each fork.
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)

import torch._dynamo  # noqa: E402, F401  # a process that makes an optimizer imports it, which takes seconds

tempfile.tempdir = None  # found while importing, in the environment of whichever test was first; each fork has its own

gc.freeze()  # forks do not look through what is here, so they share its pages
