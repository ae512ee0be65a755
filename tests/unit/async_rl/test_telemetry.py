"""Where metrics go, what survives a crash, and that no sink can hold up a step."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import pty
import random
import socket
import subprocess
import sys
import threading
import tracemalloc
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest
import structlog
from rich.console import Console

from async_rl.config import Config
from async_rl.durable import failpoints
from async_rl.errors import ConfigError
from async_rl.telemetry import METRICS, Sinks, UnknownMetric, find_metric, open_sinks, read_last_row, read_rows
from async_rl.telemetry.console import LivePanel, StepLines, sparkline
from async_rl.telemetry.rows import JsonlSink
from async_rl.telemetry.sinks.writer_thread import WriterThread
from async_rl.telemetry.warning_file import MOST_BYTES, WarningFile, read_warnings
from tests.support.private_fleet import free_port
from tests.support.waiting import PATIENCE_S


def config(folder: Path, **metrics: object) -> Config:
    return Config.model_validate(
        {
            "run": {"name": "here", "folder": folder},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 4}},
            "environments": [{"type": "counting"}],
            "metrics": {"console": False, **metrics},
        }
    )


# -- the table ------------------------------------------------------------------------------------------------------


def test_every_name_is_explained_once() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(metric.help and "/" in metric.name for metric in METRICS)


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/counting/mean", "reward/{environment}/mean"),
        ("staleness/age_3", "staleness/age_{age}"),
        ("reward/a/b/mean", None),
        ("reward", None),
    ],
)
def test_names_find_their_row(name: str, row: str | None) -> None:
    found = find_metric(name)
    assert (found.name if found is not None else None) == row


def test_an_unknown_name_is_a_warning_and_so_an_error_here(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path)) as sinks, pytest.raises(UnknownMetric, match="reward/men"):
        sinks.log(1, {"reward/men": 1.0})


# -- metrics.jsonl --------------------------------------------------------------------------------------------------


def rows_of(folder: Path) -> dict[int, Mapping[str, float]]:
    return {row.step: row.values for row in read_rows(folder / "here" / "metrics.jsonl")}


def test_rows_of_a_step_add_up(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path)) as sinks:
        sinks.log(1, {"reward/mean": 0.5, "optim/lr": 1e-3})
        sinks.log(1, {"reward/mean": 0.25, "weights/push_s": 2})
        sinks.log(2, {"reward/mean": math.nan, "reward/std": math.inf})
    assert rows_of(tmp_path) == {1: {"reward/mean": 0.25, "optim/lr": 1e-3, "weights/push_s": 2}, 2: {}}


def test_steps_that_are_trained_again_replace_the_lost_ones(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path)) as sinks:
        for step in (1, 2, 3, 4):
            sinks.log(step, {"reward/mean": step, "policy/ess": 1})
    with open_sinks(config(tmp_path), resumed_after=2) as sinks:
        sinks.log(3, {"reward/mean": 30})
    assert rows_of(tmp_path) == {
        1: {"reward/mean": 1, "policy/ess": 1},
        2: {"reward/mean": 2, "policy/ess": 1},
        3: {"reward/mean": 30},
    }


def test_a_row_that_a_crash_cut_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resumed_after=0, max_bytes=10**6)
    for step in (1, 2, 3):
        sink.log(step, {"reward/mean": step, "policy/ess": 1})
    sink.close()
    path.write_bytes(path.read_bytes()[:-9])
    sink = JsonlSink(path, resumed_after=1, max_bytes=10**6)
    sink.log(2, {"reward/mean": 20})
    sink.close()
    rows = [(row.step, row.values) for row in read_rows(path)]
    assert rows == [(1, {"reward/mean": 1, "policy/ess": 1}), (2, {"reward/mean": 20})]


def test_a_row_is_on_its_way_before_log_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resumed_after=0, max_bytes=10**6)
    sink.log(7, {"reward/mean": 1})
    assert [row.step for row in read_rows(tmp_path / "metrics.jsonl")] == [7]
    sink.close()


def test_a_full_disk_costs_rows_and_says_how_many(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path)) as sinks:
        sinks.log(1, {"reward/mean": 1})
        sinks.log(2, {"reward/mean": 2})
    failpoints.arm("append.metrics.jsonl:1-3=ENOSPC")  # the mark of the resume, and the mark again before each of two rows
    try:
        with open_sinks(config(tmp_path), resumed_after=1) as sinks:
            for step in (2, 3, 4):
                sinks.log(step, {"reward/mean": 10 * step})
    finally:
        failpoints.arm("")
    assert rows_of(tmp_path) == {1: {"reward/mean": 1}, 4: {"reward/mean": 40, "metrics/dropped": 2}}


def test_rows_are_read_across_the_two_files(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path, resumed_after=0, max_bytes=4000)
    for step in range(1, 41):
        sink.log(step, {"reward/mean": step})
    sink.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 4000
    assert len(list(tmp_path.iterdir())) == 2
    steps = [row.step for row in read_rows(path)]
    assert steps == list(range(41 - len(steps), 41))
    sink = JsonlSink(path, resumed_after=35, max_bytes=4000)
    sink.close()
    assert read_rows(path)[-1].step == 35


def test_the_last_row_is_that_of_all_rows_whatever_resumes_came_before(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    for life in range(60):
        path, step = tmp_path / str(life) / "metrics.jsonl", 0
        path.parent.mkdir()
        for _ in range(draw.randint(1, 6)):
            sink = JsonlSink(path, resumed_after=(step := draw.randint(0, step)), max_bytes=draw.choice([3000, 10**9]))
            for _ in range(draw.randint(0, 30)):
                step += draw.random() < 0.8
                sink.log(step, {f"reward/{draw.choice('ab')}/mean": draw.random(), "x" * draw.choice([1, 200]): 1})
            sink.close()
            rows = read_rows(path)
            assert read_last_row(path) == (rows[-1] if rows else None)
            with path.open("a") as file:
                file.write('{"another": "writer"}\n')
            assert read_last_row(path) == (rows[-1] if rows else None)


def test_the_last_row_costs_the_same_whatever_the_length_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "time": 0.0, "reward/mean": {step}}}\n' for step in range(100_000)))
    tracemalloc.start()
    last = read_last_row(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert last is not None
    assert last.step == 99_999
    assert most < 2**20


# -- the writer's thread --------------------------------------------------------------------------------------------


class SlowSink:
    """Stands still at its first row until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.reached.set()
        self.let_go.wait()
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_a_slow_writer_loses_the_oldest_rows_and_never_blocks() -> None:
    slow = SlowSink()
    writer = WriterThread("slow", slow, capacity=3)
    writer.log(0, {})
    slow.reached.wait()
    for step in range(1, 10):
        writer.log(step, {})
    assert writer.dropped == 6
    slow.let_go.set()
    writer.close()
    assert slow.steps[0] == 0
    assert slow.steps[-2:] == [8, 9]
    assert slow.closed


def test_a_writer_that_breaks_does_not_break_the_run() -> None:
    class Breaks(SlowSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise OSError("no route")

    writer = WriterThread("breaks", Breaks(), capacity=2)
    for step in range(100):
        writer.log(step, {})
    writer.close()


# -- the other sinks ------------------------------------------------------------------------------------------------


def test_prometheus_serves_the_newest_values(tmp_path: Path) -> None:
    port = free_port()
    with open_sinks(config(tmp_path, prometheus_port=port)) as sinks:
        sinks.log(1, {"reward/mean": 0.5, "buffer/bytes": 10})
        sinks.log(2, {"reward/mean": 0.75})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    assert 'async_rl_reward_mean{run="here"} 0.75' in text
    assert 'async_rl_buffer_bytes{run="here"} 10.0' in text
    assert "# HELP async_rl_buffer_bytes size of stored payloads [bytes]" in text


def test_prometheus_answers_beyond_this_machine_only_whoever_brings_the_token(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Prometheus would serve unauthenticated requests on 0\.0\.0\.0: set metrics"):
        open_sinks(config(tmp_path, prometheus_port=free_port(), prometheus_host="0.0.0.0"))
    (tmp_path / "token").write_text("secret\n")
    port = free_port()
    settings = {"prometheus_port": port, "prometheus_host": "0.0.0.0", "prometheus_token_file": tmp_path / "token"}
    with open_sinks(config(tmp_path, **settings)), socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(b"GET /met")  # and no more: others are answered meanwhile
        for authorization in ("", "Bearer other"):
            request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": authorization})
            with pytest.raises(urllib.error.HTTPError, match="401") as refusal:
                urllib.request.urlopen(request)
            refusal.value.close()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200
        silent.shutdown(socket.SHUT_RDWR)
    with open_sinks(config(tmp_path, prometheus_port=free_port(), prometheus_host="0.0.0.0", prometheus_insecure=True)):
        pass


def test_a_taken_port_is_a_sentence(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"metrics\.prometheus_port: cannot listen on"):
            open_sinks(config(tmp_path, prometheus_port=taken.getsockname()[1]))


def test_a_line_per_step_where_there_is_no_terminal() -> None:
    console = Console(width=40, record=True, force_terminal=False, file=open_null())
    StepLines(console, steps=9).log(3, {"reward/mean": 0.5, "staleness/mean": 1.25, "perf/tok_s": 12345})
    assert console.export_text() == "step 3/9  reward 0.500  age 1.25  tok/s 12,345\n"


def test_step_lines_say_how_long_it_takes_and_what_an_evaluation_found() -> None:
    console = Console(width=40, record=True, force_terminal=False, file=open_null())
    lines = StepLines(console, steps=9)
    for step, wall_s in ((5, 100.0), (6, 110.0), (8, 136.0)):
        lines.log(step, {"reward/mean": 0.5, "rollout/reward": 0.25, "progress/wall_s": wall_s})
    lines.log(8, {"eval/step": 4, "eval/e/tasks": 3, "eval/e/pass@1": 0.5, "eval/e/pass@1_low": 0.1, "eval/e/pass@1_high": 0.9})
    assert console.export_text().splitlines() == [
        "step 5/9  reward 0.500  of all 0.250  elapsed 1:40",
        "step 6/9  reward 0.500  of all 0.250  elapsed 1:50  left 0:30",
        "step 8/9  reward 0.500  of all 0.250  elapsed 2:16  left 0:12",
        "evaluation of step 4: e  pass@1 0.500 [0.100, 0.900]  (3 tasks)",
    ]


def test_a_panel_on_a_terminal() -> None:
    console = Console(width=100, record=True, force_terminal=True, file=open_null())
    panel = LivePanel(console, "here", steps=9)
    panel.log(1, {"reward/mean": 0.0})
    panel.log(2, {"reward/mean": 1.0})
    panel.close()
    text = console.export_text()
    assert "here  step 2/9" in text
    assert "▁█" in text


def open_null() -> io.StringIO:
    return io.StringIO()


def test_sparkline() -> None:
    assert sparkline([], 5) == ""
    assert sparkline([2, 2], 5) == "▁▁"
    assert sparkline([0, 0, 1, 1], 2) == "▁█"


SINKS_WITH_EXTRAS = """
import sys
from pathlib import Path
from async_rl.config.loading import load
from async_rl.telemetry import open_sinks
place = ["--run.name", "r", "--run.folder", sys.argv[1]]
config = load(["@", "configs/quickstart.yaml", *place, "--metrics.console", "false", *sys.argv[2:]])
with open_sinks(config) as sinks:
    for step in (1, 2):
        sinks.log(step, {"reward/mean": step / 2})
"""


def in_a_process(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder)}
    line = [sys.executable, "-c", SINKS_WITH_EXTRAS, str(folder), *args]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_tensorboard_writes_an_event_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    done = in_a_process(tmp_path, "--metrics.tensorboard", "true")
    assert done.returncode == 0, done.stderr
    (events,) = tmp_path.glob("r/tensorboard/events.*")
    assert b"reward/mean" in events.read_bytes()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"metrics.wandb_project needs .* pip install 'async-rl\[wandb\]'"):
        open_sinks(config(tmp_path, wandb_project="p"))


# -- log lines ------------------------------------------------------------------------------------------------------

SPEAKS = """
import logging, structlog
from async_rl.telemetry import configure_logs
configure_logs("learner", rank=3)
structlog.get_logger("learner.loop").info("stepped", step=4)
logging.getLogger("buffer.redis").info("standard library")
logging.getLogger("somelibrary").info("chatter")
logging.getLogger("somelibrary").warning("trouble")
"""


def test_log_lines_say_who_speaks_and_leave_out_chatter() -> None:
    done = subprocess.run([sys.executable, "-c", SPEAKS], capture_output=True, text=True, check=True)
    said = done.stderr
    assert "stepped" in said
    assert "role=learner" in said
    assert "rank=3" in said
    assert "step=4" in said
    assert "standard library" in said
    assert "trouble" in said
    assert "chatter" not in said
    assert done.stdout == ""


def test_colours_are_for_terminals_and_no_color_turns_them_off() -> None:
    def spoken(**environment: str) -> bytes:
        ours, theirs = pty.openpty()
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            environment = {**os.environ, "TERM": "xterm", **environment}
            subprocess.run([sys.executable, "-c", SPEAKS], stderr=theirs, env=environment, timeout=PATIENCE_S, check=True)
            os.close(theirs)
            return terminal.read(65536)

    assert b"\x1b[" in spoken(NO_COLOR="")
    assert b"\x1b[" not in spoken(NO_COLOR="1")


def test_warnings_of_several_processes_are_counted_by_cause_within_a_size(tmp_path: Path) -> None:
    def warn(role: str, text: object, level: int = logging.WARNING) -> None:
        handler = WarningFile(tmp_path, role)
        if level >= handler.level:
            handler.handle(logging.LogRecord(role, level, "file.py", 1, text, None, None))

    warn("worker", {"event": "episode 7 failed", "environment": "counting", "level": "warning"})
    warn("worker", {"event": "episode 12 failed", "environment": "counting", "level": "warning"})
    warn("learner", "the disk is full", logging.ERROR)
    warn("learner", "a step", logging.INFO)
    found = [(each.role, each.level, each.event, each.count) for each in read_warnings(tmp_path)]
    assert found == [("learner", "error", "the disk is full", 1), ("worker", "warning", "episode 12 failed", 2)]
    assert read_warnings(tmp_path)[1].details == {"environment": "counting"}
    for _ in range(3):
        (tmp_path / "warnings.jsonl").write_text((json.dumps({"no": "x" * 1000}) + "\n") * 2000)
        warn("learner", "again")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < MOST_BYTES + 10_000
    misfit = logging.LogRecord("library", logging.WARNING, "file.py", 1, "%d items", ("many",), None)
    WarningFile(tmp_path, "worker").handle(misfit)  # raises nothing in the code that logs
    WarningFile(tmp_path / "elsewhere", "worker").emit(logging.LogRecord("w", logging.WARNING, "f", 1, "unseen", None, None))
    assert not (tmp_path / "elsewhere").exists()


def test_rows_are_plain_json(tmp_path: Path) -> None:
    with open_sinks(config(tmp_path)) as sinks:
        sinks.log(5, {"reward/mean": math.nan})
    (line,) = (tmp_path / "here" / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert row["step"] == 5
    assert row["reward/mean"] is None


class Broken:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        raise SystemExit(1)  # what rich does when nobody reads its output any more

    def close(self) -> None: ...


def test_a_sink_that_breaks_ends_nothing(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    with (
        Sinks([JsonlSink(path, resumed_after=0, max_bytes=10**6), Broken()]) as sinks,
        structlog.testing.capture_logs() as logged,
    ):
        sinks.log(1, {"reward/mean": 0.1})
        sinks.log(2, {"reward/mean": 0.2})
    assert [row.step for row in read_rows(path)] == [1, 2]
    assert ["Broken failed" in each["event"] for each in logged] == [True]


def test_malformed_requests_fill_no_log_and_tracebacks_show_no_secrets() -> None:
    script = """
import asyncio, logging
from aiohttp import web
from async_rl.telemetry import configure_logs

async def serve():
    runner = web.AppRunner(web.Application(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1])
    writer.write(b"POST /x HTTP/1.1\\r\\nContent-Length: nonsense\\r\\n\\r\\n")
    print((await reader.readline()).decode())
    writer.close()
    await runner.cleanup()

configure_logs("worker")
asyncio.run(serve())
token = "secret" * 2
try:
    raise ValueError("why")
except ValueError:
    logging.getLogger("other").exception("it failed")
"""
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "400" in done.stdout
    assert "Error handling request" not in done.stderr
    assert "ValueError: why" in done.stderr
    assert "secretsecret" not in done.stderr
