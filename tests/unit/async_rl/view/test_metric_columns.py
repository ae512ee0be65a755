"""Rows of metrics.jsonl become columns, whatever was superseded, rotated or cut, and few points stand for many steps."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

import pytest

from async_rl.telemetry.rows import JsonlSink, read_rows
from async_rl.view.followed_file import FollowedFile
from async_rl.view.metric_columns import MetricColumns


def columns(*rows: dict[str, float | None]) -> MetricColumns:
    made = MetricColumns()
    for row in rows:
        made.add(row)
    return made


def test_rows_of_a_step_are_merged_and_a_resume_supersedes_those_after_it():
    made = columns({"step": 1, "a": 1}, {"step": 2, "a": 2}, {"step": 2, "b": 5}, {"step": 3, "a": 3})
    assert made.series(["a", "b"], points=10).values == {"a": [1, 2, 3], "b": [None, 5, None]}
    sent = made.num_rows
    made.add({"resumed_after": 1})
    made.add({"step": 2, "a": 7, "b": None})
    assert made.first_changed(sent) == 2  # a client that has all of it replaces the steps from 2 on
    assert made.first_changed(made.num_rows) is None
    assert made.series(["a", "b"], points=10).values == {"a": [1, 7], "b": [None, None]}
    assert made.latest() == {"a": 7}


def test_columns_hold_what_the_readers_of_the_file_see(tmp_path: Path):
    """Over rotations, of which it reads the rest of the old file, and lives of the learner."""
    path, draw = tmp_path / "metrics.jsonl", random.Random(3)
    made, step = MetricColumns(), 0
    with closing(FollowedFile(path)) as followed:
        for _ in range(6):
            sink = JsonlSink(path, resumed_after=step, max_bytes=8_000)
            for _ in range(60):
                step += 1
                sink.log(step, {"a": draw.random(), **({"b": draw.random()} if draw.random() < 0.3 else {})})
                if draw.random() < 0.1:
                    for line in followed.new_rows():
                        made.add(json.loads(line))
            sink.close()
            step -= draw.randrange(20)
        for line in followed.new_rows():
            made.add(json.loads(line))
    kept = {row.step: row.values for row in read_rows(path)}
    assert len(kept) < len(made.steps), "the file was rotated twice, and the page still has what it has read"
    for name in ("a", "b"):
        mine = dict(zip(made.steps, made.column(name).tolist(), strict=True))
        assert all(mine[at] == pytest.approx(values[name]) for at, values in kept.items() if name in values)


def test_a_row_that_is_being_written_is_read_once_it_is_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with closing(FollowedFile(path)) as followed:
        assert list(followed.new_rows()) == []
        with path.open("wb") as file:
            file.write(b'{"step": 1}\n{"st')
            file.flush()
            assert list(followed.new_rows()) == [b'{"step": 1}']
            file.write(b'ep": 2}\n')
            file.flush()
            assert list(followed.new_rows()) == [b'{"step": 2}']


def test_few_points_keep_the_extremes_of_many_steps():
    spike, steps = 4321, 10_000
    made = columns(*({"step": step, "a": 100.0 if step == spike else step % 7} for step in range(1, steps + 1)))
    found = made.series(["a"], points=600)
    assert len(found.steps) == len(found.values["a"]) == 600
    assert (found.steps[0], found.steps[-1]) == (1, steps)
    assert max(filter(None, found.values["a"])) == 100
    assert min(value for value in found.values["a"] if value is not None) == 0
    assert made.series(["a"], points=600, from_step=steps).values == {"a": [steps % 7]}


def test_the_means_of_a_family_add_up():
    rows = ({"step": step, "age_0": 3.0, "age_1": 5.0} if step % 2 else {"step": step, "age_0": 8.0} for step in range(1, 2001))
    found = columns(*rows).series(["mean:age_*"], points=100).values
    sums = [first + second for first, second in zip(found["age_0"], found["age_1"], strict=True) if first and second]
    assert len(sums) == 100
    assert sums == pytest.approx([8.0] * 100)
