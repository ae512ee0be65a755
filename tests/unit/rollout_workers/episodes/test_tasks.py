"""The environments of one worker: who has which task, who is opened, who is closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from async_rl.board.environment_mix import EnvironmentChange
from async_rl.config.rollout import EnvironmentConfig
from async_rl.errors import ConfigError, find_async_rl_error
from async_rl.testing import EchoAgent
from async_rl.types import MixChange
from rollout_workers.episodes.task_mix import EnvironmentDetached, EnvironmentUnavailable, TaskMix

SECTIONS = [EnvironmentConfig(type="even_digits", weight=2), EnvironmentConfig(type="counting")]
HERE = __name__


class House(EchoAgent):
    """Notes in which task of asyncio it was entered and left."""

    log: ClassVar[list[tuple[str, object]]] = []

    async def __aenter__(self) -> House:
        self.log.append(("entered", asyncio.current_task()))
        return self

    async def __aexit__(self, *problem: object) -> None:
        self.log.append(("left", asyncio.current_task()))


class Locked(EchoAgent):
    async def __aenter__(self) -> Locked:
        raise OSError("no key")

    async def __aexit__(self, *problem: object) -> None: ...


@dataclass
class Log:
    """What people did to the mix."""

    changes: list[MixChange] = field(default_factory=list)

    def add(self, name: str, weight: float, at: int = 0, type_name: str = "", args: dict[str, Any] | None = None) -> str:
        given = args if args is not None else {}
        environment = EnvironmentConfig(type=type_name, name=name, args=given) if type_name else None
        change = EnvironmentChange(name=name, weight=weight, environment=environment)
        self.changes.append(MixChange(at=at, id=f"{len(self.changes)}", change=change.model_dump_json()))
        return self.changes[-1].id


@pytest.fixture
def house() -> list[tuple[str, object]]:
    House.log.clear()
    return House.log


async def played(mix: TaskMix, index: int, change: str = "") -> str:
    async with mix.source(index, change) as source:
        return source.agent.task(source.index).key


@asynccontextmanager
async def following(log: Log, *sections: EnvironmentConfig) -> AsyncGenerator[TaskMix]:
    mix = TaskMix.from_config(sections if sections else SECTIONS, seed=7, environments_from=[HERE, "async_rl.testing"])
    async with mix.open():
        mix.follow(log.changes)
        yield mix


async def test_drawing_depends_on_nothing_but_the_index():
    here, there = TaskMix.from_config(SECTIONS, seed=7), TaskMix.from_config(SECTIONS, seed=7)
    backwards = {index: await played(there, index) for index in reversed(range(200))}
    assert [await played(here, index) for index in range(200)] == [backwards[index] for index in range(200)]


async def test_another_seed_poses_other_tasks():
    assert await played(TaskMix.from_config(SECTIONS, seed=1), 0) != await played(TaskMix.from_config(SECTIONS, seed=2), 0)


async def test_an_attached_environment_is_made_when_it_is_needed_and_the_ticket_says_under_which_mix():
    log = Log()
    early = log.add("echo", 5, at=3, type_name="async_rl.testing:EchoAgent")
    late = log.add("echo", 0, at=10)
    async with following(log) as mix:
        assert mix.knows("")
        assert mix.knows(early)
        assert not mix.knows("another")
        under_early = [await played(mix, index, early) for index in range(3, 20)]
        under_late = [await played(mix, index, late) for index in range(3, 20)]
        assert under_early[:7] == under_late[:7], "the later change holds from task 10 on"
        assert any(key.startswith("echo") for key in under_early[7:])
        assert not any(key.startswith("echo") for key in under_late[7:])


async def test_an_agent_is_entered_once_and_left_in_the_task_that_entered_it(house: list[tuple[str, object]]):
    section = EnvironmentConfig(type=f"{HERE}:House")
    async with following(Log(), section) as mix:
        assert [event for event, _ in house] == ["entered"]
        await asyncio.gather(*(asyncio.create_task(played(mix, index)) for index in range(5)))
    assert [event for event, _ in house] == ["entered", "left"]
    assert house[0][1] is house[1][1]
    assert house[0][1] is not asyncio.current_task()


async def test_a_detached_environment_is_closed_once_its_last_task_has_ended(house: list[tuple[str, object]]):
    log = Log()
    attached = log.add("house", 5, type_name=f"{HERE}:House")
    async with following(log, EnvironmentConfig(type="counting", weight=0.001)) as mix:
        async with mix.source(0, attached):
            assert [event for event, _ in house] == ["entered"]
            log.add("house", 0, at=50)
            mix.follow(log.changes)
            await asyncio.sleep(0)
            assert [event for event, _ in house] == ["entered"]
        await asyncio.sleep(0)
        assert [event for event, _ in house] == ["entered", "left"]
        await played(mix, 1, attached)  # a task of it that is rolled again
    assert [event for event, _ in house] == ["entered", "left"] * 2


@pytest.mark.parametrize(
    ("type_name", "args"),
    [
        ("subprocess:Popen", {"args": ["touch", "FILE"]}),
        ("dataset", {"path": "rows.jsonl", "curriculum": "os:getcwd"}),
        ("multi_task", {"environments": [{"type": "subprocess:Popen", "args": {"args": ["touch", "FILE"]}}]}),
    ],
)
async def test_who_can_write_the_mix_brings_no_code(type_name: str, args: dict[str, Any], tmp_path: Path):
    file = tmp_path / "ran"
    log = Log()
    change = log.add("bad", 1e6, type_name=type_name, args=json.loads(json.dumps(args).replace("FILE", str(file))))
    async with following(log) as mix:
        with pytest.raises(EnvironmentUnavailable, match=r"may not be attached: it names .*, which this run's file does not"):
            await played(mix, 5, change)
        assert await played(mix, 5), "under the mix before"
    assert not file.exists()


async def test_what_is_attached_reads_no_file_of_a_machine_that_joined_unless_it_allows_that(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "2"}\n')
    log = Log()
    change = log.add("rows", 1e6, type_name="dataset", args={"path": str(rows)})
    for has_joined, places in ((True, [HERE]), (True, [HERE, str(tmp_path)]), (False, [HERE])):
        mix = TaskMix.from_config(SECTIONS, seed=7, environments_from=places, has_joined=has_joined)
        async with mix.open():
            mix.follow(log.changes)
            if has_joined and str(tmp_path) not in places:
                with pytest.raises(EnvironmentUnavailable, match="which this worker was not allowed to read"):
                    await played(mix, 5, change)
            else:
                assert await played(mix, 5, change)


@pytest.mark.parametrize("type_name", ["no_such_environment", "no.such.module:Class", f"{HERE}:Locked"])
async def test_what_cannot_be_attached_here_is_somebody_elses(type_name: str):
    log = Log()
    change = log.add("far", 1e6, type_name=type_name)
    async with following(log) as mix:
        for _ in range(2):
            with pytest.raises(EnvironmentUnavailable, match="'far' cannot be played here"):
                await played(mix, 5, change)
        assert await played(mix, 5)


async def test_what_the_configuration_names_must_be_there():
    with pytest.raises(ConfigError, match="no environment is called"):
        TaskMix.from_config([EnvironmentConfig(type="no_such_environment")], seed=0)
    locked = TaskMix.from_config([EnvironmentConfig(type=f"{HERE}:Locked")], seed=0)
    with pytest.raises(ExceptionGroup) as caught:
        async with locked.open():
            pass
    assert caught.group_contains(OSError, match="no key")
    assert find_async_rl_error(caught.value) is None


async def test_a_change_that_the_buffer_has_lost_is_nobodys():
    async with following(Log()) as mix:
        with pytest.raises(EnvironmentUnavailable, match="lost"):
            await played(mix, 0, "gone")


async def test_a_task_that_is_rolled_again_is_not_played_once_its_environment_is_detached():
    log = Log()
    attached = log.add("house", 1e6, type_name=f"{HERE}:House")
    async with following(log, EnvironmentConfig(type="counting")) as mix:
        async with mix.source(0, attached, is_rolled_again=True) as source:
            assert source.environment.label == "house"
        detached = log.add("house", 0, at=50)
        mix.follow(log.changes)
        with pytest.raises(EnvironmentDetached):
            async with mix.source(0, detached, is_rolled_again=True):
                pass
        async with mix.source(0, detached) as source:
            assert source.environment.label == "house", "a task that was given out before the change is played once"
