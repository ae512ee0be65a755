"""Reads what a run recorded, also while it is being written and after a crash. Reading takes no lock and changes nothing.

recording = Recording(config.run_folder)
recording.events(since=time.time() - 60, kinds=("push", "step"))
page = recording.rollouts(RolloutFilter(environment="gsm8k", max_reward=0.0), offset=0, limit=50)
rollout = recording.rollout(page.rows[0].id)
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from async_rl.recording.events import Event, read_events
from async_rl.recording.ledger import Fates, fates_of
from async_rl.recording.lives import Life, life_of
from async_rl.recording.recorded import RecordedGroup, RecordedRollout, read_record
from async_rl.recording.rows import GroupRow, RolloutFilter, RolloutRow, read_row
from async_rl.recording.segments import LetGo, data_path, read_let_go, segments_in
from async_rl.recording.selection import Order, Selection

EVENTS, ROLLOUTS = "events", "rollouts"
"""Folders within the run's folder."""
SEARCHED_BYTES = 64 * 2**20
"""Bytes of groups read at most by one search for a text."""
SEARCHED_GROUPS = 4000
"""Groups read at most by one search for a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPage:
    """Some of the rollouts that a filter accepts."""

    rows: tuple[RolloutRow, ...]
    total: int
    """How many the filter accepts; with `text`, how many were found in what was searched."""
    is_complete: bool
    """False: the search for a text ended at its limit; what comes after in this order was not searched."""
    searched: int
    """Groups that the search for a text read; 0 without one."""
    let_go: LetGo
    """What this run rolled out and the recording no longer has."""


class Recording:
    """What a run recorded. Keep one open per run: it remembers the index and reads only what was added since the last call.

    Not thread-safe. A run that recorded nothing, or has not begun, is empty, no error.
    """

    def __init__(self, folder: Path) -> None:
        """`folder`: the run's folder."""
        self._events, self._rollouts = folder / EVENTS, folder / ROLLOUTS
        self._indexes: dict[Path, _Index] = {}
        self._groups: dict[str, tuple[Path, GroupRow]] = {}
        """The newest record of each group, in the order of recording."""

    # -- events ---------------------------------------------------------------------------------------------------
    def events(
        self, *, since: float = 0.0, until: float = float("inf"), kinds: Collection[str] | None = None
    ) -> Iterator[Event]:
        """Yield the events of these kinds (None: all) that ended after `since` and began before `until`.

        Times are seconds since 1970 on the learner's clock. The order is that of writing, by and large that of the ends.
        Files that were complete before `since` are not read.
        """
        for path in segments_in(self._events):
            try:
                if path.stat().st_mtime < since - _LATE_S:
                    continue
                for event in read_events(path, kinds):
                    if event.at + event.seconds >= since and event.at <= until:
                        yield event
            except FileNotFoundError:  # the writer has deleted it meanwhile
                continue

    def events_let_go(self) -> LetGo:
        """Return what the events lack."""
        return read_let_go(self._events)

    def fates(self) -> Fates | None:
        """Return where every ticket and token is, as of the last step; None before the first."""
        newest = max(self.events(kinds=("fates",)), key=lambda event: event.at, default=None)
        return fates_of(newest) if newest is not None else None

    def fates_by_step(self) -> list[Fates]:
        """Return where the tickets were after each step that is still recorded, oldest first."""
        return [fates_of(event) for event in self.events(kinds=("fates",))]

    # -- rollouts -------------------------------------------------------------------------------------------------
    def groups(self) -> list[GroupRow]:
        """Return the index: a row per group, oldest first."""
        self._refresh()
        return [row for _, row in self._groups.values()]

    def rollouts(
        self, wanted: RolloutFilter | None = None, *, offset: int = 0, limit: int = 50, order: Order = "newest"
    ) -> RolloutPage:
        """Return `limit` of the rollouts that the filter accepts (None: all), beginning with number `offset`.

        Reads the index alone; with `text` also groups, in this order and within limits.
        """
        wanted = wanted if wanted is not None else RolloutFilter()
        selection, let_go = Selection(self.groups(), wanted, order), read_let_go(self._rollouts)
        if not wanted.text:
            rows = tuple(selection.rows(offset, offset + limit))
            return RolloutPage(rows=rows, total=len(selection), is_complete=True, searched=0, let_go=let_go)
        listed, searched, is_complete = self._with_text(selection.rows(), wanted.text)
        rows = tuple(listed[offset : offset + limit])
        return RolloutPage(rows=rows, total=len(listed), is_complete=is_complete, searched=searched, let_go=let_go)

    def group(self, group_id: str) -> RecordedGroup | None:
        """Return a group with its siblings; None if it is not recorded (any more)."""
        self._refresh()
        return self._read(group_id)

    def rollout(self, rollout_id: str) -> RecordedRollout | None:
        """Return a rollout by its id, GROUP/SIBLING; None if it is not recorded (any more)."""
        group_id, _, sibling = rollout_id.rpartition("/")
        group = self.group(group_id) if sibling.isdecimal() else None
        if group is None or int(sibling) >= len(group.content.rollouts):
            return None
        return RecordedRollout(group, int(sibling))

    def life(self, group: RecordedGroup) -> Life:
        """Return the timeline of a group, from its ticket to its checkpoint. Reads the events of checkpoints."""
        step = group.facts.step
        saved = [
            (int(event.fields["step"]), event.at + event.seconds)
            for event in (self.events(since=group.facts.trained_at, kinds=("checkpoint",)) if step is not None else ())
        ]
        return life_of(group, min((each for each in saved if step is not None and each[0] >= step), default=None))

    def _with_text(self, found: Iterable[RolloutRow], text: str) -> tuple[list[RolloutRow], int, bool]:
        wanted, searched, read_bytes, listed = text.casefold(), 0, 0, list[RolloutRow]()
        group: RecordedGroup | None = None
        for row in found:
            if group is None or group.id != row.group.id:
                if read_bytes >= SEARCHED_BYTES or searched >= SEARCHED_GROUPS:
                    return listed, searched, False
                group, searched, read_bytes = self._read(row.group.id), searched + 1, read_bytes + row.group.length
            if group is None or row.sibling >= len(group.content.rollouts):
                group = None
            elif any(wanted in said.casefold() for said in RecordedRollout(group, row.sibling).texts):
                listed.append(row)
        return listed, searched, True

    def _read(self, group_id: str) -> RecordedGroup | None:
        if (known := self._groups.get(group_id)) is None:
            return None
        path, row = known
        try:
            with data_path(path).open("rb") as file:
                file.seek(row.offset)
                record = file.read(row.length)
        except FileNotFoundError:  # the writer has deleted it meanwhile
            return None
        return read_record(record) if zlib.crc32(record) == row.checksum else None

    def _refresh(self) -> None:
        paths = segments_in(self._rollouts)
        for gone in self._indexes.keys() - set(paths):
            del self._indexes[gone]
            self._groups = {group: (path, row) for group, (path, row) in self._groups.items() if path != gone}
        for path in paths:
            for row in self._indexes.setdefault(path, _Index(path)).new_rows():
                self._groups.pop(row.id, None)  # trained again after a resume: the newest record counts
                self._groups[row.id] = (path, row)


@dataclass(slots=True)
class _Index:
    """The index of one file, of which `position` bytes are read."""

    path: Path
    position: int = 0

    def new_rows(self) -> Iterator[GroupRow]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.position)
                for line in file:
                    if not line.endswith(b"\n"):  # being written, or torn
                        return
                    self.position += len(line)
                    if (row := read_row(line)) is not None:
                        yield row
        except FileNotFoundError:
            return


_LATE_S = 60.0
"""A file's time of writing and the events' clock may differ by this much."""
