"""`async-rl buffer ...` on a real run: tables for people, JSON for programs."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from async_rl.config import CharacterTokenizer
from async_rl.errors import ConfigError
from async_rl.payloads.codec import encode
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import (
    Failure,
    Message,
    Rollout,
    RolloutGroup,
    Sample,
    SpentGroup,
    Status,
    Task,
    Ticket,
    VersionSpan,
    spans_of,
)
from buffer import keys
from buffer.__main__ import main
from buffer.archive.writing import ArchiveWriter
from buffer.redis_buffer import RedisBuffer
from buffer.server.client import Server
from buffer.server.users import ROLES
from tests.support.run_processes import finished_module
from tests.support.runs import publish, started
from tests.support.waiting import PATIENCE_S

TEXT = Characters(CharacterTokenizer().alphabet)
PROBABILITIES = (0.95, 0.04)
NAUGHTY = "\x1b[2J"
"""Clears the terminal that prints it."""

CONFIG = """
run: {{name: {name}, folder: {folder}}}
redis: {{url: "{url}", connect_timeout_s: 100}}
model: {{size: {{hidden: 8, layers: 1, heads: 1}}}}
environments: [{{type: even_digits}}]
batch: {{groups_per_step: 2}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The command line, pointed at one run."""

    url: str
    name: str
    config: Path

    def process(self, *words: object, code: int = 0, **environment: str) -> str:
        """Run the verb in a process of its own and return its output."""
        done = finished_module(self.config.parent, "buffer", *self._words(*words), environment={**os.environ, **environment})
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if code == 0 else done.stderr

    def __call__(self, *words: object, code: int = 0) -> str:
        """Run the verb in this process, which is faster."""
        with contextlib.redirect_stdout(io.StringIO()) as page:
            assert (main(self._words(*words)) or 0) == code
        return page.getvalue()

    def document(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))

    def mistake(self, *words: object) -> str:
        with pytest.raises(ConfigError) as caught:
            main(self._words(*words))
        return str(caught.value)

    def line(self, *words: object) -> list[str]:
        return [sys.executable, "-P", "-m", "buffer", *self._words(*words)]

    def _words(self, *words: object) -> list[str]:
        return [*map(str, words), "@", str(self.config)]

    def do(self, act: Callable[[RedisBuffer], Awaitable[Any]]) -> Any:
        async def opened() -> Any:
            server = Server(self.url, patience_s=100)
            try:
                return await act(RedisBuffer(server, self.name, learner_lease_s=600))
            finally:
                await server.close()

        return asyncio.run(opened())


@contextlib.contextmanager
def running(line: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def opened(url: str, name: str, folder: Path) -> Tools:
    config = folder / "config.yaml"
    config.write_text(CONFIG.format(name=name, folder=folder, url=url))
    return Tools(url=url, name=name, config=config)


@pytest.fixture
def tools(redis_server: str, run_name: str, tmp_path: Path) -> Tools:
    return opened(redis_server, f"tools-{run_name}", tmp_path)


@pytest.fixture(scope="module")
def filled(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """A run with a group in every place. Tests that use it only read."""
    tools = opened(redis_server, "tools-filled", tmp_path_factory.mktemp("filled"))
    tools.do(fill)
    return tools


async def fill(buffer: RedisBuffer) -> None:
    """0 and 1 are kept, 2 and 3 taken, 4 in quarantine, 5 reserved, 6 ready, 7 failed."""
    fence = await started(buffer, keep_steps=1)
    tickets = await buffer.reserve("w1", version=0, count=6, wait_s=5)
    for ticket in tickets[:4]:
        assert await buffer.commit("w1", rolled(ticket, environment="math" if ticket.task_index % 2 else "shapes")) == "stored"
    await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=5)
    assert await buffer.commit("w1", rolled(tickets[4], versions=(0, 5))) == "quarantined"
    await publish(buffer, fence)
    await buffer.release(fence, 1)
    await buffer.checkpoint(fence, 1)
    await buffer.take(fence, step=2, version=1, num_groups=2, wait_s=5, patient=False)
    tickets = await buffer.reserve("w2", version=1, count=2, wait_s=5)
    assert await buffer.commit("w2", rolled(tickets[0])) == "stored"
    await buffer.abandon("w2", tickets[1].id, "failed")


def rolled(ticket: Ticket, *, environment: str = "math", versions: tuple[int, int] | None = None) -> RolloutGroup:
    """One good rollout, one that clears the screen, and one that failed."""
    sampled = versions if versions is not None else (ticket.version, ticket.version)
    right = said("3", 1.0, sampled)
    wrong = said("4", 0.0, sampled, shown=f"4{NAUGHTY}")
    broken = replace(right, status=Status.FAILED, failure=Failure(boundary="environment", kind="TimeoutError", message="slow"))
    return RolloutGroup(
        id=ticket.id,
        task=Task(key=f"k{ticket.task_index}", environment=environment, prompt="1+2=", answer="3"),
        rollouts=(right, wrong, broken),
        worker="w",
    )


def said(answer: str, reward: float, versions: tuple[int, int], shown: str = "") -> Rollout:
    given, sampled = TEXT.render("1+2="), [*TEXT.encode(answer), TEXT.end_id]
    mask = np.array([0] * len(given) + [1] * len(sampled), np.uint8)
    logprobs = np.concatenate([np.zeros(len(given)), np.log(PROBABILITIES)]).astype(np.float32)
    row = Sample(
        token_ids=np.array(given + sampled, np.int32),
        loss_mask=mask,
        logprobs=logprobs,
        versions=spans_of(versions, offset=len(given)),
    )
    conversation = (Message(role="user", content="1+2="), Message(role="assistant", content=shown if shown else answer))
    parts = {"correct": reward, "brief": 0.0}
    return Rollout(samples=(row,), reward=reward, status=Status.OK, reward_parts=parts, conversation=conversation)


# -- reading --------------------------------------------------------------------------------------------------------
def test_stats_are_for_people_and_programs(filled: Tools) -> None:
    page = filled.process("stats")
    assert re.search(r"^reserved +1$", page, re.M)
    assert re.search(r"^ready +1  age 0: 1$", page, re.M)
    assert re.search(r"^slots +6  4 used$", page, re.M)
    assert re.search(r"^dropped +1  failed: 1$", page, re.M)
    assert re.search(r"^math +3 +\d+ +\S+ KiB +1 +1 ", page, re.M), "stored 3, spent 1, quarantined 1"
    document = filled.document("stats", "--over", 0.1)
    assert (document["issued"], document["environments"]["shapes"]["spent"]) == (8, 1)
    assert document["per_second"] == {"stored": 0, "spent": 0, "tokens": 0, "bytes": 0}


def test_stats_say_what_the_learner_waits_for(tools: Tools) -> None:
    async def hungry(buffer: RedisBuffer) -> None:
        fence = await started(buffer)
        (ticket, *_) = await buffer.reserve("w", version=0, count=2, wait_s=5)
        await buffer.commit("w", rolled(ticket))
        assert await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=0) == []
        await buffer.hold(fence)

    tools.do(hungry)
    document = tools.document("stats")
    assert (document["learner"], document["wanted"]) == ("learner", 2)
    assert document["waits_for"] == "learner: waits for 2 groups, 1 are ready, 1 in flight"


def test_watching_ends_with_ctrl_c(filled: Tools) -> None:
    with running(filled.line("stats", "--watch", "--json")) as watch:
        assert watch.stdout is not None
        first, second = json.loads(watch.stdout.readline()), json.loads(watch.stdout.readline())
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_S) == 0
    assert (first["per_second"]["stored"], second["per_second"]["stored"]) == (None, 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), [0, 1, 2, 3, 5, 6]),
        (("--state", "taken"), [2, 3]),
        (("--environment", "shapes"), [0, 2]),
        (("--worker", "w2"), [6]),
        (("--older-than", 1), [0, 1, 2, 3, 5]),
        (("--older-than", 1, "--environment", "math", "--state=taken"), [3]),
        (("--limit", 2), [0, 1]),
        (("--state", "again"), []),
    ],
)
def test_ls_chooses(filled: Tools, words: tuple[object, ...], expected: list[int]) -> None:
    document = filled.document("ls", *words)
    assert [row["id"] for row in document["groups"]] == [keys.ticket_id(number) for number in expected]
    assert document["others"] == (4 if "--limit" in words else 0)


def test_ls_is_a_table(filled: Tools) -> None:
    head, *rows = filled.process("ls").splitlines()
    assert " ".join(head.split()) == "id state environment worker attempt oldest version age tokens steps bytes"
    cells = [row.split() for row in rows]
    assert cells[2][:6] == ["t000000002", "taken", "shapes", "w1", "1", "0"]
    assert cells[4][:4] == ["t000000005", "reserved", "-", "w1"]
    assert filled("ls", "--limit", 1).splitlines()[-1] == "and about 5 more: --limit shows them"
    assert filled("ls", "--state", "again") == "no group matches\n"


def test_show_tells_the_whole_story(filled: Tools) -> None:
    page = filled("show", 3)
    assert page.startswith("t000000003: taken for step 2\nenvironment math, worker w1, attempt 1, oldest version 0, age 1,")
    assert "task k3 of math: 1+2=\nanswer: 3\n" in page
    table = [line.split() for line in page.splitlines() if line.lstrip()[:1].isdigit()]
    assert table[0] == ["0", "ok", "1", "0", "1", "2", "0", "0.495", "0.04", "3"]
    assert table[2][:5] == ["2", "failed", "-", "0", "1"], "a failed rollout has no reward"
    assert "TimeoutError: slow" in page
    conversation = filled.process("show", "t3", "--rollout", 1)
    assert "rollout 1: ok, reward 0 (correct 0 + brief 0)\nuser:\n1+2=\nassistant:\n4␛[2J\n" in conversation
    assert "\x1b" not in conversation, "what a model says is shown, never obeyed"


def test_show_annotates_tokens_with_probabilities_and_versions(filled: Tools) -> None:
    rows = [line.split() for line in filled("show", 4, "--rollout", 0, "--tokens").splitlines()]
    assert ["5", "7", '"3"', "0.95", "0"] in rows, "position, id, text, probability, version"
    assert ["6", "2", '""', "0.04", "5"] in rows
    assert ["1", "5", '"1"', "-", "-"] in rows, "the prompt was not sampled"
    coloured = filled.process("show", 4, "--rollout", 0, "--tokens", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[2m1\x1b[0m" in coloured, "the prompt is dim"
    assert "\x1b[7m⟨v0⟩\x1b[0m\x1b[32m3\x1b[0m\x1b[7m⟨v5⟩\x1b[0m\x1b[31m<2>\x1b[0m" in coloured
    document = filled.document("show", 4, "--rollout", 0, "--tokens")
    ((*_, last),) = document["rollouts"][0]["samples"]
    assert (last["position"], last["version"], round(last["probability"], 3)) == (6, 5, 0.04)


@pytest.mark.parametrize(
    ("ticket", "sentence"),
    [
        ("0", "t000000000: spent in step 1, and still kept"),
        ("4", "t000000004: quarantined, because its newest token is of version 5, above the live version 0"),
        ("5", "t000000005: worker w1 is rolling it out"),
        ("7", "t000000007: its worker lost it or handed it back, and its task was rolled again"),
    ],
)
def test_show_knows_every_ticket(filled: Tools, ticket: str, sentence: str) -> None:
    document = filled.document("show", ticket)
    assert f"{document['id']}: {document['says']}" == sentence


def test_a_mistake_ends_the_process_with_code_2(filled: Tools) -> None:
    assert (
        filled.process("show", "x7", code=2)
        == "buffer: 'x7' is not the id of a group; ids look like t000000007, or 7 for short\n"
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("ls", "--stat", "ready"), "has no option --stat; did you mean --state?"),
        (("ls", "--state", "readyy"), "choose one of reserved, ready, again, taken, kept"),
        (("ls", "--limit", "many"), "--limit 'many' is not a number"),
        (("ls", "--state"), "--state needs a value: --state STATE"),
        (("ls", "--json=yes"), "--json is a switch"),
        (("show",), "buffer show needs ID"),
        (("show", "99"), "t000000099 was never issued; the last one was t000000007"),
        (("show", "3", "--rollout", "7"), "t000000003 has no rollout 7; it has 3, counted from 0"),
        (("stats", "7"), "takes no operand '7'"),
        (("shov", "7"), "did you mean `async-rl buffer show`?"),
        (("quarantine", "releasing", "7"), "did you mean `async-rl buffer quarantine release`?"),
        (("quarantine", "show", "3"), "t000000003 is not in quarantine; did you mean t000000004?"),
        (("limits", "staleness.max_ages=3"), "did you mean staleness.max_age?"),
        (("limits", "staleness.max_age=-1"), "staleness.max_age"),
        (("limits", "staleness.max_age"), "staleness.max_age needs a value"),
        (("archive", "ls"), "there is no archive in"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_one_sentence(filled: Tools, words: tuple[str, ...], sentence: str) -> None:
    said = filled.mistake(*words)
    assert sentence in said
    assert len(said.splitlines()) == 1


def test_a_reader_that_has_seen_enough_is_no_error(filled: Tools) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(filled.line("ls"), stdout=theirs, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
    os.close(theirs)
    assert done.stderr == ""


# -- changing -------------------------------------------------------------------------------------------------------
def test_the_quarantine_is_worked_through(tools: Tools) -> None:
    async def refuse_three(buffer: RedisBuffer) -> int:
        fence = await started(buffer)
        tickets = await buffer.reserve("w", version=0, count=3, wait_s=5)
        for ticket, newest in zip(tickets, (1, 9, 9), strict=True):
            assert await buffer.commit("w", rolled(ticket, versions=(0, newest))) == "quarantined"
        return fence

    fence = tools.do(refuse_three)
    head, *rows = tools("quarantine", "ls").splitlines()
    assert head.split() == ["id", "when", "environment", "worker", "size", "reason"]
    assert all("above the live version 0" in row and " math " in row for row in rows)
    assert {row.split()[0] for row in rows} == {"t000000000", "t000000001", "t000000002"}
    assert "task k0 of math" in tools("quarantine", "show", 0)
    assert "stays in quarantine: its newest token is above" in tools("quarantine", "release", 0, code=1)
    tools.do(lambda buffer: publish(buffer, fence))
    assert tools.document("quarantine", "release", 0) == {"id": "t000000000", "released": True, "answer": "stored"}
    assert [row["id"] for row in tools.document("ls", "--state", "ready")["groups"]] == ["t000000000"]
    assert tools("quarantine", "forget", 1, 2) == "forgotten: t000000001, t000000002\n"
    assert tools("quarantine", "ls") == "nothing is in quarantine\n"
    assert tools.document("audit")["clean"]


def test_a_refused_group_is_shown_whatever_it_holds(tools: Tools) -> None:
    """A checksum proves that nothing changed in transit; the content may still be invalid."""
    tools.do(fill)
    whole = rolled(Ticket(id=keys.ticket_id(4), task_index=4, version=0, attempt=1))
    row = whole.rollouts[0].samples[0]
    rows = (
        replace(row, logprobs=np.full(len(row), np.float32(1e9))),
        replace(row, logprobs=np.full(len(row), np.float32(np.nan))),
        replace(row, token_ids=np.array([-7, 2**31 - 1, 5, 5, 5, 5, 5], np.int32)),
        replace(row, versions=(VersionSpan(version=3, start=5, stop=2**60), VersionSpan(version=4, start=-9, stop=-(2**60)))),
        replace(row, versions=()),
    )
    rollouts = tuple(replace(whole.rollouts[0], samples=(odd,), reward=math.nan) for odd in rows)
    with Redis.from_url(tools.url) as redis:
        redis.hset(keys.key(tools.name, "quarantine_payloads"), whole.id, encode(replace(whole, rollouts=rollouts)))
        shown = tools("quarantine", "show", 4, "--tokens")
        coloured = tools.process("quarantine", "show", 4, "--tokens", FORCE_COLOR="1", TERM="xterm-256color")
        assert shown.count("position") == len(rows)
        assert "<2147483647>" in shown
        assert "⟨v3⟩" in coloured
        assert tools.document("show", 4, "--tokens")["rollouts"][0]["reward"] is None
        redis.hset(keys.key(tools.name, "quarantine_payloads"), whole.id, b"garbage" * 10)
        assert "its payload of 70 bytes cannot be read: it does not begin with a group's magic bytes" in tools("show", 4)


def test_limits_change_while_the_run_goes_on_and_for_later_learners(tools: Tools) -> None:
    async def run(buffer: RedisBuffer) -> None:
        await buffer.resign(await started(buffer))

    assert "no learner has set the limits yet" in tools("limits")
    tools.do(run)
    assert tools.document("limits")["limits"]["max_age"] == 2
    page = tools("limits", "staleness.max_age=4", "leases.ticket_s=7.5")
    assert re.search(r"^staleness.max_age +4", page, re.M)
    assert "10 slots" in page
    tools.do(run)
    changed = tools.document("limits")["limits"]
    assert (changed["max_age"], changed["lease_s"], changed["max_attempts"]) == (4, 7.5, 2)


def test_the_pace_changes_while_the_run_goes_on(tools: Tools) -> None:
    async def run(buffer: RedisBuffer) -> None:
        await buffer.resign(await started(buffer))

    tools.do(run)
    assert re.search(r"^staleness.pace +full +auto", tools("limits", "staleness.pace=full"), re.M)
    assert "6 slots" in tools("limits")
    assert "4 slots" in tools("limits", "staleness.pace=2")
    assert "staleness.pace" in tools.mistake("limits", "staleness.pace=fast")
    assert "4 slots" in tools("limits", "staleness.pace=auto"), "until the learner's next step"
    tools.config.write_text(tools.config.read_text() + "staleness: {pace: 1.5}\n")
    assert "does not find a pace: its staleness.pace is 1.5" in tools.mistake("limits", "staleness.pace=auto")


@pytest.mark.parametrize("fault", ["payload", "record"])
def test_books_that_do_not_balance(tools: Tools, fault: str) -> None:
    tools.do(fill)
    assert tools("audit").splitlines()[-1] == "clean: every ticket is in exactly one place"
    with Redis.from_url(tools.url) as redis:
        if fault == "payload":
            redis.hdel(keys.key(tools.name, "payloads"), "t000000006")
        else:
            redis.hset(keys.key(tools.name, "records"), "t000000077", "garbage")
    page = tools("audit", code=1)
    assert "PROBLEM: 1 tickets are" in page
    assert tools.document("audit", code=1)["clean"] is False
    assert "nothing was freed" in tools("vacuum", code=1)
    if fault == "payload":
        assert "ready for the learner; its payload is missing" in tools("show", 6)
    else:
        assert "1 records are unreadable" in tools("ls")
        assert "t000000077: the record of a ticket is unreadable" in tools.mistake("show", 77)


def test_tail_follows_what_happens(tools: Tools) -> None:
    fence = tools.do(started)
    with running(tools.line("tail")) as page, running(tools.line("tail", "--json", "--environment", "shapes")) as program:
        for follower in (page, program):
            assert follower.stderr is not None
            assert "Ctrl-C ends it" in follower.stderr.readline()

        async def work(buffer: RedisBuffer) -> None:
            math, refused, shapes, failed = await buffer.reserve("w1", version=0, count=4, wait_s=5)
            await buffer.commit("w1", rolled(math))
            await buffer.commit("w1", rolled(refused, versions=(0, 9)))
            await buffer.abandon("w1", failed.id, "failed")
            await buffer.commit("w1", rolled(shapes, environment="shapes"))
            assert await buffer.take(fence, step=1, version=0, num_groups=2, wait_s=5)

        tools.do(work)
        assert page.stdout is not None
        assert program.stdout is not None
        lines = [page.stdout.readline().split(maxsplit=1)[1] for _ in range(4)]
        story = json.loads(program.stdout.readline())
        for follower in (page, program):
            follower.send_signal(signal.SIGINT)
            assert follower.wait(PATIENCE_S) == 0
    assert re.match(r"stored +t000000000  math +reward 0.500 ± 0.500  3 rollouts, 6 tokens  version 0  by w", lines[0])
    assert re.match(r"quarantined +t000000001  environment math  worker w1  its newest token is of version 9", lines[1])
    assert lines[2].split() == ["dropped:failed", "t000000003"]
    assert (story["event"], story["id"], story["environment"]) == ("stored", "t000000002", "shapes")
    assert (story["reward_mean"], story["tokens"], story["versions"]) == (0.5, 6, "0")


def test_the_archive_is_listed_exported_and_shown(tools: Tools, tmp_path: Path) -> None:
    group = rolled(Ticket(id=keys.ticket_id(3), task_index=3, version=0, attempt=1))
    writer = ArchiveWriter(tmp_path / tools.name / "archive", run=tools.name, max_gb=1.0)
    writer.append([SpentGroup(id=group.id, step=8, payload=encode(group))])
    writer.close()
    page = tools("archive", "ls")
    assert page.startswith("1 groups of steps 8 to 8 in 1 files, ")
    assert re.search(r"^math +1 +6 +0.5$", page, re.M)
    assert tools.document("archive", "ls")["environments"]["math"]["groups"] == 1
    rows = [json.loads(line) for line in tools.process("archive", "export").splitlines()]
    assert [(row["sibling"], row["reward"]) for row in rows] == [(0, 1.0), (1, 0.0), (2, None)]
    file = tmp_path / "rollouts.jsonl"
    assert "3 rollouts of 1 groups are in" in tools("archive", "export", "--out", file, "--tokens")
    assert "samples" in json.loads(file.read_text().splitlines()[0])
    assert "t000000003: spent in step 8, from the archive" in tools("show", 3)
    assert "archive export" in tools.mistake("archive", "exprt")


def test_users_are_made_and_the_monitor_can_look(tools: Tools) -> None:
    tools.do(fill)
    assert "has no users" in tools("users", "ls")
    page = tools("users", "create")
    assert [line.split()[:2] for line in page.splitlines()[1:5]] == [[role, f"{tools.name}-{role}"] for role in ROLES]
    listed = tools("users", "ls")
    assert all(f"{tools.name}-{role}" in listed for role in ROLES)
    assert "#" not in listed, "not even a hash of the password"
    password = tools.config.parent / tools.name / "users" / "monitor.password"
    assert password.stat().st_mode & 0o777 == 0o600
    monitor = ("--redis.user", f"{tools.name}-monitor", "--redis.password_file", password)
    for looking in (("ls",), ("show", 3), ("show", 4), ("quarantine", "ls"), ("limits",), ("stats",), ("audit",)):
        assert tools.document(*looking, *monitor)
    for changing in (("users", "create"), ("quarantine", "forget", 4), ("limits", "staleness.max_age=4")):
        assert "does not let its user do this" in tools.mistake(*changing, *monitor)


# -- erasing --------------------------------------------------------------------------------------------------------
def test_only_an_ended_run_is_erased_and_only_its_own_keys(tools: Tools) -> None:
    other = replace(tools, name=f"{tools.name}-other")
    fence = tools.do(started)
    other.do(started)
    assert "give its name exactly" in tools.mistake("erase", other.name)
    assert "learner holds it; stop it first" in tools.mistake("erase", tools.name)
    tools.do(lambda buffer: buffer.resign(fence))
    assert f"keys of run '{tools.name}' are deleted" in tools("erase", tools.name)
    with Redis.from_url(tools.url) as server:
        assert not list(server.scan_iter(match=keys.key(tools.name, "*")))
        assert list(server.scan_iter(match=keys.key(other.name, "*")))
