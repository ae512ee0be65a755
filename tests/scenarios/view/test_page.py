"""The page of a run of 10,000 steps in a browser: light enough, right on every page, closed to strangers, and up to date."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from async_rl.view.demo import write_demo
from tests.support.browser import OpenPage, open_page
from tests.support.view_client import Viewed, viewed

STEPS = 10_000
MOST_BYTES, MOST_REQUESTS = 1_000_000, 10
SCRIPT = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
HOSTILE = f"{SCRIPT} \x1b[31m\x07 \u202egnp.exe"
CONTENT = {
    "overview": ("Finished: trained all 10000 steps", "Warnings", "What became of the tokens", "groups dropped: stale", SCRIPT),
    "staleness": ("Groups of the step by age", "Slots", "trained", "dropped: stale", "tokens of ended rollouts"),
    "learner": ("Gradient norm", "Effective sample size by age", "Packing", "Seconds of a step"),
    "fleet": (
        "Workers",
        "Redis is not running",
        "What each process did",
        "group rolled out",
        "KV cache in use",
        "Push of a version",
    ),
    "compare": ("Runs", "other", "staleness.max_age", "counting mean@4"),
    "config": ("staleness.max_age", "environments.0.type", "config.yaml:"),
}


def write_run(folder: Path) -> Path:
    """A run of 10,000 steps that ended; an environment and warnings have texts that want to be more than text."""
    run = folder / "demo"
    write_demo(run, steps=STEPS)
    write_demo(folder / "other", steps=100, seed=1)
    config = folder / "other" / "config.yaml"
    config.write_text(config.read_text().replace("max_age: 3", "max_age: 2"))
    with (run / "metrics.jsonl").open("r+") as file:
        last = json.loads(file.readlines()[-1])
        file.write(json.dumps({"step": STEPS, "time": last["time"], f"environment/{HOSTILE}/reward": 0.5}) + "\n")
    with (run / "warnings.jsonl").open("a") as file:
        for event in (HOSTILE, "y" * 1_000_000, f"{HOSTILE} again"):
            row = {"time": 1.0, "role": "worker", "pid": 1, "level": "error", "event": event, "details": {}}
            file.write(json.dumps(row) + "\n")
    return run


def test_a_browser_shows_a_run_of_ten_thousand_steps(tmp_path: Path):
    run = write_run(tmp_path)
    with viewed(tmp_path, run) as view:
        strangers_are_refused(view)
        with open_page(view.url) as opened:
            is_light(opened)
            every_page_shows_its_content(opened)
            keys_work(opened)
            new_rows_arrive(opened, run)
            assert opened.problems == []
            assert opened.page.evaluate("window.hurt") is None
        view.program.signal(signal.SIGTERM)
        assert view.program.exit_code() == 0, view.program.output


def strangers_are_refused(view: Viewed) -> None:
    known = {"Authorization": f"Bearer {view.token}"}
    status, headers, _ = view.ask("/", **known)
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert view.ask("/")[0] == view.ask("/api/run")[0] == view.ask("/static/app.js")[0] == 401
    assert view.ask("/?token=wrong")[0] == view.ask("/api/run", Cookie="async_rl_view=x")[0] == 401
    assert view.ask(f"/api/run?token={view.token}")[0] == 401, "addresses of data are sent on, so they carry no token"
    assert view.ask("/", Host="evil.example", **known)[0] == 421
    assert view.ask("/api/run", method="POST", **known)[0] == 405
    assert {view.ask(f"/static/{up}/server.py", **known)[0] for up in ("..", "%2e%2e", "..%2f..")} <= {403, 404}
    assert view.ask("/api/run?points=many", **known)[0] == 400


def is_light(opened: OpenPage) -> None:
    opened.page.wait_for_selector("canvas")
    opened.page.wait_for_load_state("networkidle")
    # Others are updates.
    first = [request for request in opened.finished if "/api/" not in request.url or "since=0" in request.url]
    sizes = {request.url: sum(request.sizes().values()) for request in first}
    assert len(first) <= MOST_REQUESTS, sizes
    assert sum(sizes.values()) <= MOST_BYTES, sizes
    assert "token" not in opened.page.url


def every_page_shows_its_content(opened: OpenPage) -> None:
    for name, texts in CONTENT.items():
        opened.page.click(f"#pages a[data-page={name}]")
        if name == "compare":
            opened.page.get_by_label("other").check()
        for text in texts:
            opened.page.get_by_text(text).first.wait_for()
        shown = opened.page.inner_text("main")
        assert "undefined" not in shown
        assert "NaN" not in shown
        assert len(shown) < 300_000
    opened.page.goto(opened.page.url.partition("#")[0] + "#/overview")
    opened.page.get_by_text("␇ \ufffdgnp.exe").first.wait_for()


def keys_work(opened: OpenPage) -> None:
    page = opened.page
    page.keyboard.press("2")
    page.get_by_text("Groups of the step by age").first.wait_for()
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("?")
    page.get_by_text("light or dark").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("1")


def new_rows_arrive(opened: OpenPage, run: Path) -> None:
    """Also those behind a rotation; the page asks for what is new, and gets no more."""
    page, metrics = opened.page, run / "metrics.jsonl"
    page.get_by_text(f"step {STEPS} of {STEPS}").wait_for()
    metrics.rename(run / "metrics.jsonl.1")
    metrics.write_text(json.dumps({"step": STEPS + 1, "time": 1.0, "reward/mean": 0.5}) + "\n")
    with page.expect_response(lambda answer: "/api/run" in answer.url and "since=0" not in answer.url) as answered:
        page.get_by_text(f"step {STEPS + 1} of {STEPS}").wait_for()
    assert len(answered.value.body()) < 30_000


@pytest.mark.slow
def test_a_browser_follows_a_run_that_lives(tmp_path: Path):
    from tests.support.run_processes import program, read_config, write_config
    from tests.support.waiting import until

    path = write_config(tmp_path, "lively", learner={"steps": 100_000})
    with program(tmp_path, "run", "@", path) as running:
        until(lambda: (read_config(path).run_folder / "metrics.jsonl").exists(), "a step has ended", while_alive=running)
        with viewed(tmp_path, "@", path) as view, open_page(view.url) as opened:
            opened.page.get_by_text("Running: its supervisor runs on this machine").wait_for()
            opened.page.get_by_text("● running").wait_for()
            opened.page.keyboard.press("4")
            opened.page.get_by_text("is live; the learner is").wait_for()
            running.signal(signal.SIGINT)
            assert running.exit_code() == 0, running.output
            opened.page.get_by_text("Redis is not running").wait_for()
            opened.page.keyboard.press("1")
            opened.page.get_by_text("Stopped: was stopped after step").wait_for()
            opened.page.get_by_text("■ stopped").wait_for()
            assert opened.problems == []
