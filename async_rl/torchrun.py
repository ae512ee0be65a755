"""torchrun for the learner's ranks, but it ends as they do: a supervisor decides by the exit code whether to try again."""

from __future__ import annotations

import sys
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun  # pyright: ignore[reportUnknownVariableType]


def main() -> NoReturn:
    try:
        torchrun(sys.argv[1:])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise SystemExit(failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode) from None
    except SignalException as signalled:  # it passed the signal on and has waited for the ranks
        raise SystemExit(128 + signalled.sigval) from None
    raise SystemExit(0)


if __name__ == "__main__":
    main()
