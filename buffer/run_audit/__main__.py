"""`python -P -m buffer.run_audit @ config.yaml`: the process that `async-rl audit` runs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from async_rl.cli.audit import AUDIT
from async_rl.cli.grammar import read
from async_rl.config.loading import load_unfetched
from async_rl.errors import BufferUnreachable, boundary
from buffer.run_audit.evidence import gather
from buffer.run_audit.page import show, show_json
from buffer.run_audit.rules import judge


def main(arguments: Sequence[str]) -> int:
    line = read(AUDIT, arguments)
    evidence = asyncio.run(gather(load_unfetched(line.config), files_only=line.has("files-only"), every_byte=line.has("bytes")))
    verdict = judge(evidence)
    (show_json if line.has("json") else show)(evidence, verdict)
    if verdict.findings:
        return 1
    return BufferUnreachable.exit_code if verdict.unchecked and not line.has("files-only") else 0


if __name__ == "__main__":
    with boundary("async-rl audit"):
        raise SystemExit(main(sys.argv[1:]))
