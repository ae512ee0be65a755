"""`async-rl checkpoints`: what people are told of the checkpoints of a run, and what is removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from async_rl.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    POLICY,
    DamagedCheckpoint,
    Layout,
    Manifest,
    ModelFacts,
    candidates,
    facts_of,
    file_of,
    folder_of,
    read_manifest,
)
from async_rl.cli.main import dispatch
from async_rl.errors import ConfigError

NAMES = [folder_of(step, life=7) for step in (40, 30, 20, 10)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with four checkpoints."""
    for name in NAMES:
        _write(tmp_path / "checkpoints" / name)
    return tmp_path


def _write(checkpoint: Path) -> None:
    checkpoint.mkdir(parents=True)
    for rank in range(2):
        (checkpoint / file_of(rank)).write_bytes(b"%d" % rank * 1000)
    manifest = Manifest(
        format=FORMAT,
        step=int(checkpoint.name[5:13]),
        layout=Layout(tensor=2),
        models={POLICY: ModelFacts(updates=12, parameters={})},
        files={file_of(rank): facts_of(checkpoint / file_of(rank)) for rank in range(2)},
        extra={},
    )
    (checkpoint / MANIFEST).write_text(manifest.model_dump_json())


def flip_a_byte(run: Path, name: str) -> None:
    file = run / "checkpoints" / name / file_of(1)
    file.write_bytes(b"x" + file.read_bytes()[1:])


def cut_short(run: Path, name: str) -> None:
    file = run / "checkpoints" / name / file_of(1)
    file.write_bytes(file.read_bytes()[:-1])


def left(run: Path) -> list[str]:
    return [path.name for path in candidates(run / "checkpoints")]


def test_the_newest_comes_first(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["checkpoints", "ls", str(run)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "written", "size", "ranks", "models"]
    assert [row.split()[0] for row in rows] == NAMES
    assert all("2.0 kB" in row and "tensor 2" in row and "policy after 12 updates" in row for row in rows)
    assert all(row.rstrip().endswith("whole") for row in rows)


def test_listing_sees_what_is_cut_short_and_verifying_sees_every_byte(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_byte(run, NAMES[1])
    assert dispatch(["checkpoints", "ls", str(run)]) == 0
    assert dispatch(["checkpoints", "verify", str(run)]) == 1
    damaged = [row for row in capsys.readouterr().out.splitlines() if "does not match manifest.json" in row]
    assert [row.split()[0] for row in damaged] == [NAMES[1]]
    cut_short(run, NAMES[2])
    assert dispatch(["checkpoints", "ls", str(run)]) == 1
    assert "has 999 bytes, not 1000" in capsys.readouterr().out


def test_one_checkpoint_can_be_named(run: Path) -> None:
    flip_a_byte(run, NAMES[1])
    assert dispatch(["checkpoints", "verify", str(run / "checkpoints" / NAMES[0])]) == 0
    assert dispatch(["checkpoints", "verify", str(run / "checkpoints" / NAMES[1])]) == 1


def test_a_run_is_found_by_its_configuration(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also one of `async-rl train`, which has another kind of configuration."""
    file = run / "described.yaml"
    described = "method: sft, model: {size: {hidden: 8, layers: 1, heads: 1}}, data: {path: texts.jsonl}"
    file.write_text(f"{{run: {{folder: {run.parent}, name: {run.name}}}, {described}}}")
    assert dispatch(["checkpoints", "ls", "@", str(file)]) == 0
    assert NAMES[0] in capsys.readouterr().out


def test_a_manifest_that_cannot_be_read_is_damage(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / NAMES[0] / MANIFEST).write_text("{")
    (run / "checkpoints" / NAMES[1] / MANIFEST).write_text('{"format": 1}')
    assert dispatch(["checkpoints", "ls", str(run)]) == 1
    said = capsys.readouterr().out
    assert "cannot be read" in said
    assert "of format 1" in said


def test_the_old_ones_go(run: Path) -> None:
    assert dispatch(["checkpoints", "prune", str(run), "--keep", "2", "--dry-run"]) == 0
    assert left(run) == NAMES
    assert dispatch(["checkpoints", "prune", str(run), "--keep", "2"]) == 0
    assert left(run) == NAMES[:2]


def test_the_newest_whole_one_stays_however_many_damaged_ones_are_newer(run: Path) -> None:
    flip_a_byte(run, NAMES[0])
    cut_short(run, NAMES[1])
    assert dispatch(["checkpoints", "prune", str(run), "--keep", "1"]) == 0
    assert left(run) == NAMES[:3]


def test_without_a_whole_one_nothing_is_removed(run: Path) -> None:
    for name in NAMES:
        flip_a_byte(run, name)
    assert dispatch(["checkpoints", "prune", str(run), "--keep", "1"]) == 1
    assert left(run) == NAMES


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ls",), "checkpoints ls needs a folder, or a run"),
        (("ls", "nowhere"), "there is no checkpoint in nowhere"),
        (("prune", "nowhere"), "the number to keep, at least 1: --keep N"),
        (("prune", "nowhere", "--keep", "0"), "the number to keep, at least 1: --keep N"),
        (("prune", "nowhere", "--keep", "few"), "--keep 'few' is not a number"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        dispatch(["checkpoints", *words])


def test_torch_is_not_needed() -> None:
    code = "import sys, async_rl.cli.checkpoints; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", ""])
def test_a_manifest_names_no_file_outside_its_folder(run: Path, name: str):
    checkpoint = run / "checkpoints" / NAMES[0]
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][name] = manifest["files"][file_of(0)]
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(DamagedCheckpoint, match="is not a manifest"):
        read_manifest(checkpoint)


def test_a_checkpoint_s_files_are_no_links(run: Path):
    checkpoint = run / "checkpoints" / NAMES[0]
    (run / "outside").write_bytes((checkpoint / file_of(0)).read_bytes())
    (checkpoint / file_of(0)).unlink()
    (checkpoint / file_of(0)).symlink_to(run / "outside")
    with pytest.raises(DamagedCheckpoint, match="is a link"):
        read_manifest(checkpoint)
