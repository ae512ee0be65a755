"""What every warm process has imported. A warning of these imports is an error, as under `python -W error`."""

import os
import warnings

os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch reads them when it is imported

with warnings.catch_warnings():
    warnings.simplefilter("error")
    import rollout_workers.__main__
    import rollout_workers.evaluation.__main__  # noqa: F401
