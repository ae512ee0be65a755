"""The report is one file that needs nothing else, stays small, and shows what models wrote as text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from async_rl.cli.main import dispatch
from async_rl.telemetry.rows import JsonlSink
from tests.unit.async_rl.run_folders.stored_runs import row_of, store_run

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e" + "x" * 1_000_000


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href") and value]


def test_a_report_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"type": "counting", "args": {"api_key": "hush", "url": "http://user:hush@host/"}}
    run = store_run(tmp_path, "done", environments=[environment])
    rows = [
        {"step": step, "environment": "counting", "prompt": HOSTILE, "text": HOSTILE, "reward": None, "age": 1}
        for step in range(20)
    ]
    (run.path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sink = JsonlSink(run.metrics, resumed_after=5, max_bytes=10**9)
    for step in range(6, 10_001):
        sink.log(step, row_of(step))
    sink.close()
    out = tmp_path / "report.html"
    assert dispatch(["runs", "report", "done", "--run.folder", str(tmp_path), "--out", str(out)]) == 0
    page = out.read_text()
    assert out.stat().st_size < 2_000_000
    tags = Tags()
    tags.feed(page)
    assert "script" not in tags.found
    assert tags.links == []
    assert tags.found.count("svg") >= 4
    assert "hush" not in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", page)
    for shown in (
        "&lt;script&gt;alert(1)",
        "mean@1 0.500 [0.250, 0.750]",
        "was blocked for 7 s",
        "staleness.max_age",
        "no groups ready",
    ):
        assert shown in page, shown
    assert "more characters" in page
