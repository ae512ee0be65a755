"""What holds the slots of a run: the mean time that a trained group spends in each state, in steps.

By Little's law it is also the number of slots that hold groups in this state, in steps' worth of groups; their sum is the pace
in use, and the mean age is about that minus 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from async_rl.recording import Recording
from async_rl.recording.recorded import GroupFacts
from async_rl.recording.rows import TRAINED

STATES = ("rolled_out", "ready", "taken", "trained", "pushed")
"""Rolled out; ready in the buffer; taken, and waiting for its step; in its step; until the weights of that step are live."""


def held_slots(folder: Path, *, since_step: int) -> dict[str, float]:
    """Return the time in each state, in steps, from a run's recording."""
    recording = Recording(folder)
    live = {push.fields["version"]: push.at + push.seconds for push in recording.events(kinds=("push",))}
    groups = [recording.group(row.id) for row in recording.groups() if row.fate == TRAINED]
    return states_of([group.facts for group in groups if group is not None], live, since_step)


def states_of(groups: Iterable[GroupFacts], live: Mapping[int, float], since_step: int) -> dict[str, float]:
    """`live`: when each version was. Groups whose weights never went live do not count."""
    took: defaultdict[str, list[float]] = defaultdict(list)
    ended: dict[int, float] = {}
    for facts in groups:
        assert facts.step is not None
        assert facts.version_at_take is not None
        pushed_at = min((moment for version, moment in live.items() if version > facts.version_at_take), default=None)
        if facts.step < since_step or pushed_at is None:
            continue
        ended[facts.step] = facts.trained_at
        borders = (facts.reserved_at, facts.ready_at, facts.taken_at, facts.trained_from, facts.trained_at, pushed_at)
        for state, (start, stop) in zip(STATES, pairwise(borders), strict=True):
            took[state].append(stop - start)
    steps = sorted(ended)
    step_s = (ended[steps[-1]] - ended[steps[0]]) / (steps[-1] - steps[0])
    return {state: fmean(took[state]) / step_s for state in STATES}
