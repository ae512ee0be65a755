"""An engine whose step hangs, as in a stuck CUDA call: its process ends with the name of the thread."""

from __future__ import annotations

import re
import subprocess
import sys

from async_rl.errors import ServiceStopped
from tests.support.repository import ROOT, module_environment
from tests.support.waiting import PATIENCE_S

HANGS = """\
import asyncio, time

from async_rl.supervision import work_limit
from rollout_workers.inference.engine_core import EngineCore
from tests.support.engine_stage import engine, prompts, weights

class Hangs(EngineCore):
    def step(self):
        if self.metrics.steps == 3:
            time.sleep(3600)
        super().step()

async def main():
    async with engine(core=Hangs) as running:
        await running.swap(0, weights(1))
        await running.generate(prompts(1)[0])

with work_limit(4):
    asyncio.run(main())
"""


def test_a_step_that_hangs_ends_the_process_with_the_name_of_its_thread() -> None:
    line = [sys.executable, "-c", HANGS]
    done = subprocess.run(
        line, cwd=ROOT, env=module_environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == ServiceStopped.exit_code, done.stderr
    said = r"the thread 'inference-engine_0' has worked on an engine step for \d s without finishing, at <string>:10 in step"
    assert re.search(said, done.stderr.splitlines()[-1]), done.stderr
