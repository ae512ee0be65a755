"""What every warm process has imported. A warning is an error in it from then on, as under `python -W error`."""

import warnings

warnings.simplefilter("error")
import learner.__main__  # noqa: E402, F401

# Where a library keeps a thread, Python 3.12 warns of each fork.
warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
