"""The thread that keeps a blocking library: whatever a call raises, the next one is answered."""

from __future__ import annotations

import sys

import pytest

from rollout_workers.adapters.episode_thread import EpisodeThread


async def test_a_call_that_exits_or_stops_an_iteration_ends_neither_the_thread_nor_the_loop() -> None:
    thread = EpisodeThread("a simulator")
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await thread.run(lambda: sys.exit(3))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await thread.run(lambda: next(iter(())))
    assert await thread.run(lambda: "answered") == "answered"
