"""What a run did: `Recording(folder)` (`reading.py`) reads the events and rollouts that a `Recorder` (`recorder.py`) kept.

RUN_FOLDER/events/     numbered files of events, one JSON object per line (`events.py`)
RUN_FOLDER/rollouts/   numbered files of rollout groups, each with an index of one line per group (`group_files.py`)

Both are bounded: the oldest file is deleted, and what was let go is counted (`segments.py`). docs/recording.md has the formats.
"""

from async_rl.recording.events import Event as Event
from async_rl.recording.ledger import Fates as Fates
from async_rl.recording.lives import Life as Life
from async_rl.recording.lives import LifeSpan as LifeSpan
from async_rl.recording.reading import Recording as Recording
from async_rl.recording.reading import RolloutPage as RolloutPage
from async_rl.recording.recorded import RecordedGroup as RecordedGroup
from async_rl.recording.recorded import RecordedRollout as RecordedRollout
from async_rl.recording.rows import GroupRow as GroupRow
from async_rl.recording.rows import RolloutFilter as RolloutFilter
from async_rl.recording.rows import RolloutRow as RolloutRow
from async_rl.recording.segments import LetGo as LetGo
