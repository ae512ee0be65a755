"""An actor that holds a queue, and cloudpickled groups: how verl and NeMo RL move their rollouts over Ray.

A put is one group, several puts are under way at once, a get brings up to a step's worth of groups. Arrays travel as
numpy, which Ray likes best. Runs in the virtual environment of `ray_requirements.txt`.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
from collections import deque

import ray
from ray import cloudpickle
from rollouts import Portions, check, group_of, parse_args, report, rollouts_per_s

IN_FLIGHT = 32
LARGEST_GET = 64
CAPACITY = 192
"""Capacity in groups, as in our buffer with 64 groups a step and a max_age of 2."""


@ray.remote(num_cpus=0)
class Queue:
    def __init__(self) -> None:
        self._groups: deque[bytes] = deque()
        self._changed = asyncio.Condition()

    async def put(self, group: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._groups) < CAPACITY)
            self._groups.append(group)
            self._changed.notify_all()

    async def get(self, most: int) -> list[bytes]:
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._groups))
            groups = [self._groups.popleft() for _ in range(min(most, len(self._groups)))]
            self._changed.notify_all()
            return groups


def write(where: str, name: str, tokens: int, portions: Portions) -> None:
    ray.init(address=where, namespace="queue", log_to_driver=False, logging_level="error")
    queue = ray.get_actor("queue")
    group = group_of(tokens, seed=0)
    for count in portions:
        under_way: list[ray.ObjectRef] = []
        for _ in range(count):
            if len(under_way) == IN_FLIGHT:
                _, under_way = ray.wait(under_way, num_returns=1)
            under_way.append(queue.put.remote(cloudpickle.dumps(group)))
        ray.get(under_way)


def read(where: str, tokens: int, portions: Portions) -> None:
    queue = ray.get_actor("queue")
    for count in portions:
        while count:
            groups = ray.get(queue.get.remote(min(count, LARGEST_GET)))
            for group in groups:
                for rollout in cloudpickle.loads(group):
                    check(rollout, tokens)
            count -= len(groups)


def main() -> None:
    args = parse_args(__doc__)
    # Metrics and the dashboard would compete for the cores.
    context = ray.init(
        num_cpus=args.writers + 1,
        namespace="queue",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=2 * 2**30,
    )
    queue = Queue.options(name="queue", max_concurrency=1000).remote()
    ray.get(queue.__ray_ready__.remote())
    where = context.address_info["gcs_address"]
    report(rollouts_per_s(write, read, where, tokens=args.tokens, groups=args.groups, writers=args.writers))
    ray.shutdown()


if __name__ == "__main__":
    main()
