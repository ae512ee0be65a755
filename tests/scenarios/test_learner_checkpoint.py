"""What a learner finds when it comes back: the newest whole checkpoint, or the one before it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog
import torch

from async_rl.checkpoint_files import MANIFEST, Damaged, FileFacts, Layout, Manifest, candidates, file_of, read_manifest
from async_rl.errors import CheckpointError, FenceLost
from learner import checkpoint
from learner.ranks import Crew
from tests.scenarios.learner_rank import OBJECTIVE, batch, config, shape, train


@pytest.fixture
def crew() -> Iterator[Crew]:
    made = Crew(config(), OBJECTIVE, shape(config()))
    yield made
    made.stop()


def successor(hidden: int = 32) -> Crew:
    """Another learner in the same process group: it knows only what is on disk."""
    under = config(hidden=hidden)
    return Crew(under, OBJECTIVE, shape(under))


def saved_twice(crew: Crew, folder: Path) -> list[dict[str, float]]:
    """Checkpoints after steps 1 and 2, and what an uninterrupted learner does in steps 2 to 4."""
    train(crew, 1, 1)
    crew.save(folder, step=1, extra={"step": 1, "position": {"next_task": 7}}, keep=2)
    rows = train(crew, 2, 2)
    crew.save(folder, step=2, extra={"step": 2}, keep=2)
    return rows + train(crew, 3, 4)


def test_the_newest_is_resumed_exactly(crew: Crew, tmp_path: Path) -> None:
    uninterrupted = saved_twice(crew, tmp_path)
    resumed = successor()
    assert resumed.load(tmp_path) == {"step": 2}
    assert train(resumed, 3, 4) == uninterrupted[1:]
    assert all(torch.equal(tensor, resumed.gather()[name]) for name, tensor in crew.gather().items())


def test_without_checkpoints_there_is_nothing_to_resume(crew: Crew, tmp_path: Path) -> None:
    assert crew.load(tmp_path / "absent") is None
    assert crew.load(tmp_path) is None


def flip_a_byte(folder: Path) -> None:
    path = folder / file_of(0)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_short(folder: Path) -> None:
    path = folder / file_of(0)
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / file_of(0)).unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def garble_the_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")


def change_the_format(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | {"format": 99}))


DAMAGES = [flip_a_byte, cut_short, lose_a_file, lose_the_manifest, garble_the_manifest, change_the_format]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back(crew: Crew, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    uninterrupted = saved_twice(crew, tmp_path)
    damage(tmp_path / "step-00000002")
    resumed = successor()
    with structlog.testing.capture_logs() as logged:
        assert resumed.load(tmp_path) == {"step": 1, "position": {"next_task": 7}}
    assert ["step-00000002 is damaged" in each["event"] for each in logged] == [True]
    assert train(resumed, 2, 4) == uninterrupted

    # the damaged step comes round again, and its name is taken by a whole one
    resumed.save(tmp_path, step=2, extra={"step": 2, "again": True}, keep=2)
    assert successor().load(tmp_path) == {"step": 2, "again": True}


def test_when_all_are_damaged_nobody_silently_starts_anew(crew: Crew, tmp_path: Path) -> None:
    saved_twice(crew, tmp_path)
    for folder in tmp_path.iterdir():
        flip_a_byte(folder)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        successor().load(tmp_path)


def test_only_the_newest_are_kept_and_leftovers_go(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial").mkdir()
    for step in range(1, 5):
        crew.save(tmp_path, step=step, extra={}, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_an_interrupted_save_is_no_checkpoint(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=1, extra={"step": 1}, keep=2)
    draft = checkpoint.draft(tmp_path, 2)
    draft.open()
    draft.write(0, {"weights": torch.zeros(3)})
    assert crew.load(tmp_path) == {"step": 1}


def test_a_save_that_fails_says_so_and_training_may_go_on(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="could not begin a checkpoint"):
        crew.save(tmp_path / "taken", step=1, extra={}, keep=2)
    assert not crew.step(batch(1, 1)).skipped


def test_another_model_is_refused(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=1, extra={}, keep=1)
    with pytest.raises(
        CheckpointError, match=r"another model: weights\.embedding\.word_embeddings\.weight has shape \(21, 64\)"
    ):
        successor(hidden=64).load(tmp_path)


def test_a_checkpoint_is_read_by_its_number_not_by_its_spelling(tmp_path: Path) -> None:
    for name in ("step-00000009", "step-100000000", "step-00000010", "step-x", ".step-00000011.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in candidates(tmp_path)] == ["step-100000000", "step-00000010", "step-00000009"]


def test_a_learner_that_slept_through_its_successors_beginning_spoils_no_checkpoint(tmp_path: Path):
    """It finishes what it was writing, for a later step even: the successor's count, and stay."""
    for name in ("step-00000010-by-5", "step-00000011-by-7", "step-00000012-by-5"):
        (tmp_path / name).mkdir()
    checkpoint.prune(tmp_path, 2, newest=12, life=5)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000011-by-7", "step-00000012-by-5"]
    checkpoint.prune(tmp_path, 1, newest=11, life=7)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000011-by-7"]


def test_a_file_of_another_checkpoint_is_damage_too(tmp_path: Path) -> None:
    draft = checkpoint.draft(tmp_path, 1)
    draft.open()
    draft.write(0, {"weights": torch.zeros(3)})
    files = {file_of(0): FileFacts(bytes=1, xxh3="0" * 16)}
    manifest = Manifest(format=1, step=1, layout=Layout(tensor=1, pipeline=1, data=1), files=files, extra={})
    draft.commit(manifest)
    with pytest.raises(Damaged, match="is not what"):
        checkpoint.read_rank(draft.final, read_manifest(draft.final), 0)


def test_a_learner_that_lost_the_run_leaves_no_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """Everything was written before it learned that a successor had begun; none of it counts."""
    crew.save(tmp_path, step=1, extra={"step": 1}, keep=2)

    def confirm() -> None:
        raise FenceLost("a newer learner took over")

    with pytest.raises(FenceLost):
        crew.save(tmp_path, step=2, extra={"step": 2}, keep=2, confirm=confirm)
    assert successor().load(tmp_path) == {"step": 1}


def test_what_lies_above_the_step_just_saved_is_of_a_life_that_was_given_up(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=10, extra={"step": 10}, keep=1)
    crew.save(tmp_path, step=20, extra={"step": 20}, keep=2)
    flip_a_byte(tmp_path / "step-00000020")
    resumed = successor()
    with structlog.testing.capture_logs():
        assert resumed.load(tmp_path) == {"step": 10}
    resumed.save(tmp_path, step=12, extra={"step": 12}, keep=1)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000012"]
    assert successor().load(tmp_path) == {"step": 12}
