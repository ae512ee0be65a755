"""Blocking rewards, computed in grader processes that are killed when they take too long.

from rollout_workers.graders import in_process

async def reward(self, task, response):
    return await in_process(grade, task.answer, response, timeout_s=5)
"""

from rollout_workers.graders.pool import GraderDied, GraderPool, GraderRaised, GraderTimeout, in_process, open_graders

__all__ = ["GraderDied", "GraderPool", "GraderRaised", "GraderTimeout", "in_process", "open_graders"]
