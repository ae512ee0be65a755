"""A run that ranks saved under one layout goes on under any other: not a bit is lost, and the next steps are the same."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from async_rl.checkpoints.manifest import POLICY, WEIGHT, candidates, read_manifest
from async_rl.megatron.parameters.adapters import trained_rows
from async_rl.megatron.parameters.pieces import Stretch, open_pieces
from learner.ranks.rank_group import RankGroup
from tests.scenarios.learner.reshaping_rank import LAYOUTS, MODELS, SETS, STEPS, save, take_up, under
from tests.support.learner_rank import OBJECTIVE, FileStores, shape, train
from tests.support.made_once import made_once
from tests.support.warm_processes import play_ranks

WRITERS = [*LAYOUTS, "alone"]
Uninterrupted = dict[str, list[dict[str, float]]]
KINDS = {WEIGHT, "exp_avg", "exp_avg_sq"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_once(tmp_path_factory, "learner_reshaping", lambda root: play("few", root))


def play(which: str, root: Path) -> None:
    """Leave in the folder what one process and two ranks save, and what two ranks take up again."""
    with_one_process("alone", lambda rank_group: save(rank_group, root, "alone"))
    play_ranks("tests.scenarios.learner.reshaping_rank", which, root)


def transitions(which: str) -> list[tuple[str, str]]:
    return [(writer, reader) for writer in WRITERS for reader in (*SETS[which][writer], "alone")]


def with_one_process(writer: str, act: Any) -> Any:
    of = under(writer, "alone")
    with TemporaryDirectory() as folder:
        rank_group = RankGroup(of, OBJECTIVE, shape(of), FileStores(Path(folder)))
        try:
            return act(rank_group)
        finally:
            rank_group.stop()


@pytest.fixture(scope="module")
def uninterrupted() -> Uninterrupted:
    """The steps after the checkpoint, of a process that never saved."""
    return {writer: with_one_process(writer, lambda rank_group: train(rank_group, 1, STEPS)) for writer in ("alone", *MODELS)}


def state(folder: Path, writer: str) -> dict[tuple[str, str], Tensor]:
    """All that a checkpoint has of a model, put together."""
    (checkpoint,) = candidates(folder)
    manifest, of = read_manifest(checkpoint), under(writer, "alone")
    with open_pieces(checkpoint, manifest) as pieces:
        assert pieces.kinds(POLICY) == KINDS
        return {
            (kind, row.name): pieces.read(POLICY, kind, Stretch.whole(row, 0, 1))
            for kind in KINDS
            for row in trained_rows(shape(of), of.learner.lora)
        }


@pytest.mark.parametrize(("writer", "reader"), transitions("few"))
def test_another_layout_resumes(root: Path, uninterrupted: Uninterrupted, writer: str, reader: str) -> None:
    check(root, uninterrupted, writer, reader)


@pytest.mark.slow
def test_every_layout_resumes_every_other(tmp_path: Path, uninterrupted: Uninterrupted) -> None:
    play("all", tmp_path)
    for writer, reader in transitions("all"):
        check(tmp_path, uninterrupted, writer, reader)


def check(root: Path, uninterrupted: Uninterrupted, writer: str, reader: str) -> None:
    if reader == "alone":
        rows = with_one_process(writer, lambda rank_group: take_up(rank_group, root, writer, reader))
    else:
        rows = json.loads((root / f"{reader}-of-{writer}.json").read_text())

    saved, taken_up = state(root / writer, writer), state(root / f"{reader}-of-{writer}", writer)
    assert saved.keys() == taken_up.keys()
    assert [key for key, tensor in saved.items() if not torch.equal(tensor, taken_up[key])] == []

    expected = uninterrupted[writer if writer in MODELS else "alone"][-len(rows) :]
    tolerance = {"rel": 0.05, "abs": 1e-3} if writer == "half" else {"rel": 1e-3, "abs": 1e-5}
    for name in ("loss", "grad_norm", "lr"):  # of the next step, and of the one that the moments have changed
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in expected], **tolerance), name
