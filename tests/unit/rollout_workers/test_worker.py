"""The worker against the reference buffer: from tickets to groups, and everything that may come between."""

import asyncio
import base64
import subprocess
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Any

import pytest

from async_rl.config import BatchConfig
from async_rl.config.rollout import EnvironmentConfig, WorkerConfig
from async_rl.errors import FailureBudgetSpent, find_async_rl_error
from async_rl.payloads.codec import decode
from async_rl.protocols import EpisodeContext, InferenceInterface
from async_rl.replay_protocol import CommitResult, Drop, Limits
from async_rl.testing import EchoAgent, ScriptedInference
from async_rl.types import Message, Rollout, RolloutGroup, Status, TakenGroup, Task, Ticket, VersionRecord
from buffer.reference.memory_buffer import MemoryBuffer
from rollout_workers.episodes.task_mix import TaskMix
from rollout_workers.episodes.worker_records import MAX_BYTES
from rollout_workers.limits.concurrency import EngineLoad
from rollout_workers.worker import Worker
from rollout_workers.worker_parts import WorkerParts
from tests.support.manual_clock import ManualClock
from tests.support.waiting import PATIENCE_S

LIMITS = Limits(max_age=2, groups_per_step=2, lease_s=30.0, max_attempts=2)


class WatchedBuffer(MemoryBuffer):
    """Tells what its worker did, so that tests can wait for it."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock.now)
        self.endings: asyncio.Queue[tuple[str, CommitResult | Drop]] = asyncio.Queue()
        self.asked = asyncio.Event()
        self.renewed = asyncio.Condition()

    async def reserve(self, worker: str, *, version: int, count: int, wait_s: float) -> list[Ticket]:
        self.asked.set()
        return await super().reserve(worker, version=version, count=count, wait_s=wait_s)

    async def commit(self, worker: str, group: RolloutGroup, *, keep: bool = True) -> CommitResult:
        result = await super().commit(worker, group, keep=keep)
        self.endings.put_nowait((group.id, result))
        return result

    async def abandon(self, worker: str, ticket: str, reason: Drop, *, tokens: int = 0) -> None:
        await super().abandon(worker, ticket, reason, tokens=tokens)
        self.endings.put_nowait((ticket, reason))

    async def renew(self, worker: str, tickets: object) -> set[str]:
        lost = await super().renew(worker, tickets)  # pyright: ignore[reportArgumentType]
        async with self.renewed:
            self.renewed.notify_all()
        return lost

    async def next_endings(self, count: int) -> list[CommitResult | Drop]:
        return [(await self.endings.get())[1] for _ in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayAgent(EchoAgent):
    """Rewards by sibling, and lets a test decide how each episode goes."""

    before: Callable[[Task, EpisodeContext], object] = lambda task, context: None
    pays: Callable[[int], float] = float

    async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
        pending = self.before(task, context)
        if asyncio.iscoroutine(pending):
            await pending
        rollout = await EchoAgent.rollout(self, task, inference, context)
        return Rollout(samples=rollout.samples, reward=self.pays(context.sibling), status=Status.OK)


@dataclass
class Bench:
    """A worker at a buffer whose learner has published version 0."""

    agent: EchoAgent
    group_size: int = 2
    groups_in_flight: int = 2
    drop_no_signal: bool = True
    timeout_s: float = 30.0
    drain_s: float = 30.0
    failure_budget: int = 1000
    heartbeat_s: float = 0.01
    settings: Mapping[str, object] = field(default_factory=dict[str, object])
    """More of the worker's."""
    others: Sequence[EchoAgent] = ()
    """Environments beside the agent's, of the same weight."""
    max_in_flight: int | None = None
    """Of the agent's environment."""
    surroundings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """More arguments of the worker."""
    clock: ManualClock = field(default_factory=ManualClock)
    fence: int = -1

    def __post_init__(self) -> None:
        self.buffer = WatchedBuffer(self.clock)
        self.inference = ScriptedInference(lambda text: text, version=0)
        self.worker = Worker(
            WorkerParts(
                name="w0",
                buffer=self.buffer,
                inference=self.inference,
                tasks=TaskMix(
                    [
                        (EnvironmentConfig(type=agent.name, max_in_flight=most), agent)
                        for agent, most in ((self.agent, self.max_in_flight), *((other, None) for other in self.others))
                    ]
                ),
                batch=BatchConfig(groups_per_step=2, group_size=self.group_size, drop_no_signal=self.drop_no_signal),
                settings=WorkerConfig.model_validate(
                    {
                        "groups_in_flight": self.groups_in_flight,
                        "episode_timeout_s": self.timeout_s,
                        "drain_s": self.drain_s,
                        "failure_budget": self.failure_budget,
                        **self.settings,
                    }
                ),
                seed=0,
                heartbeat_s=self.heartbeat_s,
                **self.surroundings,
            )
        )

    async def learn(self, limits: Limits = LIMITS) -> None:
        self.fence = await self.buffer.acquire("learner", limits)
        await self.buffer.recover(self.fence, None)
        await self.publish(await self.buffer.issue(self.fence, after=-1))

    async def publish(self, version: int) -> None:
        await self.buffer.publish(self.fence, VersionRecord(version=version, timeline="t", step=version, digest=""))

    async def take(self, num_groups: int) -> list[TakenGroup]:
        return await self.buffer.take(self.fence, step=1, version=0, num_groups=num_groups, wait_s=PATIENCE_S)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[asyncio.Event]:
        """The worker runs inside the block and is told to stop at its end."""
        stop = asyncio.Event()
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
            tasks.create_task(self.worker.run(stop))
            yield stop
            stop.set()


async def test_tickets_become_groups_of_siblings():
    bench = Bench(PlayAgent(), group_size=3)
    await bench.learn()
    async with bench.at_work():
        taken = await bench.take(2)
    for group in (one.group for one in taken):
        assert (group.worker, len(group.rollouts)) == ("w0", 3)
        assert group.task == PlayAgent().task(int(group.task.answer))
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, 2.0]
        assert (group.oldest_version, group.newest_version) == (0, 0)
    assert {one.group.task.prompt for one in taken} == {"0", "1"}
    assert (await bench.buffer.audit()).is_clean


async def test_a_group_carries_the_times_of_its_episodes():
    bench = Bench(PlayAgent(), group_size=3)
    await bench.learn()
    async with bench.at_work():
        group = (await bench.take(1))[0].group
    assert group.times is not None
    assert [span.sibling for span in group.times.spans if span.stage == "task"] == [-1]
    generations = [span for span in group.times.spans if span.stage == "inference"]
    assert sorted(span.sibling for span in generations) == [0, 1, 2]
    assert all(0 <= span.start_s <= span.stop_s <= group.times.seconds for span in generations)
    assert {(span.oldest_version, span.newest_version) for span in generations} == {(0, 0)}


async def test_heads_of_dropped_groups_are_sent_to_the_learner_and_those_that_do_not_fit_are_counted():
    def fail_some(task: Task, context: EpisodeContext) -> None:
        if task.key.endswith("/0"):
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_some, pays=lambda sibling: 0.5))
    await bench.learn()
    async with bench.at_work():
        await bench.buffer.next_endings(6)
    record = bench.worker.records.take()
    assert record is not None
    heads = [decode(base64.b64decode(dropped.payload)) for dropped in record.dropped]
    assert Counter(dropped.fate for dropped in record.dropped).keys() >= {"no_signal", "failed"}
    for dropped, head in zip(record.dropped, heads, strict=True):
        assert len(head.rollouts) == len(dropped.counts) == 2
        assert head.times is not None
        failures = [rollout.failure for rollout in head.rollouts]
        assert all(failure is not None and "lost" in failure.message for failure in failures) == (dropped.fate == "failed")
    assert bench.worker.records.take() is None

    ticket, long = Ticket(id="t1", task_index=1, version=0, attempt=1), Message(role="user", content=token_hex(2000))
    for _ in range(100):
        bench.worker.records.dropped(ticket, "no_signal", replace(heads[0], task=replace(heads[0].task, prompt=(long,))))
    record = bench.worker.records.take()
    assert record is not None
    assert len(record.dropped) + record.unsent == 100
    assert record.unsent > 50
    assert sum(len(dropped.payload) for dropped in record.dropped) <= MAX_BYTES


async def test_no_more_groups_fly_than_allowed():
    flying: Counter[str] = Counter()
    most = 0
    two_fly = asyncio.Event()

    async def enter_and_leave(task: Task, context: EpisodeContext) -> None:
        nonlocal most
        flying[task.key] += 1
        most = max(most, len(flying))
        if most == 2:
            two_fly.set()
        await two_fly.wait()
        await asyncio.sleep(0)
        flying[task.key] -= 1
        if not flying[task.key]:
            del flying[task.key]

    bench = Bench(PlayAgent(before=enter_and_leave), groups_in_flight=2)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(6) == ["stored"] * 6  # all the slots there are
    assert most == 2


async def test_a_group_without_signal_is_dropped_and_its_task_not_rolled_again():
    played: list[str] = []
    bench = Bench(PlayAgent(before=lambda task, context: played.append(task.key), pays=lambda sibling: 0.5))
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(10) == ["no_signal"] * 10
    assert set(Counter(played).values()) == {bench.group_size}
    assert (await bench.buffer.stats()).ready == 0


@pytest.mark.parametrize(("group_size", "drop_no_signal"), [(2, False), (1, True)])
async def test_equal_rewards_are_kept_where_siblings_are_not_compared(group_size: int, drop_no_signal: bool):
    agent = PlayAgent(pays=lambda sibling: 0.5)
    bench = Bench(agent, group_size=group_size, drop_no_signal=drop_no_signal)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(2) == ["stored", "stored"]


async def test_a_failed_sibling_is_committed_without_samples():
    def fail_the_second(task: Task, context: EpisodeContext) -> None:
        if context.sibling == 1:
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_the_second), group_size=3)
    await bench.learn()
    async with bench.at_work():
        taken = await bench.take(2)
    for one in taken:
        assert [rollout.status for rollout in one.group.rollouts] == [Status.OK, Status.FAILED, Status.OK]
        assert one.group.rollouts[1].samples == ()
    assert bench.worker.counters.failures["environment"] >= 2
    assert bench.worker.counters.scored["echo"] >= 4


async def test_one_score_among_failures_is_no_signal():
    def fail_all_but_the_first(task: Task, context: EpisodeContext) -> None:
        if context.sibling > 0:
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_all_but_the_first, pays=lambda sibling: 1.0))
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(2) == ["no_signal", "no_signal"]


async def test_a_task_whose_siblings_all_fail_is_tried_again_and_then_let_go():
    attempts: list[tuple[str, int]] = []

    def always_fail(task: Task, context: EpisodeContext) -> None:
        attempts.append((task.answer, context.ticket.attempt))
        raise LookupError("lost")

    bench = Bench(PlayAgent(before=always_fail), group_size=1, groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(4) == ["failed"] * 4
    assert attempts[:4] == [("0", 1), ("0", 2), ("1", 1), ("1", 2)]


async def test_hanging_episodes_meet_their_deadline_and_the_others_are_kept():
    async def hang_the_second(task: Task, context: EpisodeContext) -> None:
        if context.sibling == 1:
            await asyncio.Event().wait()

    bench = Bench(PlayAgent(before=hang_the_second), group_size=3, timeout_s=0.05)
    await bench.learn()
    async with bench.at_work():
        taken = await bench.take(2)
    failures = [one.group.rollouts[1].failure for one in taken]
    assert [failure.boundary for failure in failures if failure is not None] == ["deadline", "deadline"]


async def test_a_task_that_cannot_be_posed_is_handed_back():
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Poor(PlayAgent):
        def task(self, index: int) -> Task:
            if index == 0:
                raise IndexError("no task 0")
            return EchoAgent.task(self, index)

    bench = Bench(Poor(), groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(3) == ["failed", "failed", "stored"]
    assert bench.worker.counters.tasks_not_posed == 2


async def test_a_lost_lease_stops_the_work_and_the_task_is_rolled_again():
    hanging, cancelled = asyncio.Event(), asyncio.Event()

    async def hang_at_first(task: Task, context: EpisodeContext) -> None:
        if context.ticket.attempt > 1:
            return
        hanging.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    bench = Bench(PlayAgent(before=hang_at_first), groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        await hanging.wait()
        bench.clock.advance(LIMITS.lease_s + 1)
        await bench.buffer.stats()  # looking is what ends a lost lease
        await cancelled.wait()
        assert await bench.buffer.next_endings(1) == ["stored"]
        assert bench.worker.counters.groups == {"lease_lost": 1, "stored": 1}


async def test_leases_are_renewed_as_long_as_a_group_flies():
    enough = asyncio.Event()

    async def wait(task: Task, context: EpisodeContext) -> None:
        await enough.wait()

    bench = Bench(PlayAgent(before=wait), groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        for _ in range(4):
            async with bench.buffer.renewed:
                await bench.buffer.renewed.wait()
            bench.clock.advance(0.6 * LIMITS.lease_s)
        enough.set()
        assert await bench.buffer.next_endings(1) == ["stored"]


async def test_new_weights_wake_a_worker_that_was_refused():
    bench = Bench(PlayAgent(), heartbeat_s=3600.0)  # nothing but the wake-up can help
    await bench.learn()
    await bench.publish(1)
    async with asyncio.timeout(PATIENCE_S):
        working = asyncio.create_task(bench.worker.run(asyncio.Event()))
        await bench.buffer.asked.wait()
        assert bench.worker.tickets == []
        bench.inference.version = 1
        bench.worker.weights_changed()
        bench.worker.weights_changed()  # telling twice is harmless
        assert await bench.buffer.next_endings(2) == ["stored", "stored"]
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working


async def test_a_draining_worker_finishes_what_flies_and_starts_nothing():
    flying, finish = asyncio.Semaphore(0), asyncio.Event()

    async def wait(task: Task, context: EpisodeContext) -> None:
        flying.release()
        await finish.wait()

    bench = Bench(PlayAgent(before=wait), group_size=2, groups_in_flight=2)
    await bench.learn()
    async with bench.at_work() as stop:
        for _ in range(4):
            await flying.acquire()
        stop.set()
        finish.set()
    assert bench.worker.counters.groups == {"stored": 2}
    stats = await bench.buffer.stats()
    assert (stats.issued, stats.ready, stats.reserved) == (2, 2, 0)


async def test_a_draining_worker_hands_back_what_does_not_finish():
    flying = asyncio.Semaphore(0)

    async def hang_on_the_first_task(task: Task, context: EpisodeContext) -> None:
        flying.release()
        if task.prompt == "0":
            await asyncio.Event().wait()

    bench = Bench(PlayAgent(before=hang_on_the_first_task), group_size=2, groups_in_flight=2, drain_s=0.05)
    await bench.learn(Limits(max_age=0, groups_per_step=2, lease_s=30.0, max_attempts=2))
    async with bench.at_work() as stop:
        for _ in range(4):
            await flying.acquire()
        assert await bench.buffer.next_endings(1) == ["stored"]
        stop.set()
    assert bench.worker.counters.groups == {"stored": 1, "abandoned": 1}
    stats = await bench.buffer.stats()
    assert (stats.reserved, stats.dropped) == (0, {"abandoned": 1})
    assert bench.worker.tickets == []


async def test_the_failure_budget_stops_the_worker_loudly():
    def fail(task: Task, context: EpisodeContext) -> None:
        raise ConnectionError("the game server is gone")

    bench = Bench(PlayAgent(before=fail), failure_budget=5)
    await bench.learn()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ExceptionGroup) as raised:
            await bench.worker.run(asyncio.Event())
    spent = find_async_rl_error(raised.value)
    assert isinstance(spent, FailureBudgetSpent)
    assert "5 episodes failed in a row" in str(spent)
    assert "the game server is gone" in str(spent)


async def test_a_success_refills_the_failure_budget():
    def fail_the_first(task: Task, context: EpisodeContext) -> None:
        if context.sibling == 0:
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_the_first), group_size=2, groups_in_flight=1, failure_budget=2)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(6) == ["no_signal"] * 6


async def test_a_ticket_that_comes_after_the_stop_is_handed_back():
    bench = Bench(PlayAgent(), heartbeat_s=3600.0)  # one long request, which the first ticket answers
    async with bench.at_work() as stop:
        await bench.buffer.asked.wait()
        stop.set()
        await bench.learn()
    assert bench.worker.counters.groups == {"abandoned": 2}
    assert bench.worker.counters.episodes == 0


async def test_the_seed_of_an_episode_tells_it_from_others_and_comes_back_in_a_repetition():
    async def seeds_of(group_size: int) -> dict[tuple[int, int, int], int]:
        seen: dict[tuple[int, int, int], int] = {}

        def note(task: Task, context: EpisodeContext) -> None:
            seen[context.ticket.task_index, context.ticket.attempt, context.sibling] = context.seed

        bench = Bench(PlayAgent(before=note), group_size=group_size)
        await bench.learn()
        async with bench.at_work():
            await bench.buffer.next_endings(4)
        return seen

    first, again = await seeds_of(3), await seeds_of(3)
    assert len(set(first.values())) == len(first)
    shared = first.keys() & again.keys()
    assert len(shared) >= 12
    assert all(first[episode] == again[episode] for episode in shared)


async def test_the_counters_add_up():
    bench = Bench(PlayAgent(), group_size=2)
    await bench.learn()
    async with bench.at_work():
        await bench.buffer.next_endings(6)
    counted = bench.worker.counters.snapshot()
    assert counted["episodes"] == counted["scored/echo"] == 12
    assert counted["reward_sum/echo"] == 6.0
    assert counted["groups/stored"] == 6
    assert counted["tokens"] == 12 * 2  # a digit and the end token
    assert counted["forked"] == 0


# -- failed siblings, broken environments -----------------------------------------------------------------------------
async def test_failed_siblings_are_played_again_with_another_seed():
    seeds: dict[tuple[int, int], list[int]] = {}

    def fail_at_first(task: Task, context: EpisodeContext) -> None:
        tries = seeds.setdefault((context.ticket.task_index, context.sibling), [])
        tries.append(context.seed)
        if context.sibling > 0 and len(tries) == 1:
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_at_first), group_size=3, settings={"refills": 2})
    await bench.learn()
    async with bench.at_work():
        taken = await bench.take(2)
    assert all(rollout.status is Status.OK for one in taken for rollout in one.group.rollouts)
    assert all(len(set(tries)) == len(tries) for tries in seeds.values())
    assert bench.worker.counters.refills == bench.worker.counters.failures["environment"] >= 4


async def test_a_group_has_so_many_refills_and_no_more():
    def fail_the_second(task: Task, context: EpisodeContext) -> None:
        if context.sibling == 1:
            raise LookupError("lost")

    bench = Bench(PlayAgent(before=fail_the_second), group_size=3, groups_in_flight=1, settings={"refills": 2})
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(1) == ["stored"]
        assert (await bench.take(1))[0].group.rollouts[1].status is Status.FAILED
        ended = 1 + bench.buffer.endings.qsize()
        assert bench.worker.counters.refills >= 2 * ended
        assert bench.worker.counters.failures["environment"] >= 3 * ended


def broken(task: Task, context: EpisodeContext) -> None:
    raise ConnectionError("the game server is gone")


async def test_a_broken_environment_is_left_alone_and_the_others_go_on():
    attempts: Counter[int] = Counter()

    def count(task: Task, context: EpisodeContext) -> None:
        attempts[context.ticket.task_index] += 1
        broken(task, context)

    bench = Bench(
        PlayAgent(name="broken", before=count),
        others=[PlayAgent(name="good")],
        group_size=2,
        groups_in_flight=4,
        settings={"breaker": {"after": 2, "pause_s": 3600}},
    )
    await bench.learn(Limits(max_age=9, groups_per_step=2, lease_s=30.0, max_attempts=99))
    async with bench.at_work() as stop:
        endings: Counter[str] = Counter()
        while endings["stored"] < 8:
            endings.update(await bench.buffer.next_endings(1))
        stop.set()
    assert bench.worker.counters.pauses == 1
    assert bench.worker.counters.scored == {"good": 16}
    assert sum(attempts.values()) < 16
    assert (await bench.buffer.audit()).is_clean


async def test_an_environment_that_works_again_is_played_again():
    works = asyncio.Event()

    def fail_until_then(task: Task, context: EpisodeContext) -> None:
        if not works.is_set():
            broken(task, context)

    bench = Bench(
        PlayAgent(name="flaky", before=fail_until_then),
        others=[PlayAgent(name="good")],
        groups_in_flight=4,
        settings={"breaker": {"after": 2, "pause_s": 0.05}},
    )
    await bench.learn(Limits(max_age=99, groups_per_step=2, lease_s=30.0, max_attempts=99))
    async with bench.at_work():
        while not bench.worker.counters.pauses:
            await bench.buffer.next_endings(1)
        works.set()
        while not bench.worker.counters.scored["flaky"]:
            await bench.buffer.next_endings(1)


async def test_the_only_environment_is_never_left_alone():
    bench = Bench(PlayAgent(before=broken), failure_budget=50, settings={"breaker": {"after": 2, "pause_s": 3600}})
    await bench.learn()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ExceptionGroup) as raised:
            await bench.worker.run(asyncio.Event())
    assert isinstance(find_async_rl_error(raised.value), FailureBudgetSpent)


async def test_no_more_groups_of_an_environment_fly_than_it_allows():
    flying: Counter[str] = Counter()
    most = 0

    async def enter_and_leave(task: Task, context: EpisodeContext) -> None:
        nonlocal most
        flying[task.key] += 1
        most = max(most, len(flying))
        for _ in range(10):  # as tasks are posed: in this time the others would come
            await asyncio.to_thread(int)
        flying[task.key] -= 1
        if not flying[task.key]:
            del flying[task.key]

    bench = Bench(PlayAgent(before=enter_and_leave), groups_in_flight=4, max_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(6) == ["stored"] * 6
    assert most == 1


async def test_stragglers_keep_no_other_group_from_beginning():
    begun, third = set[str](), asyncio.Event()

    async def wait_with_the_first(task: Task, context: EpisodeContext) -> None:
        begun.add(task.key)
        if len(begun) == 3:
            third.set()
        if context.sibling == 0:
            await third.wait()

    bench = Bench(PlayAgent(before=wait_with_the_first), group_size=2, groups_in_flight=2)
    await bench.learn(Limits(max_age=999, groups_per_step=2, lease_s=30.0, max_attempts=2))
    async with bench.at_work():
        assert await bench.buffer.next_endings(2) == ["stored"] * 2


# -- what episodes find around them -----------------------------------------------------------------------------------
async def test_siblings_may_be_played_together_and_find_the_gateway_and_the_policies():
    gateway, judge = object(), ScriptedInference(lambda text: text)
    seen: list[EpisodeContext] = []

    class Seats(PlayAgent):
        async def rollout_group(
            self, task: Task, inference: InferenceInterface, contexts: Sequence[EpisodeContext]
        ) -> Sequence[Rollout]:
            seen.extend(contexts)
            return [await self.rollout(task, inference, context) for context in contexts]

    bench = Bench(Seats(), group_size=3, surroundings={"gateway": gateway, "policies": {"judge": judge}})
    await bench.learn()
    async with bench.at_work():
        taken = await bench.take(2)
    assert [rollout.reward for rollout in taken[0].group.rollouts] == [0.0, 1.0, 2.0]
    assert [context.sibling for context in seen[:3]] == [0, 1, 2]
    assert all(context.gateway is gateway and context.policies == {"judge": judge} for context in seen)


async def test_what_cannot_be_trained_on_is_refused():
    class Silent(PlayAgent):
        async def rollout(self, task: Task, inference: InferenceInterface, context: EpisodeContext) -> Rollout:
            return replace(await PlayAgent.rollout(self, task, inference, context), samples=())

    bench = Bench(Silent(), groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        assert await bench.buffer.next_endings(1) == ["failed"]


async def test_a_drain_does_not_wait_for_a_task_that_is_never_posed():
    posing, released = threading.Event(), threading.Event()

    class Slow(PlayAgent):
        def task(self, index: int) -> Task:
            posing.set()
            released.wait()
            raise LookupError("too late")

    bench = Bench(Slow(), groups_in_flight=1, drain_s=0.01)
    await bench.learn()
    async with bench.at_work() as stop:
        await asyncio.to_thread(posing.wait)
        stop.set()
    released.set()
    assert bench.worker.counters.groups == {"abandoned": 1}
    assert (await bench.buffer.audit()).is_clean


async def test_the_number_of_groups_follows_the_load():
    loads = {"load": EngineLoad}
    bench = Bench(PlayAgent(), settings={"groups_in_flight": "auto", "groups_at_most": 20}, surroundings=loads)
    await bench.learn(Limits(max_age=999, groups_per_step=2, lease_s=30.0, max_attempts=2))
    async with bench.at_work():
        while bench.worker.limit < 20:
            await bench.buffer.next_endings(1)


async def test_processes_that_episodes_leave_behind_are_ended():
    left: list[subprocess.Popen[bytes]] = []

    def leave(task: Task, context: EpisodeContext) -> None:
        left.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))

    bench = Bench(PlayAgent(before=leave), groups_in_flight=1)
    await bench.learn()
    async with bench.at_work():
        await bench.buffer.next_endings(2)
    assert left
    assert [process.poll() is not None for process in left] == [True] * len(left)
    assert bench.worker.counters.leaked.total() == len(left)


async def test_an_environment_that_blocked_a_worker_is_left_alone_from_the_first_ticket_on():
    bench = Bench(PlayAgent(name="blocks"), others=[PlayAgent(name="awaits")], groups_in_flight=4)
    await bench.learn(Limits(max_age=9, groups_per_step=2, lease_s=30.0, max_attempts=99))
    bench.worker.environment_limits.block("blocks", for_s=3600)
    async with bench.at_work() as stop:
        endings: Counter[str] = Counter()
        while endings["stored"] < 4:
            endings.update(await bench.buffer.next_endings(1))
        stop.set()
    assert bench.worker.counters.scored.keys() == {"awaits"}


async def test_an_environment_without_others_is_played_again_after_its_pause():
    bench = Bench(PlayAgent(name="blocks"))
    await bench.learn()
    bench.worker.environment_limits.block("blocks", for_s=0.05)
    async with bench.at_work():
        assert await bench.buffer.next_endings(2) == ["stored", "stored"], "its tasks wait meanwhile"
