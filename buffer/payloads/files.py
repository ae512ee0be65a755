"""Large payloads in files, for learner and workers on one machine (`redis.payloads`).

One file is one payload. It is written once, before anything refers to it, and never changed. Redis holds a reference of about
50 bytes in the payload's place, so the state machine is the same with and without files. The learner maps the file, and the
arrays of a group are views into the page cache: after the worker's write no byte is copied.

    worker:  put ──▶ file ── commit(reference) ──▶ READY … spent           learner:  take ──▶ reference ── get ──▶ map
    sweep:   names ── scripts/unwanted.lua: files that no ticket can refer to any more ──▶ delete

A crash leaves at worst a file that no ticket refers to. Its name contains its ticket: once that ticket can no longer be
committed, `unwanted` lists the file and the next sweep deletes it.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import secrets
import stat
import struct
import weakref
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from async_rl.durable.failpoints import define, failpoint
from async_rl.durable.whole_file import write_all
from async_rl.errors import BufferUnreachable, ConfigError
from async_rl.payloads.codec import MAX_BYTES, BadPayload

WORTH_A_FILE = 64 * 1024
"""Payloads of at least this many bytes go to files: below, a file costs more than Redis does."""
MAX_MAPS = 256
"""Each map keeps a file descriptor, usually limited to 1024; beyond this many, payloads are copied out of their files."""
LOOKS = 64
"""A writer measures the folder again after filling 1/LOOKS of the free room that it saw."""

_REFERENCE = struct.Struct("<4s16sI")
_MAGIC = b"ARLF"
_NAME = re.compile(r"t[0-9]{1,18}-[0-9a-f]{16}")
_TOKEN = re.compile(rb"[0-9a-f]{16}")
_TOKEN_FILE = "folder"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

define("payload_file.created", "payload_file.written")


class PayloadFolderFull(Exception):
    """There is no room for another file until some are deleted; nothing was written."""


class PayloadFolder:
    """The payload files of one run on one machine: `with PayloadFolder(folder, max_bytes=...) as payload_folder`.

    Processes share it without a lock: file names are unique, and deleting a deleted file is no error. Each writing process
    may exceed `max_bytes` by 1/64 of the free room, or by one payload.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        self.path = folder
        self._max_bytes = max_bytes
        self._unmeasured = 0
        """Bytes that may be written before the folder is measured again."""
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._descriptor = _open_folder(folder, max_bytes)
        self.token = _folder_token(self._descriptor, folder)
        """Drawn when the folder was made: tells it from one of the same name on another machine or of an earlier boot."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        os.close(self._descriptor)  # maps stay valid

    def put(self, ticket: str, payload: bytes) -> bytes:
        """Write a file and return the reference to it. Raises PayloadFolderFull."""
        if len(payload) > self._max_bytes:
            raise ConfigError(
                f"redis.payloads: a group of {len(payload)} bytes does not fit in {self.path}; raise redis.payloads_max_mb"
            )
        name = f"{ticket}-{secrets.token_hex(8)}"
        if not _NAME.fullmatch(name):
            raise BadPayload("its id is not that of a ticket")
        self._use_room(len(payload))
        with self._new_file(name) as descriptor:
            failpoint("payload_file.created")
            write_all(descriptor, payload)
        failpoint("payload_file.written")
        return _REFERENCE.pack(_MAGIC, self.token, len(payload)) + name.encode()

    def get(self, reference: bytes) -> memoryview | bytes:
        """Return the payload, mapped from the page cache; it stays valid when the file is deleted. Raises BadPayload."""
        name, length = self._read_reference(reference)
        with self._existing_file(name, length) as descriptor:
            if len(self._maps) >= MAX_MAPS:
                return os.pread(descriptor, length, 0)
            view = mmap.mmap(descriptor, length, prot=mmap.PROT_READ)
        self._maps.add(view)
        return memoryview(view)

    def names(self) -> list[str]:
        return [entry.name for entry in self._files()]

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            if _NAME.fullmatch(name):
                with suppress(FileNotFoundError):  # another process sweeps, too
                    os.unlink(name, dir_fd=self._descriptor)

    def measure(self) -> int:
        total = 0
        for entry in self._files():
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
        return total

    def _files(self) -> Iterator[os.DirEntry[str]]:
        """Yield the payload files; other files in the folder are left alone."""
        with os.scandir(self._descriptor) as entries:
            yield from (entry for entry in entries if _NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False))

    def _use_room(self, size: int) -> None:
        if size > self._unmeasured:
            room = self._max_bytes - self.measure()
            if size > room:
                self._unmeasured = 0
                raise PayloadFolderFull
            self._unmeasured = max(size, room // LOOKS)
        self._unmeasured -= size

    @contextmanager
    def _new_file(self, name: str) -> Generator[int]:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, 0o600, dir_fd=self._descriptor)
        except OSError as error:
            raise self._write_error(error) from error
        try:
            yield descriptor
        except OSError as error:
            self.delete([name])
            raise self._write_error(error) from error
        finally:
            os.close(descriptor)

    def _write_error(self, error: OSError) -> Exception:
        if error.errno in _FULL:
            return PayloadFolderFull()
        return BufferUnreachable(f"payloads cannot be written to {self.path} ({error.strerror}); is it still there?")

    def _read_reference(self, reference: bytes) -> tuple[str, int]:
        """Parse a reference; whatever it holds, it can only name a file of this folder. Raises BadPayload."""
        if not is_reference(reference) or len(reference) <= _REFERENCE.size:
            raise BadPayload("it is not a reference to a file")
        _, token, length = _REFERENCE.unpack_from(reference)
        name = reference[_REFERENCE.size :].decode("ascii", errors="replace")
        if not _NAME.fullmatch(name) or not 0 < length <= MAX_BYTES:
            raise BadPayload("its reference to a file is malformed")
        if token != self.token:
            raise BadPayload(f"its bytes are not in {self.path} of this machine: written elsewhere, or before a reboot")
        return name, length

    @contextmanager
    def _existing_file(self, name: str, length: int) -> Generator[int]:
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # refuse links, do not block on a pipe
            descriptor = os.open(name, flags, dir_fd=self._descriptor)
        except OSError as error:
            raise self._read_error(error) from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != length:
                raise BadPayload(f"its file in {self.path} should have {length} bytes and has {found.st_size}")
            yield descriptor
        except (OSError, ValueError) as error:  # a ValueError: it became shorter before it was mapped
            raise self._read_error(error) from error
        finally:
            os.close(descriptor)

    def _read_error(self, error: OSError | ValueError) -> Exception:
        reason = error.strerror if isinstance(error, OSError) else "it became shorter"
        if isinstance(error, OSError) and error.errno in _SHORTAGE:  # the payload is not at fault
            return BufferUnreachable(f"payloads cannot be read from {self.path} ({reason}); raise the limits of this process")
        return BadPayload(f"its payload cannot be read from {self.path} ({reason})")


def is_reference(payload: bytes) -> bool:
    return payload.startswith(_MAGIC)


def _open_folder(folder: Path, max_bytes: int) -> int:
    """Open the folder, which only this user may enter, and return its descriptor: a folder that replaces it is then noticed."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"redis.payloads: {folder} cannot be used ({error.strerror}); choose another folder") from error
    found, disk = os.fstat(descriptor), os.fstatvfs(descriptor)
    problem = ""
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        problem = "must belong to this user alone (mode 0700); remove it"
    elif (size := disk.f_blocks * disk.f_frsize) < max_bytes:  # a container's /dev/shm is often tiny
        problem = f"is on a file system of {size} bytes, but may hold {max_bytes}; lower redis.payloads_max_mb, or enlarge that"
    if problem:
        os.close(descriptor)
        raise ConfigError(f"redis.payloads: {folder} {problem}")
    return descriptor


def _folder_token(folder: int, path: Path) -> bytes:
    """Return the folder's token; the first process that opens the folder draws it."""
    try:
        token = _read_small_file(folder, _TOKEN_FILE)
    except FileNotFoundError:
        _draw_token(folder)
        token = _read_small_file(folder, _TOKEN_FILE)
    if not _TOKEN.fullmatch(token):
        os.close(folder)
        raise ConfigError(f"redis.payloads: {path / _TOKEN_FILE} is damaged; remove {path}")
    return token


def _draw_token(folder: int) -> None:
    draft = f".{secrets.token_hex(8)}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    os.write(descriptor, secrets.token_hex(8).encode())
    os.close(descriptor)
    with suppress(FileExistsError):  # another process was faster; a link appears whole or not at all
        os.link(draft, _TOKEN_FILE, src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink(draft, dir_fd=folder)


def _read_small_file(folder: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        return os.read(descriptor, 64)
    finally:
        os.close(descriptor)
