"""Decide how many groups may be on their way: as many as the learner needs in order not to wait, and no more. Pure.

While slots bind, every slot beyond that number only makes the groups older: by Little's law the mean age of the trained
groups is slots / groups_per_step - 1. What a step needs can be counted when its training ends, however many slots there are:

    need = groups being rolled out + groups trained and not yet released + groups of the next step

If as many groups were reserved, the next batch would be ready exactly now. Of the groups being rolled out, the second largest
count of the last steps is used, so one outlier does not make a run older.

Where episodes wait long, the learner is held back by stragglers, however many groups are ready. Between two such waits it takes
batch after batch from what is ready, and so many groups are begun that the largest counts are those of bursts. There a lower
count is used: one rank lower for each step that was held back lately, down to the fourth largest of twelve.

Before a planned pause of the workers (an evaluation on their machine) the pace is raised for some steps, so that the learner
has groups meanwhile. What is reserved under a raised pace is not counted: it is what the pace allowed.
docs/decisions/pace.md compares other rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

WINDOW = 12
"""Steps that the pace looks back."""
RANK = 2
"""The largest count of the window is passed over."""
HELD_BACK_RANK = WINDOW // 3
"""Where stragglers hold the learner back. In a window that is not full yet: a third of its counts."""
HELD_BACK_WINDOW = 36
"""Steps of which those that were held back count."""
STEPS_BEFORE_PAUSE = 4
"""Steps in which the pace is raised."""
RAISED_BY = 2.0
"""Steps' worth of groups."""
LOWEST = 2.0
"""Steps' worth of groups: one is trained while the other is rolled out. Below it, learner and workers wait for each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceObservation:
    """The groups on their way when a training ends."""

    reserved: int
    """Groups being rolled out."""
    unreleased: int
    """Groups trained whose slots have not returned."""
    held_back: bool = False
    """The learner waits although enough groups are ready: an unfinished one would become too old meanwhile."""
    pause_ahead: bool = False
    """The workers will pause within STEPS_BEFORE_PAUSE steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceController:
    """`pace` is in steps' worth of groups; `after` returns the controller that has seen one more step."""

    groups_per_step: int
    lowest: float = LOWEST
    reserved: tuple[int, ...] = ()
    """Groups being rolled out at the end of the last steps."""
    held_back: tuple[bool, ...] = ()
    """Whether the learner was, at the end of the last steps."""
    unreleased: int = 0
    """At the end of the last step: while versions are held back it grows with every step, and the pace with it."""

    pause_ahead: bool = False
    """Whether the pace is raised."""

    def after(self, seen: PaceObservation) -> PaceController:
        reserved = self.reserved if self.pause_ahead else (*self.reserved, seen.reserved)[-WINDOW:]
        held_back = (*self.held_back, seen.held_back)[-HELD_BACK_WINDOW:]
        return replace(self, reserved=reserved, held_back=held_back, unreleased=seen.unreleased, pause_ahead=seen.pause_ahead)

    @property
    def pace(self) -> float:
        """Return the pace without its upper bound, which the buffer knows: max_age + 1."""
        needed = max(self.lowest, (self._counted + self.unreleased) / self.groups_per_step + 1)
        return needed + RAISED_BY * self.pause_ahead

    @property
    def _counted(self) -> int:
        """Return the groups being rolled out that a step needs."""
        if not self.reserved:
            return 0
        last = max(RANK, len(self.reserved) * HELD_BACK_RANK // WINDOW)
        rank = min(RANK + sum(self.held_back), last, len(self.reserved))
        return sorted(self.reserved)[-rank]
