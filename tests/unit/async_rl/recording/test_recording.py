"""Events and rollouts that a Recorder keeps, as `Recording` reads them: meanwhile, after a crash, and beyond the size limit."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.durable import failpoints
from async_rl.recording import Recording, RolloutFilter
from async_rl.recording.events import EVENT_KINDS, Event, write_event
from async_rl.recording.recorded import HEAD_CHARACTERS, GroupFacts, head_of
from async_rl.recording.recorder import Recorder
from async_rl.types import EpisodeSpan, GroupTimes, Message, Rollout, RolloutGroup, Status
from tests.support.groups import group, sample
from tests.support.repository import ROOT

MB = 10**6


def recorder(folder: Path, *, events: int = MB, rollouts: int = MB) -> Recorder:
    return Recorder(folder, "learner", events_bytes=events, rollouts_bytes=rollouts)


def trained(number: int, *, step: int = 1, at: float = 0.0) -> GroupFacts:
    return GroupFacts(
        fate="trained", step=step, version_at_take=number % 3, version_at_commit=0, reserved_at=at, ready_at=at + 1,
        taken_at=at + 2, trained_from=at + 3, trained_at=at + 4,
    )  # fmt: skip


def talkative(name: str, text: str) -> RolloutGroup:
    said = (Message(role="user", content="Say it."), Message(role="assistant", content=text))
    rollouts = (
        Rollout(samples=(sample(),), reward=0.5, status=Status.OK, conversation=said, reward_parts={"format": 0.5}),
        Rollout(samples=(sample((0, 1, 1)),), reward=0.0, status=Status.TRUNCATED),
    )
    return replace(group(name), rollouts=rollouts)


def test_events_are_read_by_time_and_kind(tmp_path: Path):
    with recorder(tmp_path) as kept:
        kept.event("checkpoint", at=100.0, seconds=2.0, step=1)
        kept.event("push", at=110.0, seconds=0.5, version=1, staged=["w"])
    recording = Recording(tmp_path)
    assert [event.kind for event in recording.events()] == ["checkpoint", "push"]
    assert [event.kind for event in recording.events(since=101.0)] == ["checkpoint", "push"], "it ended later"
    assert [event.kind for event in recording.events(since=103.0, until=109.0)] == []
    [push] = recording.events(kinds=("push",))
    assert (push.at, push.seconds, push.process, push.fields) == (110.0, 0.5, "learner", {"version": 1, "staged": ["w"]})
    assert recording.events_let_go().is_everything_kept


@pytest.mark.parametrize("event", [Event(kind="pusch", at=0.0, fields={}), Event(kind="push", at=0.0, fields={"speed": 1})])
def test_an_event_that_the_table_lacks_is_refused(event: Event):
    with pytest.raises(ValueError, match=r"is not in async_rl/recording/events\.py"):
        write_event(event)


def test_rollouts_are_filtered_ordered_and_opened_one_by_one(tmp_path: Path):
    with recorder(tmp_path) as kept:
        kept.group(trained(1), talkative("t000000001", "It is <b>IT</b>."))
        kept.group(trained(2, step=2), group("t000000002", (0, 1)))
        head, counts = head_of(talkative("t000000003", "never " * 1000))
        kept.group(GroupFacts(fate="no_signal", is_head=True, counts=counts), head)
    recording = Recording(tmp_path)
    assert [row.id for row in recording.rollouts().rows] == [f"t00000000{g}/{s}" for g in (3, 2, 1) for s in (0, 1)]
    page = recording.rollouts(order="best", offset=1, limit=2)
    assert (page.total, [row.reward for row in page.rows]) == (6, [1.0, 0.5])

    def listed(**wanted: object) -> list[str]:
        return [row.id[-3:] for row in recording.rollouts(RolloutFilter(**wanted), order="oldest").rows]  # pyright: ignore[reportArgumentType]

    assert listed(fate="dropped") == listed(fate="no_signal") == ["3/0", "3/1"]
    assert listed(status="truncated") == ["1/1", "3/1"]
    assert listed(min_reward=0.1, max_reward=0.9) == ["1/0", "3/0"]
    assert listed(min_step=2) == listed(group="t000000002") == listed(min_age=2) == ["2/0", "2/1"]
    assert sorted(listed(text="<B>it")) == ["1/0"]
    assert listed(environment="none") == []

    first = recording.rollout("t000000001/0")
    assert first is not None
    assert first.content.conversation[1].content == "It is <b>IT</b>."
    assert first.content.samples[0].logprobs.tolist() == [0, 0, -0.5, -0.5]
    assert first.content.reward_parts == {"format": 0.5}
    assert [span.version for span in first.group.rollouts[1].content.samples[0].versions] == [0, 1]
    dropped = recording.rollout("t000000003/1")
    assert dropped is not None
    assert (dropped.num_sampled, dropped.num_tokens, dropped.content.samples) == (3, 5, ())
    assert len(dropped.group.content.rollouts[0].conversation[1].content) <= HEAD_CHARACTERS
    assert recording.rollout("t000000009/0") is recording.rollout("t000000001/7") is recording.rollout("nonsense") is None


def test_a_live_run_is_followed_and_a_torn_end_is_skipped(tmp_path: Path):
    recording = Recording(tmp_path)
    assert recording.rollouts().total == 0
    assert recording.fates() is None
    with recorder(tmp_path) as kept:
        kept.group(trained(1), group("t000000001"))
    assert recording.rollouts().total == 2
    with (tmp_path / "rollouts" / "learner-000001.jsonl").open("ab") as torn:
        torn.write(b'{"id":"t0000')
    with recorder(tmp_path) as kept:  # after the crash
        kept.group(trained(2, step=2), group("t000000001", (1, 1)))
        kept.group(trained(2, step=2), group("t000000002"))
    assert [row.id for row in recording.groups()] == ["t000000001", "t000000002"], "the newest record of a group counts"
    assert recording.groups()[0].step == 2
    damaged = tmp_path / "rollouts" / "learner-000002.bin"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    assert recording.group("t000000002") is None
    assert recording.group("t000000001") is not None


def test_the_oldest_files_go_and_are_counted(tmp_path: Path):
    with recorder(tmp_path, events=4000, rollouts=8000) as kept:
        for step in range(1, 81):
            kept.event("checkpoint", at=float(step), step=step)
            kept.group(trained(0, step=step), group(f"t{step:09d}"))
    recording = Recording(tmp_path)
    for folder, limit in (("events", 4000), ("rollouts", 8000)):
        size = sum(file.stat().st_size for file in (tmp_path / folder).iterdir() if "let-go" not in file.name)
        assert limit / 2 < size <= limit, folder
    steps = [event.fields["step"] for event in recording.events()]
    assert steps == list(range(steps[0], 81))
    assert recording.events_let_go().deleted == {"events": steps[0] - 1}
    page = recording.rollouts(order="oldest")
    assert page.rows[0].group.step == page.let_go.deleted["groups"] + 1 > 1
    assert page.let_go.deleted["rollouts"] == 2 * page.let_go.deleted["groups"]
    before = len(recording.groups())
    with recorder(tmp_path, events=4000, rollouts=8000) as kept:
        for step in range(81, 121):
            kept.group(trained(0, step=step), group(f"t{step:09d}"))
    assert abs(len(recording.groups()) - before) < before / 3, "a reader forgets what was deleted meanwhile"
    assert recording.groups()[-1].step == 120


def test_off_is_off_and_a_refusing_disk_is_counted(tmp_path: Path):
    with recorder(tmp_path / "off", events=0, rollouts=0) as kept:
        kept.event("checkpoint", step=1)
        kept.group(trained(1), group("t000000001"))
    assert not (tmp_path / "off").exists()
    (tmp_path / "events").write_text("a file where the folder should be")
    with recorder(tmp_path) as kept:
        kept.event("checkpoint", step=1)
        kept.group(trained(1), group("t000000001"))
    assert kept.dropped == 1
    assert Recording(tmp_path).rollouts().total == 2


def test_a_disk_that_fills_up_leaves_gaps_and_whole_rows(tmp_path: Path):
    try:
        failpoints.arm("whole_file.writing:2=ENOSPC,append.learner-000001.jsonl:3-4=ENOSPC")
        with recorder(tmp_path, events=0) as kept:
            for number in range(1, 6):
                kept.group(trained(number), group(f"t{number:09d}"))
    finally:
        failpoints.arm("")
    recording = Recording(tmp_path)
    kept_ids = [row.id for row in recording.groups()]
    assert len(kept_ids) + kept.dropped == 5
    assert kept.dropped == recording.rollouts().let_go.lost["refused"] == 3
    assert all(recording.group(one) is not None for one in kept_ids), "offsets are right after a refused write"


def test_a_group_that_cannot_be_indexed_leaves_no_trace(tmp_path: Path):
    odd = replace(group("t000000001"), rollouts=(replace(group("t000000001").rollouts[0], metrics={"turns": math.inf}),))
    with recorder(tmp_path, events=0) as kept:
        kept.group(trained(1), odd)
        kept.group(trained(2), group("t000000002"))
    assert kept.dropped == 1
    assert Recording(tmp_path).group("t000000002") is not None


def test_the_life_of_a_group_runs_from_its_ticket_to_its_checkpoint(tmp_path: Path):
    spans = (EpisodeSpan("inference", 0, 0.1, 0.4, 0, 1), EpisodeSpan("reward", 0, 0.4, 0.5), EpisodeSpan("task", -1, 0.0, 0.1))
    whole = replace(group("t000000001"), times=GroupTimes(reserved_at=999.0, seconds=1.0, spans=spans))
    with recorder(tmp_path) as kept:
        kept.group(trained(1, step=2, at=10.0), whole)
        for step, at in ((1, 5.0), (4, 20.0), (6, 30.0)):
            kept.event("checkpoint", at=at, seconds=1.0, step=step)
    recording = Recording(tmp_path)
    found = recording.group("t000000001")
    assert found is not None
    life = recording.life(found)
    assert life.checkpoint_step == 4
    assert [(span.what, span.start, span.stop) for span in life.spans] == [
        ("rolled out", 10.0, 11.0), ("task", 10.0, 10.1), ("inference", 10.1, 10.4), ("reward", 10.4, 10.5),
        ("in queue", 11.0, 12.0), ("taken", 12.0, 13.0), ("trained", 13.0, 14.0), ("until checkpoint", 14.0, 21.0),
    ]  # fmt: skip
    assert [span.what for span in life.of(1)] == ["rolled out", "task", "in queue", "taken", "trained", "until checkpoint"]


def test_the_page_lists_every_kind_of_event_with_its_fields():
    page = (ROOT / "docs" / "recording.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| .+ \| (`.+`) \|$", page, re.M))
    assert {kind: set(re.findall(r"`(\w+)`", fields)) for kind, fields in listed.items()} == {
        name: set(kind.fields) for name, kind in EVENT_KINDS.items()
    }
