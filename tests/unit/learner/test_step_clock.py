"""What the learner does between two reported steps."""

from __future__ import annotations

from learner.step_clock import StepClock


def test_idle_time_has_a_cause_and_an_activity_within_another_counts_for_itself():
    now = 0.0
    clock = StepClock(lambda: now)
    with clock.during("no_groups"):
        now += 2
        with clock.during("checkpoint"):
            now += 1
            with clock.during("pushing"):
                now += 1
    with clock.during("training"):
        now += 5
    now += 1
    assert clock.row() == {"idle/no_groups": 0.2, "idle/pushing": 0.1, "idle/checkpoint": 0.1, "idle/other": 0.1}


def test_an_activity_may_outlast_a_row():
    now = 0.0
    clock = StepClock(lambda: now)
    with clock.during("checkpoint"):
        now += 1
        assert clock.row()["idle/checkpoint"] == 1
        now += 1
    now += 1
    assert clock.row() == {"idle/no_groups": 0, "idle/pushing": 0, "idle/checkpoint": 0.5, "idle/other": 0.5}
