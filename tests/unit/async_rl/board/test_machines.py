"""What a process says of its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_rl import __version__
from async_rl.board.machines import MachineNote, own_machine
from async_rl.imports.software import nvidia_driver

DRIVER = "NVRM version: NVIDIA UNIX {kind}  {version}  Release Build  Tue Sep  9 12:15:58 UTC 2025\nGCC version: 12.2\n"


def test_a_process_says_little_and_once_what_it_runs() -> None:
    note = own_machine("worker-1", gpu="NVIDIA H200")
    assert MachineNote.model_validate_json(note.model_dump_json()) == note
    assert len(note.model_dump_json()) < 500
    assert note.software["async_rl"] == __version__
    assert {"python", "torch", "megatron-core"} <= note.software.keys()


@pytest.mark.parametrize(
    ("kind", "version"),
    [("Open Kernel Module for x86_64", "580.82.07"), ("x86_64 Kernel Module", "550.54"), ("aarch64 Kernel Module", "570.1.2")],
)
def test_the_drivers_version_is_read_from_what_it_says(tmp_path: Path, kind: str, version: str) -> None:
    (tmp_path / "version").write_text(DRIVER.format(kind=kind, version=version))
    assert nvidia_driver(tmp_path / "version") == version


def test_without_a_driver_there_is_no_version(tmp_path: Path) -> None:
    assert nvidia_driver(tmp_path / "version") == ""
    (tmp_path / "version").write_text("a driver")
    assert nvidia_driver(tmp_path / "version") == "of an unknown version"
