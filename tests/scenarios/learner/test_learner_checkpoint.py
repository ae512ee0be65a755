"""What a learner finds when it comes back: the newest whole checkpoint, or the one before it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch

from async_rl.checkpoints.draft import Draft
from async_rl.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    DamagedCheckpoint,
    FileFacts,
    Layout,
    Manifest,
    candidates,
    check_files,
    file_of,
    read_manifest,
    remove_superseded,
)
from async_rl.errors import CheckpointError, FenceLost
from async_rl.megatron.parameters.checkpoint_weights import load_checkpoint, save_checkpoint
from learner.checkpoints.checkpointer import Checkpointer
from learner.model import TrainingModel
from learner.ranks.rank_group import RankGroup
from tests.support.full_weights import weights_of, weights_of_model
from tests.support.learner_rank import OBJECTIVE, batch, config, shape, train


@pytest.fixture
def rank_group() -> Iterator[RankGroup]:
    made = RankGroup(config(), OBJECTIVE, shape(config()))
    yield made
    made.stop()


def successor(hidden: int = 32) -> RankGroup:
    """Another learner in the same process group: it knows only what is on disk."""
    under = config(hidden=hidden)
    return RankGroup(under, OBJECTIVE, shape(under))


NEWEST = ["step-00000001"]


def saved_twice(rank_group: RankGroup, folder: Path) -> list[dict[str, float]]:
    """Checkpoints after steps 1 and 2, and what an uninterrupted learner does in steps 2 to 4. Training waits for neither."""
    train(rank_group, 1, 1)
    rank_group.save(folder, step=1, extra={"step": 1, "position": {"next_task": 7}}, keep=2)
    rows = train(rank_group, 2, 2)
    second = rank_group.save(folder, step=2, extra={"step": 2}, keep=2)
    rows += train(rank_group, 3, 4)
    second.result()
    return rows


def test_the_newest_is_resumed_exactly(rank_group: RankGroup, tmp_path: Path) -> None:
    uninterrupted = saved_twice(rank_group, tmp_path)
    resumed = successor()
    assert resumed.load(tmp_path) == {"step": 2}
    assert train(resumed, 3, 4) == uninterrupted[1:]
    weights = weights_of(resumed)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in weights_of(rank_group).items())


def test_a_model_without_moments_begins_with_a_new_optimizer(rank_group: RankGroup, tmp_path: Path) -> None:
    weights = weights_of(rank_group)
    expected = train(rank_group, 1, 3)
    save_checkpoint(tmp_path, shape(config()), weights)
    resumed = successor()
    train(resumed, 7, 8)
    assert resumed.load(tmp_path) == {}
    assert train(resumed, 1, 3) == expected


def test_a_checkpoint_can_hold_several_models(rank_group: RankGroup, tmp_path: Path) -> None:
    critic, other_critic = successor(hidden=64), successor(hidden=64)
    train(rank_group, 1, 2)
    train(critic, 3, 3)
    checkpointer = Checkpointer({"policy": rank_group.model, "critic": critic.model}, rank_group.device)
    checkpointer.begin(tmp_path, step=1, extra={}, keep=1).result()
    resumed = successor()
    assert Checkpointer({"policy": resumed.model, "critic": other_critic.model}, rank_group.device).load(tmp_path, NEWEST) == {}
    assert (train(resumed, 4, 5), train(other_critic, 4, 5)) == (train(rank_group, 4, 5), train(critic, 4, 5))


def test_a_critic_that_was_not_saved_keeps_its_initial_weights(rank_group: RankGroup, tmp_path: Path) -> None:
    rank_group.save(tmp_path, step=1, extra={}, keep=1).result()
    critic = successor(hidden=64)
    before = weights_of(critic)
    with structlog.testing.capture_logs() as logged:
        Checkpointer({"policy": successor().model, "critic": critic.model}, rank_group.device).load(tmp_path, NEWEST)
    assert [each["event"] for each in logged] == [
        "checkpoint step-00000001 has no critic, which starts from its initial weights"
    ]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_of(critic).items())


def test_a_shared_critic_may_be_dropped_or_added_on_resume(rank_group: RankGroup, tmp_path: Path) -> None:
    plain = shape(config())
    model = TrainingModel(
        replace(plain, head="both"),
        config().learner.optimizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=1,
        total_updates=1,
    )
    Checkpointer({"policy": model}, rank_group.device).begin(tmp_path, step=1, extra={}, keep=1).result()
    found = load_checkpoint(tmp_path / NEWEST[0], read_manifest(tmp_path / NEWEST[0]), plain, torch.float32)
    assert found.keys() == weights_of(rank_group).keys()
    imported = save_checkpoint(tmp_path, plain, found)
    before = weights_of_model(model)
    with structlog.testing.capture_logs() as logged:
        Checkpointer({"policy": model}, rank_group.device).load(tmp_path, [imported.name])
    assert [each["event"] for each in logged] == [
        "checkpoint step-00000000 has no value head of the policy, which starts from its initial weights"
    ]
    assert all(torch.equal(tensor, {**before, **found}[name]) for name, tensor in weights_of_model(model).items())
    with pytest.raises(CheckpointError, match="belongs to another model: 2 parameters differ, the first is value_head"):
        load_checkpoint(imported, read_manifest(imported), replace(plain, head="both"), torch.float32)


def test_without_checkpoints_there_is_nothing_to_resume(rank_group: RankGroup, tmp_path: Path) -> None:
    assert rank_group.load(tmp_path / "absent") is None
    assert rank_group.load(tmp_path) is None


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


def change_the_manifest(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | {"more": 99}))


def test_a_checkpoint_of_another_release_is_refused_rather_than_passed_over(rank_group: RankGroup, tmp_path: Path) -> None:
    saved_twice(rank_group, tmp_path)
    manifest = tmp_path / "step-00000002" / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "step": 2}))
    with pytest.raises(CheckpointError, match="of format 1, and this release reads format 2"):
        rank_group.load(tmp_path)


DAMAGES = [flip_a_byte, cut_short, lose_a_file, lose_the_manifest, garble_the_manifest, change_the_manifest]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_falls_back(rank_group: RankGroup, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    uninterrupted = saved_twice(rank_group, tmp_path)
    damage(tmp_path / "step-00000002")
    resumed = successor()
    with structlog.testing.capture_logs() as logged:
        assert resumed.load(tmp_path) == {"step": 1, "position": {"next_task": 7}}
    assert ["step-00000002 is damaged" in each["event"] for each in logged] == [True]
    assert train(resumed, 2, 4) == uninterrupted

    # the damaged step comes round again, and its name is taken by a whole one
    resumed.save(tmp_path, step=2, extra={"step": 2, "again": True}, keep=2).result()
    assert successor().load(tmp_path) == {"step": 2, "again": True}


def test_a_damaged_checkpoint_is_set_aside_and_not_counted_among_those_kept(rank_group: RankGroup, tmp_path: Path) -> None:
    for step in (1, 2):
        rank_group.save(tmp_path, step=step, extra={"step": step}, keep=2, life=1).result()
    flip_a_byte(tmp_path / "step-00000002-by-1")
    resumed = successor()
    assert resumed.load(tmp_path) == {"step": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001-by-1", "step-00000002-by-1.damaged"]
    resumed.save(tmp_path, step=3, extra={"step": 3}, keep=2, life=2).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001-by-1", "step-00000003-by-2"]
    flip_a_byte(tmp_path / "step-00000003-by-2")
    assert successor().load(tmp_path) == {"step": 1}, "one undamaged checkpoint is still there"


def test_all_damaged_is_an_error_instead_of_a_silent_restart(rank_group: RankGroup, tmp_path: Path) -> None:
    saved_twice(rank_group, tmp_path)
    for folder in tmp_path.iterdir():
        flip_a_byte(folder)
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        successor().load(tmp_path)


def test_only_the_newest_are_kept_and_leftovers_go(rank_group: RankGroup, tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.partial").mkdir()
    for step in range(1, 5):
        rank_group.save(tmp_path, step=step, extra={}, keep=2).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_an_interrupted_save_is_no_checkpoint(rank_group: RankGroup, tmp_path: Path) -> None:
    rank_group.save(tmp_path, step=1, extra={"step": 1}, keep=2).result()
    draft = Draft.of(tmp_path, 2)
    draft.open()
    draft.write(0, {"weights": torch.zeros(3)})
    assert rank_group.load(tmp_path) == {"step": 1}


def test_a_failed_save_raises_and_training_may_continue(rank_group: RankGroup, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="could not begin a checkpoint"):
        rank_group.save(tmp_path / "taken", step=1, extra={}, keep=2).result()
    assert not rank_group.step(batch(1, 1)).skipped


def test_another_model_is_refused(rank_group: RankGroup, tmp_path: Path) -> None:
    rank_group.save(tmp_path, step=1, extra={}, keep=1).result()
    with pytest.raises(CheckpointError, match=r"another model: 14 parameters .* expected \(64,\), found \(32,\); use its"):
        successor(hidden=64).load(tmp_path)


def test_a_checkpoint_is_read_by_its_number_not_by_its_spelling(tmp_path: Path) -> None:
    for name in ("step-00000009", "step-100000000", "step-00000010", "step-x", ".step-00000011.partial"):
        (tmp_path / name).mkdir()
    assert [path.name for path in candidates(tmp_path)] == ["step-100000000", "step-00000010", "step-00000009"]


def test_a_learner_that_slept_through_its_successors_beginning_spoils_no_checkpoint(tmp_path: Path):
    """It finishes what it was writing, for a later step even: the successor's count, and stay."""
    for name in ("step-00000010-by-5", "step-00000011-by-7", "step-00000012-by-5"):
        (tmp_path / name).mkdir()
    remove_superseded(tmp_path, 2, newest=12, life=5)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000011-by-7", "step-00000012-by-5"]
    remove_superseded(tmp_path, 1, newest=11, life=7)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000011-by-7"]


def test_what_was_just_written_stays_whatever_number_its_learner_has(tmp_path: Path):
    for name in ("step-00000010-by-900", "step-00000020-by-900", "step-00000021-by-7"):
        (tmp_path / name).mkdir()
    remove_superseded(tmp_path, 2, newest=21, life=7)
    assert [path.name for path in candidates(tmp_path)] == ["step-00000020-by-900", "step-00000021-by-7"]


def test_a_learner_whose_checkpoints_would_be_passed_over_ends_aloud(rank_group: RankGroup, tmp_path: Path) -> None:
    rank_group.save(tmp_path, step=20, extra={}, keep=2, life=900).result()
    with pytest.raises(FenceLost, match="step-00000020-by-900 was written by a later learner"):
        rank_group.save(tmp_path, step=21, extra={}, keep=2, life=7).result()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020-by-900"]


def test_a_checkpoint_that_is_rolled_back_to_is_kept_besides_the_newest(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        (tmp_path / f"step-{step:08}").mkdir()
    remove_superseded(tmp_path, 2, newest=8, spared="step-00000002")
    assert [path.name for path in candidates(tmp_path)] == ["step-00000008", "step-00000006", "step-00000002"]


def test_a_file_of_another_checkpoint_is_damage_too(tmp_path: Path) -> None:
    draft = Draft.of(tmp_path, 1)
    draft.open()
    draft.write(0, {"weights": torch.zeros(3)})
    files = {file_of(0): FileFacts(bytes=1, xxh3="0" * 16)}
    layout = Layout()
    draft.commit(Manifest(format=FORMAT, step=1, layout=layout, models={}, files=files, extra={}))
    with pytest.raises(DamagedCheckpoint, match="does not match"):
        check_files(draft.final, read_manifest(draft.final), [file_of(0)])


def test_a_learner_that_lost_the_run_leaves_no_checkpoint(rank_group: RankGroup, tmp_path: Path) -> None:
    """Everything was written before it learned that a successor had begun; none of it counts."""
    rank_group.save(tmp_path, step=1, extra={"step": 1}, keep=2).result()

    def confirm() -> None:
        raise FenceLost("a newer learner took over")

    with pytest.raises(FenceLost):
        rank_group.save(tmp_path, step=2, extra={"step": 2}, keep=2, confirm=confirm).result()
    assert successor().load(tmp_path) == {"step": 1}


def test_checkpoints_above_the_step_just_saved_are_superseded(rank_group: RankGroup, tmp_path: Path) -> None:
    rank_group.save(tmp_path, step=10, extra={"step": 10}, keep=1).result()
    rank_group.save(tmp_path, step=20, extra={"step": 20}, keep=2).result()
    flip_a_byte(tmp_path / "step-00000020")
    resumed = successor()
    with structlog.testing.capture_logs():
        assert resumed.load(tmp_path) == {"step": 10}
    resumed.save(tmp_path, step=12, extra={"step": 12}, keep=1).result()
    assert [path.name for path in candidates(tmp_path)] == ["step-00000012"]
    assert successor().load(tmp_path) == {"step": 12}
