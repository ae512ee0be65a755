"""The archive returns each group once and unchanged, also from damaged files."""

from __future__ import annotations

import io
import json
import os
import random
import resource
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgpack
import numpy as np
import pytest
import xxhash

from async_rl.errors import ConfigError
from async_rl.payloads.codec import encode
from async_rl.types import Failure, Message, Rollout, RolloutGroup, Sample, SpentGroup, Status, Task, VersionSpan
from buffer.archive.open_segment import OpenSegment
from buffer.archive.reading import archive_stats, export_jsonl, find, read
from buffer.archive.segment import Damage, GroupSummary, file_header, files_in, load_index, record_head
from buffer.archive.writing import ArchiveWriter
from tests.support.repository import module_command, module_environment
from tests.support.waiting import PATIENCE_S

RECORD = struct.Struct("<4sIQQQ")


def rollout(length: int, reward: float, status: Status = Status.OK) -> Rollout:
    noise = np.random.default_rng(length)
    row = Sample(
        token_ids=noise.integers(0, 1000, length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        logprobs=-noise.random(length).astype(np.float32),
        versions=(VersionSpan(version=3, start=0, stop=1), VersionSpan(version=4, start=1, stop=length)),
    )
    failure = Failure(boundary="reward", kind="E", message="m") if status is Status.FAILED else None
    talk = (Message(role="user", content="ü?"), Message(role="assistant", content="\u2028!"))
    return Rollout(samples=(row,), reward=reward, status=status, failure=failure, conversation=talk)


def spent(number: int, *, length: int = 20, environment: str = "maze") -> SpentGroup:
    rollouts = (rollout(length, float(number)), rollout(length + 1, float(number) + 1))
    task = Task(key=f"k{number}", environment=environment, prompt="p", data={"size": 3})
    payload = encode(RolloutGroup(id=f"g{number}", task=task, rollouts=rollouts, worker="w"))
    return SpentGroup(id=f"g{number}", step=number // 2, payload=payload)


def writer(folder: Path, **changed) -> ArchiveWriter:
    return ArchiveWriter(folder, **({"run": "r", "max_gb": 1.0} | changed))


def archived(folder: Path, groups: Sequence[SpentGroup], **changed) -> None:
    with writer(folder, **changed) as opened:
        opened.append(groups)


def ids(folder: Path, **changed) -> list[str]:
    return [group.id for _, group in read(folder, **changed)]


def numbers(*wanted: int) -> list[str]:
    return [f"g{number}" for number in wanted]


# -- in and out ---------------------------------------------------------------------------------------------------------
def test_groups_come_back_as_they_were_in_the_order_in_which_they_went(tmp_path: Path):
    groups = [spent(number) for number in (5, 1, 9)]
    archived(tmp_path, groups[:2])
    archived(tmp_path, groups[2:])
    assert [(step, encode(group)) for step, group in read(tmp_path)] == [(group.step, group.payload) for group in groups]


def test_a_reader_may_choose_a_group(tmp_path: Path):
    archived(tmp_path, [spent(number) for number in range(6)])
    assert ids(tmp_path, group_id="g3") == numbers(3)
    found = find(tmp_path, "g3")
    assert found is not None
    assert (found[0], found[1].id) == (1, "g3")
    assert find(tmp_path, "g6") is None


def test_a_file_that_is_being_written_can_be_read(tmp_path: Path):
    with writer(tmp_path) as live:
        live.append([spent(0), spent(1)])
        assert ids(tmp_path) == numbers(0, 1)
        live.append([spent(2)])
        assert ids(tmp_path) == numbers(0, 1, 2)


def test_what_is_offered_again_is_not_written_again(tmp_path: Path):
    groups = [spent(number) for number in range(4)]
    with writer(tmp_path) as first:
        assert first.append([*groups[:2], groups[0]]) == 2
        assert first.append(groups[:3]) == 1
    with writer(tmp_path) as second:
        assert second.append(groups) == 1
    assert archive_stats(tmp_path).bytes < sum(len(group.payload) + 300 for group in groups)
    assert ids(tmp_path) == numbers(0, 1, 2, 3)


def test_a_group_that_was_written_twice_is_read_once_and_a_sound_copy_makes_up_for_a_damaged_one(tmp_path: Path):
    archived(tmp_path / "a", [spent(0), spent(1)])
    archived(tmp_path / "b", [spent(1), spent(0), spent(2)])
    (tmp_path / "b" / "groups-000001.arl").rename(tmp_path / "a" / "groups-000002.arl")
    assert ids(tmp_path / "a") == numbers(0, 1, 2)
    flip(tmp_path / "a" / "groups-000001.arl", record_offsets(tmp_path / "a")[0] + 200)
    damage: list[Damage] = []
    assert ids(tmp_path / "a", damage=damage) == numbers(1, 0, 2)
    assert len(damage) == 1


def test_bytes_that_are_no_group_are_kept_and_counted(tmp_path: Path):
    junk = SpentGroup(id="junk", step=7, payload=b"not a group")
    archived(tmp_path, [spent(0), junk, SpentGroup(id="empty", step=7, payload=b""), spent(1)])
    damage: list[Damage] = []
    assert ids(tmp_path, damage=damage) == numbers(0, 1)
    assert len(damage) == 2
    assert b"not a group" in (tmp_path / "groups-000001.arl").read_bytes()


def test_where_there_is_no_archive_a_sentence_says_so(tmp_path: Path):
    for look in (lambda: list(read(tmp_path / "none")), lambda: archive_stats(tmp_path / "none")):
        with pytest.raises(ConfigError, match=r"no archive in .*retention\.archive"):
            look()
    with writer(tmp_path / "begun"):
        assert not (tmp_path / "begun").exists()


# -- the format, as docs/archive.md describes it ------------------------------------------------------------------------
def read_by_the_book(data: bytes) -> Iterator[tuple[dict, bytes]]:
    """An independent reader of the format in docs/archive.md."""
    magic, version, _, length = struct.unpack_from("<4sHHI", data)
    assert (magic, version) == (b"ARLS", 1)
    assert xxhash.xxh3_64_intdigest(data[:12] + data[20 : 20 + length]) == struct.unpack_from("<Q", data, 12)[0]
    assert set(json.loads(data[20 : 20 + length])) == {"run", "created", "codec_schema"}
    at = 20 + length
    while at < len(data):
        magic, text_length, payload_length, checksum, seal = struct.unpack_from("<4sIQQQ", data, at)
        text = data[at + 32 : at + 32 + text_length]
        payload = data[at + 32 + text_length :][:payload_length]
        assert magic == b"ARLR"
        assert checksum == xxhash.xxh3_64_intdigest(payload)
        assert seal == xxhash.xxh3_64_intdigest(data[at : at + 24] + text, seed=at)
        yield json.loads(text), payload
        at += 32 + text_length + payload_length


def test_the_page_on_the_format_is_enough_to_read_it(tmp_path: Path):
    groups = [spent(number) for number in range(3)]
    archived(tmp_path, groups)
    found = list(read_by_the_book((tmp_path / "groups-000001.arl").read_bytes()))
    assert [payload for _, payload in found] == [group.payload for group in groups]
    facts = found[2][0]
    assert facts.pop("time") > 1.7e9
    assert facts == {"id": "g2", "step": 1, "environment": "maze", "tokens": 41, "reward": 2.5}
    index = (tmp_path / "groups-000001.idx").read_text()
    checksum, body = index.split("\n", 1)
    assert checksum == f"{xxhash.xxh3_64_intdigest(body.encode()):016x}"
    about, *lines = map(json.loads, body.splitlines())
    assert about == {"format": 1, "bytes": (tmp_path / "groups-000001.arl").stat().st_size, "damage": []}
    assert [line["offset"] for line in lines] == record_offsets(tmp_path)
    assert lines[2].items() >= facts.items()


def test_the_page_on_the_format_is_enough_to_read_a_payload(tmp_path: Path):
    archived(tmp_path, [spent(4)])
    ((_, payload),) = read_by_the_book((tmp_path / "groups-000001.arl").read_bytes())
    magic, schema, codec, flags, length, checksum = struct.unpack_from("<4sHBBIQ", payload)
    body = payload[20:]
    assert (magic, schema, codec, flags, length, checksum) == (b"ARLG", 2, 0, 0, len(body), xxhash.xxh3_64_intdigest(body))
    (count,) = struct.unpack_from("<I", body)
    tokens, logprobs = np.frombuffer(body, "<i4", count, 4), np.frombuffer(body, "<f4", count, 4 + 4 * count)
    assert set(body[4 + 8 * count : 4 + 9 * count]) == {1}
    group_id, task, rollouts, worker = msgpack.unpackb(body[4 + 9 * count :])
    assert (group_id, worker, task) == ("g4", "w", ["k4", "maze", "p", "", {"size": 3}])
    assert rollouts[1] == [[[21, [3, 0, 1, 4, 1, 21]]], 5.0, "ok", None, {}, {}, [["user", "ü?"], ["assistant", "\u2028!"]]]
    assert np.array_equal(tokens[20:], rollout(21, 0).samples[0].token_ids)
    assert np.array_equal(logprobs[:20], rollout(20, 0).samples[0].logprobs)


def test_a_file_of_another_format_is_refused_by_name(tmp_path: Path):
    archived(tmp_path, [spent(0)])
    path = tmp_path / "groups-000001.arl"
    start = struct.pack("<4sHHI", b"ARLS", 2, 0, 2)
    path.write_bytes(start + struct.pack("<Q", xxhash.xxh3_64_intdigest(start + b"{}")) + b"{}")
    with pytest.raises(ConfigError, match=r"groups-000001\.arl has archive format 2"):
        ids(tmp_path)
    with pytest.raises(ConfigError, match="update async_rl"):
        archived(tmp_path, [spent(1)])


# -- torn and damaged files ---------------------------------------------------------------------------------------------
def record_offsets(folder: Path) -> list[int]:
    data = (folder / "groups-000001.arl").read_bytes()
    at, offsets = 20 + struct.unpack_from("<I", data, 8)[0], []
    while at < len(data):
        offsets.append(at)
        _, text, payload, _, _ = RECORD.unpack_from(data, at)
        at += RECORD.size + text + payload
    return offsets


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x40]))


def test_wherever_the_last_record_is_torn_the_others_stay_and_it_may_come_again(tmp_path: Path):
    archived(tmp_path, [spent(number, length=2) for number in range(3)])
    path = tmp_path / "groups-000001.arl"
    whole, last = path.read_bytes(), record_offsets(tmp_path)[-1]
    for end in range(last, len(whole)):
        for index in tmp_path.glob("*.idx"):
            index.unlink()
        path.write_bytes(whole[:end])
        damage: list[Damage] = []
        assert ids(tmp_path, damage=damage) == numbers(0, 1)
        assert not damage
        with writer(tmp_path) as successor:
            assert successor.append([spent(number, length=2) for number in range(3)]) == 1
        assert path.stat().st_size == last
        assert ids(tmp_path) == numbers(0, 1, 2)
        (tmp_path / "groups-000002.arl").unlink()


def test_a_file_torn_in_its_header_leaves_nothing(tmp_path: Path):
    archived(tmp_path / "whole", [spent(0)])
    whole, first = (tmp_path / "whole" / "groups-000001.arl").read_bytes(), record_offsets(tmp_path / "whole")[0]
    for end in range(first + 1):
        torn = tmp_path / f"torn{end}"
        torn.mkdir()
        (torn / "groups-000001.arl").write_bytes(whole[:end])
        assert ids(torn) == []
        archived(torn, [spent(1)])
        assert ids(torn) == numbers(1)
        assert archive_stats(torn).files == 1


@pytest.mark.parametrize("indexed", [True, False])
def test_whichever_byte_of_a_record_changes_the_others_are_read_and_it_is_counted(tmp_path: Path, indexed: bool):
    archived(tmp_path, [spent(number, length=2) for number in range(3)])
    path, (_, second, third) = tmp_path / "groups-000001.arl", record_offsets(tmp_path)
    if not indexed:
        (tmp_path / "groups-000001.idx").unlink()
    for at in range(second, third):
        flip(path, at)
        damage: list[Damage] = []
        assert ids(tmp_path, damage=damage) == numbers(0, 2), at
        assert [(stretch.offset, stretch.length) for stretch in damage] == [(second, third - second)]
        flip(path, at)
    assert ids(tmp_path) == numbers(0, 1, 2)


def test_damage_stays_counted_after_the_file_is_indexed_again(tmp_path: Path):
    archived(tmp_path, [spent(number) for number in range(3)])
    flip(tmp_path / "groups-000001.arl", record_offsets(tmp_path)[1])
    (tmp_path / "groups-000001.idx").unlink()
    archived(tmp_path, [spent(3)])
    assert (tmp_path / "groups-000001.idx").exists()
    damage: list[Damage] = []
    assert ids(tmp_path, damage=damage) == numbers(0, 2, 3)
    assert len(damage) == archive_stats(tmp_path).damaged == 1


def test_whichever_byte_of_the_header_changes_the_records_are_read(tmp_path: Path):
    archived(tmp_path, [spent(0), spent(1)])
    (tmp_path / "groups-000001.idx").unlink()
    for at in range(record_offsets(tmp_path)[0]):
        flip(tmp_path / "groups-000001.arl", at)
        assert ids(tmp_path) == numbers(0, 1), at
        flip(tmp_path / "groups-000001.arl", at)


def test_a_record_inside_a_payload_is_not_taken_for_one(tmp_path: Path):
    archived(tmp_path / "inner", [spent(9)])
    trojan = SpentGroup(id="trojan", step=0, payload=(tmp_path / "inner" / "groups-000001.arl").read_bytes())
    archived(tmp_path, [spent(0), trojan, spent(1)])
    flip(tmp_path / "groups-000001.arl", record_offsets(tmp_path)[1])
    (tmp_path / "groups-000001.idx").unlink()
    assert ids(tmp_path) == numbers(0, 1)


@pytest.mark.parametrize("before", range(6))
def test_the_next_record_is_found_wherever_the_search_has_got_to(tmp_path: Path, before: int):
    """The search reads chunks of 1 MiB; the magic may span two of them."""

    def record(number: int, payload: bytes, offset: int) -> bytes:
        facts = GroupSummary(id=f"g{number}", step=0, time=1.0, environment="", tokens=0, reward=None)
        return record_head(facts, payload, offset) + payload

    start = file_header({})
    size = 2**20 + 1 - before - len(record(0, b"", len(start)))
    lost = record(0, bytes(size), len(start))
    found = record(1, spent(1).payload, len(start + lost))
    (tmp_path / "groups-000001.arl").write_bytes(start + b"?" + lost[1:] + found)
    assert ids(tmp_path) == numbers(1)


@pytest.mark.parametrize("spoil", ["gone", "empty", "flipped", "another's", "no JSON"])
def test_an_index_that_is_missing_or_wrong_is_made_again(tmp_path: Path, spoil: str):
    archived(tmp_path, [spent(0), spent(1)])
    archived(tmp_path, [spent(2)])
    index = tmp_path / "groups-000001.idx"
    sound = index.read_text()
    if spoil == "gone":
        index.unlink()
    elif spoil == "flipped":
        flip(index, len(sound) // 2)
    else:
        other = (tmp_path / "groups-000002.idx").read_text()
        index.write_text({"empty": "", "another's": other, "no JSON": f"{xxhash.xxh3_64_hexdigest(b'[')}\n["}[spoil])
    assert ids(tmp_path) == numbers(0, 1, 2)
    archived(tmp_path, [spent(0), spent(1), spent(3)])
    assert index.read_text() == sound
    assert ids(tmp_path) == numbers(0, 1, 2, 3)


def test_whatever_happens_to_a_file_only_sound_groups_come_out(tmp_path: Path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    groups = {f"g{number}": spent(number, length=draw.randint(2, 40)) for number in range(12)}
    archived(tmp_path, list(groups.values()))
    path = tmp_path / "groups-000001.arl"
    whole = path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 6)):
            at, length = draw.randrange(len(data)), draw.randint(1, 200)
            match draw.randrange(4):
                case 0:
                    data[at] ^= 1 << draw.randrange(8)
                case 1:
                    del data[at : at + length]
                case 2:
                    data[at:at] = draw.randbytes(length)
                case _:
                    data[at : at + length] = bytes(len(data[at : at + length]))
        path.write_bytes(data)
        for index in tmp_path.glob("*.idx"):
            if draw.random() < 0.7:
                index.unlink()
        assert all(encode(group) == groups[group.id].payload for _, group in read(tmp_path))
    before = set(ids(tmp_path))
    archived(tmp_path, list(groups.values()))
    assert set(ids(tmp_path)) == set(groups) >= before


# -- limits -------------------------------------------------------------------------------------------------------------
def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_files_end_at_their_size_and_a_group_that_is_larger_gets_one_of_its_own(tmp_path: Path):
    small, large = spent(1), spent(2, length=5000)
    size = 3 * len(small.payload) + 3 * 4096
    with writer(tmp_path, segment_bytes=size) as opened:
        opened.append([small, large, *[spent(number) for number in range(3, 20)]])
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.arl")}
    assert sizes.pop("groups-000002.arl") > size
    assert len(sizes) > 2
    assert max(sizes.values()) <= size
    assert ids(tmp_path) == numbers(*range(1, 20))


def test_the_oldest_files_go_before_the_limit_is_passed(tmp_path: Path):
    limit = 200_000
    with writer(tmp_path, max_gb=limit / 1e9) as opened:
        for number in range(0, 300, 3):
            opened.append([spent(inner, length=200) for inner in range(number, number + 3)])
            assert on_disk(tmp_path) <= limit
    kept = ids(tmp_path)
    assert kept == numbers(*range(300 - len(kept), 300))
    assert on_disk(tmp_path) > limit * 3 / 4


def test_a_smaller_limit_holds_from_the_next_start(tmp_path: Path):
    archived(tmp_path, [spent(number, length=200) for number in range(60)], max_gb=1e-3, segment_bytes=20_000)
    archived(tmp_path, [spent(60, length=200)], max_gb=1e-4)
    assert on_disk(tmp_path) <= 100_000
    assert ids(tmp_path)[-1] == "g60"


def test_files_that_are_too_old_go(tmp_path: Path):
    for number in range(3):
        archived(tmp_path, [spent(number)])
        last_week = (tmp_path / f"groups-{number + 1:06d}.arl").stat().st_mtime - 86400 * (7 - number)
        os.utime(tmp_path / f"groups-{number + 1:06d}.arl", (last_week, last_week))
    archived(tmp_path, [spent(3)], max_days=5.5)
    assert ids(tmp_path) == numbers(2, 3)
    assert {path.suffix for path in tmp_path.glob("groups-000001.*")} == set()


# -- trouble ------------------------------------------------------------------------------------------------------------
def test_a_writer_that_slept_beside_its_successor_spoils_nothing(tmp_path: Path):
    with writer(tmp_path) as sleeper:
        sleeper.append([spent(0), spent(1)])
        with writer(tmp_path) as successor:
            successor.append([spent(1), spent(2)])
            sleeper.append([spent(3)])
            successor.append([spent(4)])
    assert sorted(ids(tmp_path)) == numbers(0, 1, 2, 3, 4)
    assert archive_stats(tmp_path).damaged == 0


def test_writers_that_are_killed_at_random_lose_and_double_nothing(tmp_path: Path):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    lives = 40
    told = subprocess.run(
        module_command("tests.unit.buffer.archive_writers", tmp_path, seed, lives),
        env=module_environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    acknowledged = int(told.stdout)
    with writer(tmp_path) as last:
        rest = [SpentGroup(id=f"g{number}", step=number, payload=b"") for number in range(acknowledged, acknowledged + 10)]
        last.append(rest)
    found = [entry.summary.id for path in files_in(tmp_path) for entry in load_index(path).entries]
    assert found == numbers(*range(acknowledged + 10))
    assert acknowledged >= lives // 2
    assert archive_stats(tmp_path).damaged == 0


def test_a_file_that_was_only_just_begun_is_left_to_its_writer(tmp_path: Path):
    begun = OpenSegment(tmp_path)
    archived(tmp_path, [spent(1)])
    begun.describe({"run": "r"})
    begun.add(GroupSummary(id="g0", step=0, time=1.0, environment="", tokens=0, reward=None), spent(0).payload)
    archived(tmp_path, [spent(2)])
    begun.sync()
    begun.close()
    assert ids(tmp_path) == numbers(0, 1, 2)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Simulate a full disk: a part is written, then an error follows."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("room", [0, 10, 500, 1000, 4000])
def test_a_full_disk_is_an_error_and_costs_nothing_once_it_has_room(tmp_path: Path, room: int):
    groups = [spent(number) for number in range(12)]
    with writer(tmp_path) as opened:
        opened.append(groups[:2])
        full_at = (tmp_path / "groups-000001.arl").stat().st_size + room
        for _ in range(3):
            with files_of_at_most(full_at if room else 1), pytest.raises(OSError, match="File too large"):
                opened.append(groups)
        assert ids(tmp_path) == numbers(0, 1)
        assert opened.append(groups) == 10
    assert ids(tmp_path) == numbers(*range(12))
    assert archive_stats(tmp_path).damaged == 0


def test_a_folder_that_cannot_be_made_is_an_error_that_passes(tmp_path: Path):
    (tmp_path / "archive").write_text("in the way")
    with writer(tmp_path / "archive") as opened:
        with pytest.raises(OSError, match="archive"):
            opened.append([spent(0)])
        (tmp_path / "archive").unlink()
        assert opened.append([spent(0)]) == 1


# -- looking ------------------------------------------------------------------------------------------------------------
def test_stats_add_up(tmp_path: Path):
    archived(tmp_path, [spent(0), spent(3, environment="maze"), spent(8, environment="sums")])
    archived(tmp_path, [SpentGroup(id="junk", step=2, payload=b"")])
    stats = archive_stats(tmp_path)
    assert (stats.files, stats.groups, stats.tokens, stats.first_step, stats.last_step) == (2, 4, 123, 0, 4)
    assert stats.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.arl"))
    assert stats.since is not None
    assert stats.until is not None
    assert 1.7e9 < stats.since <= stats.until
    assert {name: (one.groups, one.tokens, one.reward) for name, one in stats.environments.items()} == {
        "": (1, 0, None),
        "maze": (2, 82, 2.0),
        "sums": (1, 41, 8.5),
    }


def test_every_rollout_becomes_a_line_of_strict_json(tmp_path: Path):
    failed = rollout(2, float("nan"), Status.FAILED)
    odd = Rollout(samples=rollout(3, 1.0).samples, reward=1.0, status=Status.OK, metrics={"x": float("inf"), "y": 2.0})
    task = Task(key="k", environment="maze", prompt=(Message(role="user", content="hi"),), answer="4", data={"size": 3})
    payload = encode(RolloutGroup(id="a", task=task, rollouts=(failed, odd), worker="w"))
    archived(tmp_path, [SpentGroup(id="a", step=3, payload=payload), spent(8)])

    stream = io.StringIO()
    exported = export_jsonl(tmp_path, stream, tokens=True)
    assert (exported.groups, exported.rollouts, exported.damage) == (2, 4, ())
    first, second, third, _ = [json.loads(line, parse_constant=pytest.fail) for line in stream.getvalue().splitlines()]
    assert (first["status"], first["reward"], first["failure"]) == (
        "failed",
        None,
        {"boundary": "reward", "kind": "E", "message": "m"},
    )
    assert second["task"] == {
        "key": "k",
        "environment": "maze",
        "prompt": [{"role": "user", "content": "hi"}],
        "answer": "4",
        "data": {"size": 3},
    }
    assert (second["group"], second["sibling"], second["step"], second["worker"]) == ("a", 1, 3, "w")
    assert (second["metrics"], second["reward"], second["sampled"]) == ({"x": None, "y": 2.0}, 1.0, 3)
    assert (third["oldest_version"], third["newest_version"]) == (3, 4)
    assert third["conversation"][1] == {"role": "assistant", "content": "\u2028!"}
    row = rollout(20, 0).samples[0]
    assert third["samples"][0]["token_ids"] == row.token_ids.tolist()
    assert np.array_equal(np.array(third["samples"][0]["logprobs"], np.float32), row.logprobs)
    assert third["samples"][0]["versions"] == [[3, 0, 1], [4, 1, 20]]

    short = io.StringIO()
    assert export_jsonl(tmp_path, short, tokens=False).rollouts == 4
    assert "samples" not in json.loads(short.getvalue().splitlines()[0])
