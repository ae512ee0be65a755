"""What each of two ranks does to save a run under one layout and take it up under others."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_rl.checkpoints.manifest import candidates
from async_rl.config import Config
from async_rl.errors import boundary
from learner.ranks.orders import OpenSender, PackCheckpoint, PackVersion
from learner.ranks.rank_group import RankGroup, follow
from tests.support.learner_rank import OBJECTIVE, FileStores, config, meet, shape, train

SAVED_AT, STEPS = 3, 5
LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "data": {},
    "experts": {"expert": 2},
    "interleaved": {"pipeline": 2, "virtual_stages": 2},
    "half": {},
    "adapters": {"tensor": 2},
}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {"experts": 4},
    "interleaved": {"layers": 4},
    "half": {"precision": "bfloat16"},
    "adapters": {"lora": {"rank": 4}},
}
"""Where it is not the smallest there is. Its vocabulary is odd, so tensor ranks pad it."""
READERS = {
    "tensor": ["data", "pipeline"],
    "pipeline": ["data", "tensor"],
    "data": ["tensor", "pipeline"],
    "experts": ["data", "pipeline"],
    "interleaved": ["data"],
    "half": ["tensor"],
    "adapters": ["tensor", "data"],
    "alone": ["tensor", "pipeline", "data"],
}
"""Writer -> layouts that read its checkpoint; a single process reads all of them."""
FEW_READERS = {
    "tensor": ["pipeline"],
    "pipeline": ["data"],
    "data": ["tensor"],
    "experts": ["pipeline"],
    "interleaved": ["data"],
    "half": [],
    "adapters": ["data"],
    "alone": ["tensor"],
}
"""So few that each layout is read by another one; the one of half precision, by a single process."""
SETS = {"few": FEW_READERS, "all": READERS}


def under(writer: str, layout: str) -> Config:
    """The writer's model, divided in this way."""
    return config(**MODELS.get(writer, {}), **LAYOUTS.get(layout, {}))


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One rank of two."""

    root: Path
    rank: int

    @contextmanager
    def rank_group(self, meeting: str, of: Config) -> Iterator[RankGroup | None]:
        """Of both ranks, on the first one; the second one follows it."""
        meet(self.root / meeting, of, self.rank)
        stores = FileStores(self.root / f"{meeting}-stores")
        if self.rank > 0:
            follow(of, OBJECTIVE, shape(of), stores)
            yield None
            return
        rank_group = RankGroup(of, OBJECTIVE, shape(of), stores)
        yield rank_group
        rank_group.stop()

    def write(self, writer: str) -> None:
        with self.rank_group(f"{writer}-writes", under(writer, writer)) as rank_group:
            if rank_group is not None:
                save(rank_group, self.root, writer)

    def read(self, writer: str, reader: str) -> None:
        """What was loaded is saved again before anything changes, so that bits can be compared."""
        with self.rank_group(f"{reader}-reads-{writer}", under(writer, reader)) as rank_group:
            if rank_group is not None:
                rows = take_up(rank_group, self.root, writer, reader)
                (self.root / f"{reader}-of-{writer}.json").write_text(json.dumps(rows))


def save(rank_group: RankGroup, root: Path, writer: str) -> None:
    train(rank_group, 1, SAVED_AT)
    rank_group.save(root / writer, step=SAVED_AT, extra={"version": 12}, keep=2).result()


def take_up(rank_group: RankGroup, root: Path, writer: str, reader: str) -> list[dict[str, float]]:
    assert rank_group.load(root / writer) == {"version": 12}
    rank_group.save(root / f"{reader}-of-{writer}", step=SAVED_AT, extra={}, keep=2).result()
    rank_group.run(OpenSender(fence=1))
    saved = rank_group.run(PackVersion(version=1, keep=())).result()
    rows = train(rank_group, SAVED_AT + 1, STEPS)
    (checkpoint,) = candidates(root / writer)
    served = rank_group.run(PackCheckpoint(version=2, keep=(), checkpoint=str(checkpoint)))
    assert served is not None
    assert served.result() == saved, "a checkpoint is served bit for bit as it was, whichever layout wrote it"
    assert rank_group.run(PackVersion(version=3, keep=())).result() != saved, "nothing of it is in the model"
    return rows


def main(readers_of: Mapping[str, Sequence[str]], root: Path, rank: int) -> None:
    stage = Stage(root=root, rank=rank)
    for writer in LAYOUTS:
        stage.write(writer)
    for writer, readers in readers_of.items():
        for reader in readers:
            stage.read(writer, reader)


if __name__ == "__main__":
    with boundary("rank"):
        main(SETS[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3]))
