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
    Damaged,
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
from learner.checkpoints.checkpointer import Keeping
from learner.model import TrainingModel
from learner.ranks.rank_group import Crew
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


NEWEST = ["step-00000001"]


def saved_twice(crew: Crew, folder: Path) -> list[dict[str, float]]:
    """Checkpoints after steps 1 and 2, and what an uninterrupted learner does in steps 2 to 4. Training waits for neither."""
    train(crew, 1, 1)
    crew.save(folder, step=1, extra={"step": 1, "position": {"next_task": 7}}, keep=2)
    rows = train(crew, 2, 2)
    second = crew.save(folder, step=2, extra={"step": 2}, keep=2)
    rows += train(crew, 3, 4)
    second.result()
    return rows


def test_the_newest_is_resumed_exactly(crew: Crew, tmp_path: Path) -> None:
    uninterrupted = saved_twice(crew, tmp_path)
    resumed = successor()
    assert resumed.load(tmp_path) == {"step": 2}
    assert train(resumed, 3, 4) == uninterrupted[1:]
    assert all(torch.equal(tensor, resumed.gather()[name]) for name, tensor in crew.gather().items())


def test_a_model_without_moments_begins_with_a_new_optimizer(crew: Crew, tmp_path: Path) -> None:
    weights = crew.gather()
    expected = train(crew, 1, 3)
    save_checkpoint(tmp_path, shape(config()), weights)
    resumed = successor()
    train(resumed, 7, 8)
    assert resumed.load(tmp_path) == {}
    assert train(resumed, 1, 3) == expected


def test_a_checkpoint_can_hold_several_models(crew: Crew, tmp_path: Path) -> None:
    critic, other_critic = successor(hidden=64), successor(hidden=64)
    train(crew, 1, 2)
    train(critic, 3, 3)
    keeping = Keeping({"policy": crew.model, "critic": critic.model}, crew.device)
    keeping.begin(tmp_path, step=1, extra={}, keep=1).result()
    resumed = successor()
    assert Keeping({"policy": resumed.model, "critic": other_critic.model}, crew.device).load(tmp_path, NEWEST) == {}
    assert (train(resumed, 4, 5), train(other_critic, 4, 5)) == (train(crew, 4, 5), train(critic, 4, 5))


def test_a_critic_that_was_not_saved_begins_anew(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=1, extra={}, keep=1).result()
    critic = successor(hidden=64)
    before = {name: tensor.clone() for name, tensor in critic.gather().items()}
    with structlog.testing.capture_logs() as logged:
        Keeping({"policy": successor().model, "critic": critic.model}, crew.device).load(tmp_path, NEWEST)
    assert [each["event"] for each in logged] == ["checkpoint step-00000001 has no critic, so it begins anew"]
    assert all(torch.equal(tensor, before[name]) for name, tensor in critic.gather().items())


def test_a_critic_that_shares_the_layers_may_be_left_and_may_begin_anew(crew: Crew, tmp_path: Path) -> None:
    plain = shape(config())
    model = TrainingModel(
        replace(plain, head="both"),
        config().learner.optimizer,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=1,
        total_updates=1,
    )
    Keeping({"policy": model}, crew.device).begin(tmp_path, step=1, extra={}, keep=1).result()
    found = load_checkpoint(tmp_path / NEWEST[0], read_manifest(tmp_path / NEWEST[0]), plain, torch.float32)
    assert found.keys() == crew.gather().keys()
    imported = save_checkpoint(tmp_path, plain, found)
    before = model.gather() or {}
    with structlog.testing.capture_logs() as logged:
        Keeping({"policy": model}, crew.device).load(tmp_path, [imported.name])
    assert [each["event"] for each in logged] == ["checkpoint step-00000000 has no values of the policy, so they begin anew"]
    assert all(torch.equal(tensor, {**before, **found}[name]) for name, tensor in (model.gather() or {}).items())
    with pytest.raises(CheckpointError, match="belongs to another model: 2 parameters differ, the first is value_head"):
        load_checkpoint(imported, read_manifest(imported), replace(plain, head="both"), torch.float32)


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


def change_the_manifest(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | {"more": 99}))


def test_a_checkpoint_of_another_release_is_refused_rather_than_passed_over(crew: Crew, tmp_path: Path) -> None:
    saved_twice(crew, tmp_path)
    manifest = tmp_path / "step-00000002" / MANIFEST
    manifest.write_text(json.dumps({"format": 1, "step": 2}))
    with pytest.raises(CheckpointError, match="of format 1, and this release reads format 2"):
        crew.load(tmp_path)


DAMAGES = [flip_a_byte, cut_short, lose_a_file, lose_the_manifest, garble_the_manifest, change_the_manifest]


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
    resumed.save(tmp_path, step=2, extra={"step": 2, "again": True}, keep=2).result()
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
        crew.save(tmp_path, step=step, extra={}, keep=2).result()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_an_interrupted_save_is_no_checkpoint(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=1, extra={"step": 1}, keep=2).result()
    draft = Draft.of(tmp_path, 2)
    draft.open()
    draft.write(0, {"weights": torch.zeros(3)})
    assert crew.load(tmp_path) == {"step": 1}


def test_a_save_that_fails_says_so_and_training_may_go_on(crew: Crew, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="could not begin a checkpoint"):
        crew.save(tmp_path / "taken", step=1, extra={}, keep=2).result()
    assert not crew.step(batch(1, 1)).skipped


def test_another_model_is_refused(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=1, extra={}, keep=1).result()
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


def test_a_learner_whose_checkpoints_would_be_passed_over_ends_aloud(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=20, extra={}, keep=2, life=900).result()
    with pytest.raises(FenceLost, match="step-00000020-by-900 was written by a later learner"):
        crew.save(tmp_path, step=21, extra={}, keep=2, life=7).result()
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
    with pytest.raises(Damaged, match="is not what"):
        check_files(draft.final, read_manifest(draft.final), [file_of(0)])


def test_a_learner_that_lost_the_run_leaves_no_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """Everything was written before it learned that a successor had begun; none of it counts."""
    crew.save(tmp_path, step=1, extra={"step": 1}, keep=2).result()

    def confirm() -> None:
        raise FenceLost("a newer learner took over")

    with pytest.raises(FenceLost):
        crew.save(tmp_path, step=2, extra={"step": 2}, keep=2, confirm=confirm).result()
    assert successor().load(tmp_path) == {"step": 1}


def test_what_lies_above_the_step_just_saved_is_of_a_life_that_was_given_up(crew: Crew, tmp_path: Path) -> None:
    crew.save(tmp_path, step=10, extra={"step": 10}, keep=1).result()
    crew.save(tmp_path, step=20, extra={"step": 20}, keep=2).result()
    flip_a_byte(tmp_path / "step-00000020")
    resumed = successor()
    with structlog.testing.capture_logs():
        assert resumed.load(tmp_path) == {"step": 10}
    resumed.save(tmp_path, step=12, extra={"step": 12}, keep=1).result()
    assert [path.name for path in candidates(tmp_path)] == ["step-00000012"]
    assert successor().load(tmp_path) == {"step": 12}
