"""Four runs that are slow for different reasons, and one that is not, are told apart by what they recorded."""

from dataclasses import replace
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.recording import Recording
from async_rl.recording.recorded import GroupFacts
from async_rl.recording.recorder import Recorder
from async_rl.types import EpisodeSpan, GroupTimes
from async_rl.view.recorded.slowdown import Slowdowns
from tests.support.recorded_run import group

CONFIG = Config.model_validate(
    {
        "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}},
        "tokenizer": {"type": "characters", "alphabet": "0123456789="},
        "environments": [{"type": "counting"}],
        "worker": {"groups_in_flight": 2},
    }
)
BEGAN = 1767225600.0


def record(
    folder: Path, *, idle: dict[str, float], push_s: float = 0.1, reward_s: float = 0.1, inflight: float = 8.0, blocks: int = 0
) -> list[str]:
    """Record ten steps, one every four seconds, and return what is said of them."""
    with Recorder(folder, "learner", events_bytes=2**20, rollouts_bytes=2**20) as recorder:
        for step in range(1, 11):
            at = BEGAN + 4 * step
            waited, shares = 4 * sum(idle.values()), {f"idle/{cause}": share for cause, share in idle.items()}
            recorder.event("step", at=at - 4 + waited, seconds=4 - waited, step=step, wait_s=waited, idle=shares)
            recorder.event("push", at=at, seconds=push_s, version=step, staged=["w"])
            recorder.event("engine", at=at, seconds=1.0, worker="w", inflight=inflight)
            spans = tuple(
                EpisodeSpan(stage, sibling, 0.0, stop)
                for sibling in range(4)
                for stage, stop in (("inference", 1.0), ("reward", reward_s))
            )
            made = replace(group(step), times=GroupTimes(reserved_at=at, seconds=2.0, spans=spans))
            recorder.group(GroupFacts(fate="trained", step=step, version_at_take=step + 1), made)
        for block in range(blocks):
            recorder.event(
                "blocked", at=BEGAN + 5 * block + 8, seconds=5.0, worker="w", environment="sums", place="sums.py:7 in reward"
            )
    causes = Slowdowns(Recording(folder), CONFIG)
    causes.refresh()
    return [found.sentence for found in causes.causes]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"idle": {"no_groups": 0.05}}, "The learner trains 95% of its time: nothing holds it up."),
        (
            {"idle": {"no_groups": 0.8}, "inflight": 2.0},
            "The learner waits for rollouts 80% of its time. Episodes of sums spend 91% of their time generating: the workers' "
            "engines are the limit. A worker plays 2.0 groups at a time; worker.groups_in_flight allows 2. What helps: raise "
            "worker.groups_in_flight, as engines are faster with more at a time, or add workers.",
        ),
        (
            {"idle": {"no_groups": 0.8}, "reward_s": 3.0},
            "The learner waits for rollouts 80% of its time. Episodes of sums spend 75% of their time in grading: the reward "
            "is slow. A worker plays 8.0 groups at a time; worker.groups_in_flight allows 2. What helps: make it faster, or "
            "raise worker.groups_in_flight, so that a worker plays others meanwhile.",
        ),
        (
            {"idle": {"pushing": 0.5, "no_groups": 0.3}, "push_s": 3.2},
            "Weights are slow to arrive: a push takes 3.2 s until all workers have it, and an engine 0.0 s to load them; a "
            "step is trained in 0.8 s. The learner waits 80% of its time for weights to become live, and for groups that wait "
            "for them. Push less often: raise wire.push_every_steps (now 1) and, so that this is allowed, staleness.max_age "
            "(now 2); or make pushes smaller (wire.dtype, wire.deltas).",
        ),
    ],
)
def test_the_cause_is_named(tmp_path: Path, run: dict[str, float], said: str):
    assert record(tmp_path, **run) == [said]  # pyright: ignore[reportArgumentType]


def test_blocked_code_comes_first(tmp_path: Path):
    blocked, waiting = record(tmp_path / "some", idle={"no_groups": 0.8}, blocks=3)
    assert blocked.startswith(
        "The environment sums blocks its worker at sums.py:7 in reward, for at least 15 s of the last 40 s."
    )
    assert waiting.startswith("The learner waits for rollouts 80% of its time.")


def test_where_blocked_code_explains_most_of_the_wait_there_is_no_other_cause(tmp_path: Path):
    (blocked,) = record(tmp_path, idle={"no_groups": 0.8}, blocks=4)
    assert "20 s of the last 40 s" in blocked


def test_the_chart_of_idle_time_does_not_contradict_the_sentence(tmp_path: Path):
    """Where workers wait for weights, or are blocked, the learner's own clock only knows that no groups are ready."""
    record(tmp_path / "push", idle={"no_groups": 0.8}, push_s=3.2)
    record(tmp_path / "block", idle={"no_groups": 0.8}, blocks=4)
    record(tmp_path / "slow", idle={"no_groups": 0.8})
    remarks = [remark_of(tmp_path / name) for name in ("push", "block", "slow")]
    assert "wait for weights" in remarks[0]
    assert "was blocked" in remarks[1]
    assert remarks[2] == ""


def remark_of(folder: Path) -> str:
    causes = Slowdowns(Recording(folder), CONFIG)
    causes.refresh()
    return causes.causes[0].remark


def test_a_run_without_steps_says_nothing(tmp_path: Path):
    causes = Slowdowns(Recording(tmp_path), None)
    causes.refresh()
    assert causes.causes == []
