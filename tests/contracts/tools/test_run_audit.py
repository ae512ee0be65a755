"""`async-rl audit`: every loss and duplicate is found, and an intact run is clean."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from async_rl.checkpoints.manifest import MANIFEST, candidates
from async_rl.checkpoints.trained_steps import read_trained
from async_rl.config import Config
from async_rl.config.loading import load
from buffer.redis_buffer import RedisBuffer
from buffer.run_audit.__main__ import main
from tests.contracts.tools.recorded_run import Life, begin, serving, write_config
from tests.support.waiting import PATIENCE_S

Story = Callable[[Config, RedisBuffer], Awaitable[object]]


class Audited:
    """Exit code and output of the verb."""

    def __init__(self, path: Path, *words: str) -> None:
        output = StringIO()
        with redirect_stdout(output):
            self.code = main(["@", str(path), "--json", *words])
        self.said = json.loads(output.getvalue())
        self.findings, self.unchecked = "\n".join(self.said["findings"]), "\n".join(self.said["unchecked"])


def played(path: Path, story: Story) -> Config:
    config = load(["@", str(path)])

    async def play() -> None:
        config.run_folder.mkdir(exist_ok=True)
        async with serving(config) as buffer:
            await story(config, buffer)

    asyncio.run(play())
    return config


async def a_sound_life(config: Config, buffer: RedisBuffer) -> Life:
    """Two checkpoints, groups in flight, a task without signal, one that failed too often, one that is rolled again."""
    life = await begin(config, buffer)
    await life.work(2)
    await life.save()
    await life.roll_out(1, keep=False)
    for _ in range(2):
        [ticket] = await buffer.reserve("w", version=life.version, count=1, wait_s=0)
        await buffer.abandon("w", ticket.id, "failed")
    await life.work(2)
    await life.save()
    await life.work(1)
    [ticket] = await buffer.reserve("w", version=life.version, count=1, wait_s=0)
    await buffer.abandon("w", ticket.id, "abandoned")
    await life.roll_out(2)
    await buffer.resign(life.fence)
    return life


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def test_a_sound_run_is_clean(path: Path):
    played(path, a_sound_life)
    done = Audited(path)
    assert (done.code, done.said["clean"]) == (0, True), (done.findings, done.unchecked)
    tasks = done.said["tasks"]
    assert (tasks["untrained"], tasks["lost"]) == (2, 0)
    assert tasks["begun"] == tasks["trained"] + tasks["in_flight"] + tasks["waiting"] + 2
    assert done.said["steps"] == 4


def test_the_table_of_a_sound_run(path: Path):
    played(path, a_sound_life)
    command = [Path(sys.executable).with_name("async-rl"), "audit", "@", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 surviving steps of 8 groups" in done.stdout
    assert done.stdout.splitlines()[-1] == "clean: every task is trained once, in flight, or dropped with a reason"


def test_a_run_that_goes_on_is_judged_as_well(path: Path):
    config = load(["@", str(path)])

    async def go_on() -> Audited:
        config.run_folder.mkdir()
        async with serving(config) as buffer:
            life = await a_sound_life(config, buffer)
            assert life.step == 5
            return await asyncio.to_thread(Audited, path)

    done = asyncio.run(go_on())
    assert done.code == 0, (done.findings, done.unchecked)


def test_a_crash_rolls_steps_back_and_loses_nothing(path: Path):
    async def crash(config: Config, buffer: RedisBuffer) -> None:
        first = await begin(config, buffer, max_age=8)
        await first.work(1)
        await first.save()
        await first.work(2)
        await buffer.resign(first.fence)
        second = await begin(config, buffer, number=1, step=1, position=await _position(config), max_age=8)
        for _ in range(2):
            await second.train()
        await second.work(1)
        await second.save()

    played(path, crash)
    done = Audited(path)
    assert done.code == 0, (done.findings, done.unchecked)
    assert done.said["rolled_back_steps"] == 2


async def _position(config: Config) -> Any:
    from pydantic import TypeAdapter

    from async_rl.checkpoints.manifest import read_manifest
    from async_rl.types import BufferPosition

    newest = candidates(config.run_folder / "checkpoints")[0]
    return TypeAdapter(BufferPosition).validate_python(read_manifest(newest).extra["position"])


async def two_checkpoints(config: Config, buffer: RedisBuffer) -> Life:
    life = await begin(config, buffer)
    await life.work(2)
    await life.save()
    await life.work(2)
    await life.save()
    await buffer.resign(life.fence)
    return life


@pytest.mark.parametrize("how", ["damaged", "moved away"])
@pytest.mark.parametrize("rolls_again", [False, True])
def test_groups_that_only_a_damaged_newest_checkpoint_contained(path: Path, how: str, rolls_again: bool):
    config = played(path, two_checkpoints)
    newest = candidates(config.run_folder / "checkpoints")[0]
    if how == "damaged":
        (newest / "rank-00000.safetensors").write_bytes(b"torn")
    else:
        shutil.move(newest, config.run_folder / "away")
    done = Audited(path)
    assert done.code == 1
    assert "Redis counts step 4 as kept by a checkpoint, but the newest whole one is step-00000002" in done.findings

    async def resume(config: Config, buffer: RedisBuffer) -> None:
        shutil.rmtree(newest, ignore_errors=True)
        journal = read_trained(config.run_folder)
        assert journal is not None
        undone = journal.undone(2) if rolls_again else []
        life = await begin(config, buffer, number=1, step=2, position=await _position(config), undone=undone)
        await life.work(1)
        await life.save()

    played(path, resume)
    done = Audited(path)
    if rolls_again:  # what a learner does
        assert (done.code, done.said["tasks"]["waiting"]) == (0, 2), (done.findings, done.unchecked)
    else:
        assert done.code == 1, "four groups are trained in no surviving step, and their tasks are not rolled again"
        assert "4 of 10 tasks are lost" in done.findings
        assert "step 3 of timeline life-0 trained" in done.findings


def test_steps_whose_checkpoints_were_removed_as_the_older_ones(path: Path):
    """A learner with a smaller fence than its predecessor: its checkpoints look older, and are removed at once."""

    async def later_life_with_smaller_fence(config: Config, buffer: RedisBuffer) -> None:
        await two_checkpoints(config, buffer)
        second = await begin(config, buffer, number=1, step=4, position=await _position(config))
        await second.work(3)
        shutil.rmtree(await second.save())
        for each in candidates(config.run_folder / "checkpoints"):
            each.rename(each.with_name(each.name.partition("-by-")[0] + f"-by-{second.fence + 1}"))

    played(path, later_life_with_smaller_fence)
    done = Audited(path)
    assert done.code == 1
    assert "Redis counts step 7 as kept by a checkpoint" in done.findings
    assert "3 steps are lost" in done.findings
    assert "a checkpoint is of fence" in done.findings


def test_an_emptied_server_is_not_compared_until_a_learner_has_begun(path: Path):
    config = played(path, two_checkpoints)
    shutil.rmtree(config.redis_folder / "appendonlydir")
    done = Audited(path)
    assert (done.code, done.said["findings"]) == (6, [])
    assert "holds nothing of this run" in done.unchecked

    async def resume(config: Config, buffer: RedisBuffer) -> None:
        life = await begin(config, buffer, number=1, step=4, position=await _position(config))
        await life.work(2)
        await life.save()

    played(path, resume)
    done = Audited(path)
    assert done.code == 0, (done.findings, done.unchecked)


def test_without_redis_it_says_what_it_did_not_look_at(path: Path):
    played(path, a_sound_life)
    done = Audited(path, "--files-only")
    assert done.code == 0
    assert done.said["clean"] is False
    assert "left out" in done.unchecked


def test_a_run_that_is_not_there(tmp_path: Path):
    path = write_config(tmp_path)
    command = [sys.executable, "-P", "-m", "buffer.run_audit", "@", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("async-rl audit: there is no run in")


# -- forged files: each change is one that a bug could make -----------------------------------------------------------------
Rows = list[dict[str, Any]]


def _twice_in_two_steps(rows: Rows) -> None:
    rows[2]["groups"][0] = rows[1]["groups"][0]


def _twice_in_one_step(rows: Rows) -> None:
    rows[2]["groups"][1] = rows[2]["groups"][0]


def _without_a_step(rows: Rows) -> None:
    del rows[2]


def _with_a_version_that_goes_back(rows: Rows) -> None:
    rows[3]["version"] = 0


def _with_an_old_token(rows: Rows) -> None:
    rows[4]["groups"][0]["oldest_version"] = -9


def _of_another_timeline(rows: Rows) -> None:
    for row in rows:
        row["timeline"] = "another"


def _that_is_torn(rows: Rows) -> None:
    rows[2].pop("groups")


def _without_a_group(rows: Rows) -> None:
    rows[3]["groups"].pop()


def _with_a_group_that_is_ready(rows: Rows) -> None:
    rows[3]["groups"][0] |= {"id": "t000000015", "task_index": None}


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        (_twice_in_two_steps, "was trained by the steps 1, 2, and may train 1"),
        (_twice_in_one_step, "was trained twice by one step"),
        (_without_a_step, "surviving steps are missing"),
        (_with_a_version_that_goes_back, "made version 0 of"),
        (_with_an_old_token, "whose oldest token is of version -9"),
        (_of_another_timeline, "that the journal does not know"),
        (_that_is_torn, "row 3 of trained.jsonl cannot be read"),
        (_without_a_group, "1 of 14 tasks are lost"),
        (_with_a_group_that_is_ready, "1 groups of surviving steps are ready in Redis: t000000015"),
    ],
)
def test_a_forged_journal_is_found(sound_run: Path, tmp_path: Path, forge: Callable[[Rows], None], said: str):
    path = _copied(sound_run, tmp_path)
    journal = load(["@", str(path)]).run_folder / "trained.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    forge(rows)
    journal.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = Audited(path)
    assert done.code == 1
    assert said in done.findings


def test_a_task_that_vanished_between_two_checkpoints(sound_run: Path, tmp_path: Path):
    path = _copied(sound_run, tmp_path)
    older = candidates(load(["@", str(path)]).run_folder / "checkpoints")[1]
    manifest = json.loads((older / MANIFEST).read_text())
    manifest["extra"]["position"]["next_task"] -= 3
    (older / MANIFEST).write_text(json.dumps(manifest))
    done = Audited(path, "--files-only")
    assert done.code == 1
    assert "tasks ended: 4 were trained, and 2 at most were dropped" in done.findings


def test_bytes_that_changed_are_found_when_all_are_read(sound_run: Path, tmp_path: Path):
    path = _copied(sound_run, tmp_path)
    newest = candidates(load(["@", str(path)]).run_folder / "checkpoints")[0]
    (newest / "rank-00000.safetensors").write_bytes(b"WEIGHTS")
    assert Audited(path, "--files-only").code == 0
    done = Audited(path, "--files-only", "--bytes")
    assert done.code == 1
    assert "does not match manifest.json" in done.findings


def test_an_older_checkpoint_that_is_damaged_costs_nothing(sound_run: Path, tmp_path: Path):
    path = _copied(sound_run, tmp_path)
    older = candidates(load(["@", str(path)]).run_folder / "checkpoints")[1]
    (older / "rank-00000.safetensors").unlink()
    done = Audited(path)
    assert (done.code, done.said["findings"]) == (0, [])
    assert "is missing" in done.said["checkpoints"][1]["problem"]


@pytest.fixture(scope="module")
def sound_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_config(tmp_path_factory.mktemp("sound"))
    played(path, a_sound_life)
    return path


def _copied(path: Path, to: Path) -> Path:
    shutil.copytree(path.parent / "recorded", to / "recorded")
    return write_config(to)


# -- the archive --------------------------------------------------------------------------------------------------
def test_the_archive_is_compared(tmp_path: Path):
    path = write_config(tmp_path, retention={"archive": True})

    async def archive(config: Config, buffer: RedisBuffer) -> None:
        life = await begin(config, buffer, keep_steps=4)
        await life.work(2)
        await life.save()
        await life.archive()
        await life.work(2)
        await life.save()

    config = played(path, archive)
    done = Audited(path)
    assert (done.code, done.said["archived"]) == (0, 4), (done.findings, done.unchecked)
    journal = config.run_folder / "trained.jsonl"
    journal.write_text(journal.read_text().replace('"t000000001"', '"t000000099"'))
    done = Audited(path)
    assert "1 archived groups were trained by no step: t000000001" in done.findings
