"""What the process has imported from which checks are forked. It must not touch CUDA, which no fork could use then.

torch asks the driver's library for GPUs instead of CUDA while the variable is set. A fork that finds CUDA touched all the same
begins anew (one_check.py).
"""

import gc
import os
import traceback

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
HAS_GPU = False
try:
    import torch
    import torch._dynamo  # an optimizer imports it, which takes seconds

    HAS_GPU = torch.cuda.is_available()
    if not HAS_GPU:
        torch.set_num_threads(1)

    import gpu_checks.engine_checks
    import gpu_checks.learner_checks
    import gpu_checks.model_checks
    import gpu_checks.wire_checks  # noqa: F401
except Exception:
    traceback.print_exc()  # the checks that need it say so, each for itself

gc.freeze()  # forks do not look through what is here, so they share its pages
