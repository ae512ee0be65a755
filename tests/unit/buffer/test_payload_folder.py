"""The payload folder: reading and writing, invalid references, full or missing folders."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.payloads.codec import BadPayload
from buffer.payloads.files import LOOKS, MAX_MAPS, PayloadFolder, PayloadFolderFull, is_reference

MIB = 2**20
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "payloads"


@pytest.fixture
def payload_folder(folder: Path) -> Iterator[PayloadFolder]:
    with PayloadFolder(folder, max_bytes=64 * MIB) as payload_folder:
        yield payload_folder


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def reference(token: bytes, length: int, name: bytes) -> bytes:
    return struct.pack("<4s16sI", b"ARLF", token, length) + name


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 3 * MIB + 1])
def test_what_is_put_can_be_read_by_every_process_that_opens_the_folder(payload_folder: PayloadFolder, folder: Path, size: int):
    payload = random.Random(size).randbytes(size)
    found = payload_folder.put("t000000001", payload)
    assert is_reference(found)
    assert len(found) < 64
    assert not is_reference(payload)
    with PayloadFolder(folder, max_bytes=1) as reader:
        assert bytes(reader.get(found)) == payload == bytes(payload_folder.get(found))
    assert payload_folder.measure() == size


def test_arrays_over_a_map_outlive_the_file_and_the_arena_and_cannot_be_written(folder: Path):
    with PayloadFolder(folder, max_bytes=MIB) as payload_folder:
        numbers = np.frombuffer(
            payload_folder.get(payload_folder.put("t1", np.arange(100_000, dtype=np.int32).tobytes())), np.int32
        )
        payload_folder.delete(payload_folder.names())
        assert payload_folder.names() == []
    assert numbers.sum() == 99_999 * 50_000
    assert not numbers.flags.writeable


def test_thousands_of_payloads_in_use_do_not_exhaust_file_descriptors(payload_folder: PayloadFolder):
    before = open_files()
    references = [payload_folder.put(f"t{number}", b"%d" % number) for number in range(3 * MAX_MAPS)]
    held = [payload_folder.get(found) for found in references]
    assert [bytes(payload) for payload in held] == [b"%d" % number for number in range(3 * MAX_MAPS)]
    assert open_files() <= before + MAX_MAPS
    held.clear()
    assert open_files() == before


LIES: dict[str, Callable[[bytes], bytes]] = {
    "another folder": lambda token: reference(b"0" * 16, 3, b"t1-0123456789abcdef"),
    "no such file": lambda token: reference(token, 3, b"t1-0123456789abcdef"),
    "up": lambda token: reference(token, 3, b"../t1-0123456789abcdef"),
    "absolute": lambda token: reference(token, 3, b"/etc/hostname"),
    "another file": lambda token: reference(token, 16, b"folder"),
    "zero byte": lambda token: reference(token, 3, b"t1-0123456789abcdef\0"),
    "line end": lambda token: reference(token, 3, b"t1-0123456789abcdef\n"),
    "not ascii": lambda token: reference(token, 3, "t1-0123456789abcdeé".encode()),
    "other digits": lambda token: reference(token, 3, "t१-0123456789abcdef".encode()),
    "empty": lambda token: reference(token, 0, b"t1-0123456789abcdef"),
    "huge": lambda token: reference(token, 2**32 - 1, b"t1-0123456789abcdef"),
    "no name": lambda token: reference(token, 3, b""),
    "cut": lambda token: reference(token, 3, b"")[:10],
    "long": lambda token: reference(token, 3, b"t" + b"1" * MIB + b"-0123456789abcdef"),
    "no reference": lambda token: b"ARLG",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reference_that_lies_is_refused(payload_folder: PayloadFolder, lie: str):
    with pytest.raises(BadPayload):
        payload_folder.get(LIES[lie](payload_folder.token))


def _pipe(path: Path, payload: bytes) -> None:
    os.mkfifo(path)


def _link(path: Path, payload: bytes) -> None:
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(payload)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path, payload: path.write_bytes(payload[:-1]), id="shorter"),
        pytest.param(lambda path, payload: path.write_bytes(payload + b"x"), id="longer"),
        pytest.param(lambda path, payload: path.mkdir(), id="folder"),
        pytest.param(_link, id="link"),
        pytest.param(_pipe, id="pipe"),
        pytest.param(lambda path, payload: None, id="gone"),
    ],
)
def test_a_file_that_is_not_the_one_that_was_put_is_refused(
    payload_folder: PayloadFolder, folder: Path, spoil: Callable[[Path, bytes], object]
):
    payload = b"sound" * 1000
    found = payload_folder.put("t1", payload)
    [name] = payload_folder.names()
    (folder / name).unlink()
    spoil(folder / name, payload)
    with pytest.raises(BadPayload, match=str(folder)):
        payload_folder.get(found)


def test_damaged_references_are_refused_or_mean_what_was_put(payload_folder: PayloadFolder):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    payload = b"p" * 5000
    found = payload_folder.put("t000000007", payload)
    for _ in range(5000):
        damaged = bytearray(found)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        kept = draw.choice([len(damaged), draw.randrange(len(damaged))])
        with suppress(BadPayload):
            assert bytes(payload_folder.get(bytes(damaged[:kept]))) == payload


@pytest.mark.parametrize("ticket", ["", "x", "../t1", "t1/..", "t", "t1\n", "1", "t" + "1" * 19])
def test_only_tickets_have_files(payload_folder: PayloadFolder, folder: Path, ticket: str):
    with pytest.raises(BadPayload, match="not that of a ticket"):
        payload_folder.put(ticket, b"x")
    assert [path.name for path in folder.iterdir()] == ["folder"]


def test_other_files_in_the_folder_are_left_alone(payload_folder: PayloadFolder, folder: Path):
    payload_folder.put("t1", b"x")
    strangers = ["notes.txt", "t1", "t1-0", ".t1-0123456789abcdef"]
    for name in strangers:
        (folder / name).write_text("not ours")
    payload_folder.delete([*payload_folder.names(), *strangers, "folder", "../payloads", "t9-0123456789abcdef"])
    assert sorted(path.name for path in folder.iterdir()) == sorted([*strangers, "folder"])
    assert payload_folder.measure() == 0


def fill(payload_folders: list[PayloadFolder], size: int) -> None:
    for number, payload_folder in enumerate(itertools.cycle(payload_folders)):
        payload_folder.put(f"t{number}", b"x" * size)


def test_the_bound_holds_and_deleting_makes_room(folder: Path):
    size, most = 10_000, 1_000_000
    with PayloadFolder(folder, max_bytes=most) as one, PayloadFolder(folder, max_bytes=most) as other:
        with pytest.raises(PayloadFolderFull):
            fill([one, other], size)
        assert most - 2 * size <= one.measure() <= most + 2 * max(size, most // LOOKS)
        for payload_folder in (one, other, one):
            with pytest.raises(PayloadFolderFull):
                fill([payload_folder], size)
        one.delete(one.names()[:50])
        other.put("t1", b"x" * size)


def test_a_payload_that_can_never_fit_is_a_mistake_in_the_configuration(payload_folder: PayloadFolder):
    with pytest.raises(ConfigError, match=r"redis\.payloads"):
        payload_folder.put("t1", bytes(64 * MIB + 1))


def test_a_file_system_that_is_too_small_is_noticed_at_once(folder: Path):
    with pytest.raises(ConfigError, match=rf"redis\.payloads: {folder} is on a file system of"):
        PayloadFolder(folder, max_bytes=2**60)


def _write_too_much(folder: Path) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
    with PayloadFolder(folder, max_bytes=64 * MIB) as payload_folder, pytest.raises(BufferUnreachable, match=str(folder)):
        payload_folder.put("t1", bytes(2 * MIB))


def test_a_write_that_fails_leaves_no_file(payload_folder: PayloadFolder, folder: Path):
    writer = SPAWN.Process(target=_write_too_much, args=(folder,))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    assert payload_folder.names() == []


def _read_without_descriptors(folder: Path, found: bytes) -> None:
    with PayloadFolder(folder, max_bytes=MIB) as payload_folder:
        used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, used))
        with suppress(OSError):
            while True:
                os.dup(0)
        with pytest.raises(BufferUnreachable, match="Too many open files"):
            payload_folder.get(found)


def test_a_process_without_descriptors_does_not_blame_the_payload(payload_folder: PayloadFolder, folder: Path):
    reader = SPAWN.Process(target=_read_without_descriptors, args=(folder, payload_folder.put("t1", b"x")))
    reader.start()
    reader.join()
    assert reader.exitcode == 0


def test_a_folder_that_is_removed_or_replaced_is_noticed(payload_folder: PayloadFolder, folder: Path):
    found = payload_folder.put("t1", b"x")
    folder.rename(folder.with_name("old"))
    with PayloadFolder(folder, max_bytes=MIB) as successor:
        assert successor.token != payload_folder.token
        with pytest.raises(BadPayload, match="of this machine"):
            successor.get(found)
    assert bytes(payload_folder.get(found)) == b"x"
    payload_folder.delete(payload_folder.names())
    (folder.with_name("old") / "folder").unlink()
    folder.with_name("old").rmdir()
    with pytest.raises(BufferUnreachable, match="still there"):
        payload_folder.put("t2", b"x")


def _draw_token(folder: Path, answer: Path) -> None:
    with PayloadFolder(folder, max_bytes=MIB) as payload_folder:
        answer.write_bytes(payload_folder.token)


def test_processes_that_open_a_fresh_folder_at_once_agree(tmp_path: Path):
    processes = [SPAWN.Process(target=_draw_token, args=(tmp_path / "payloads", tmp_path / str(number))) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len({(tmp_path / str(number)).read_bytes() for number in range(4)}) == 1
    assert [path.name for path in (tmp_path / "payloads").iterdir()] == ["folder"]


def _open_to_others(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o750)


def _with_a_wrong_token(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "folder").write_text("something else")


@pytest.mark.parametrize(
    ("prepare", "complaint"),
    [
        (_open_to_others, "0700"),
        (_with_a_wrong_token, "remove"),
        (lambda folder: folder.write_text("a file"), "cannot be used"),
        (lambda folder: folder.symlink_to("/"), "cannot be used"),
    ],
)
def test_a_folder_that_cannot_be_trusted_is_one_sentence(folder: Path, prepare: Callable[[Path], object], complaint: str):
    prepare(folder)
    with pytest.raises(ConfigError, match=rf"redis\.payloads: {folder}.*{complaint}"):
        PayloadFolder(folder, max_bytes=MIB)
