"""Run one check in this process: python -m gpu_checks MODULE NAME DEVICE RESULT_PATH."""

from __future__ import annotations

import sys

from gpu_checks.one_check import main

if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
