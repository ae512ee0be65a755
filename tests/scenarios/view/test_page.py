"""The page of a run of 10,000 steps in a browser: light enough, right on every page, closed to strangers, and up to date."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from async_rl.recording.recorder import Recorder
from async_rl.view.demo import write_demo
from tests.support.browser import OpenPage, open_page
from tests.support.view_client import Viewed, viewed

STEPS = 10_000
BLOCKED_S = 5.0
MOST_BYTES, MOST_REQUESTS = 1_000_000, 10
SCRIPT = "<script>window.hurt = 1</script><img src=x onerror='window.hurt = 1'>"
HOSTILE = f"{SCRIPT} \x1b[31m\x07 \u202egnp.exe"
CONTENT = {
    "overview": (
        "Finished: trained all 10000 steps",
        "Warnings",
        "What became of the tokens",
        "groups dropped: stale",
        SCRIPT,
        "whole run: ",
        "left over",
    ),
    "staleness": ("Groups of the step by age", "Slots", "trained", "dropped: stale", "tokens of ended rollouts"),
    "learner": ("Gradient norm", "Effective sample size by age", "Packing", "Seconds of a step"),
    "fleet": (
        "Workers",
        "The run has ended, and with it its Redis",
        "What each process did",
        "group rolled out",
        "Pushes in this window: the last 10 of",
        "KV cache in use",
        "Push of a version",
    ),
    "compare": ("Runs", "other", "staleness.max_age", "counting mean@4"),
    "config": ("staleness.max_age", "environments.0.type", "config.yaml:"),
}

OWN = {
    "staleness": "text=What became of every generated token",
    "learner": "text=Gradient norm",
    "fleet": ".lane",
    "rollouts": "table.list td",
    "compare": "text=counting mean@4",
    "config": "text=staleness.max_age",
    "overview": ".tile",
}
"""What only this page has."""


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
    with Recorder(run, "learner", events_bytes=2**20, rollouts_bytes=2**20) as recorder:
        place = {"worker": "w-0", "environment": "counting", "place": "tasks.py:7 in reward"}
        recorder.event("blocked", at=last["time"] - 6, seconds=BLOCKED_S, **place)
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
            the_overview_says_why_it_is_slow(opened)
            the_timeline_shows_what_blocks_and_zooms(opened)
            settings_at_their_defaults_are_hidden(opened)
            narrow_screens_show_all(opened)
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


def the_overview_says_why_it_is_slow(opened: OpenPage) -> None:
    """In words that the chart of idle time does not contradict; a run that ended well shows nothing in red."""
    page = opened.page
    page.get_by_text("blocks its worker at tasks.py:7 in reward, for at least 5 s").wait_for()
    idle = page.locator(".chart", has_text="Idle learner by cause")
    idle.get_by_text("includes the time in which a worker was blocked").wait_for()
    expect(page.locator("main .bad")).to_have_count(0)
    expect(page.locator(".keyed", has_text="trained")).not_to_contain_text("in flight")


def the_timeline_shows_what_blocks_and_zooms(opened: OpenPage) -> None:
    page = opened.page
    page.keyboard.press("4")
    page.locator(".lane i.blocked").first.wait_for()
    expect(page.locator(".keyed", has_text="upper half")).to_contain_text("blocked code")
    expect(page.locator(".axis small").nth(2)).to_contain_text(re.compile(r"\d"))
    rows = page.evaluate(
        """() => [...document.querySelectorAll(".lane i:is(.blocked, .group)")].map((bar) => {
             const { top, bottom } = bar.getBoundingClientRect();
             return [bar.classList[0], bar.closest(".lane").innerText, top, bottom];
           })"""
    )
    ((_, _, _, lowest),) = [row for row in rows if row[:2] == ["blocked", "w-0"]]
    tops = [top for kind, lane, top, _ in rows if (kind, lane) == ("group", "w-0")]
    assert tops
    assert all(lowest <= top for top in tops), "the bars of groups hide what blocks"
    assert_zooms(page)
    with page.expect_response(re.compile(r"/api/lanes\?seconds=0&worker=w-0")):
        page.get_by_role("button", name="w-0", exact=True).click()
    page.locator(".lane i.inference").first.wait_for()
    expect(page.locator(".keyed", has_text="its episodes")).to_contain_text("waiting for the engine")
    with page.expect_response(re.compile(r"/api/lanes\?seconds=0$")):
        page.keyboard.press("a")
    page.get_by_text("Pushes in this window").wait_for()
    page.get_by_role("cell", name="gloo, delta").first.wait_for()
    page.keyboard.press("?")
    for words in ("load the timeline again", "the whole run in the timeline"):
        page.locator("#keys").get_by_text(words).wait_for()
    page.keyboard.press("Escape")


def assert_zooms(page: Page) -> None:
    """By dragging; out again by a key, and to the whole run by another."""
    page.locator(".timeline .axis").hover()  # waits until nothing moves it any more
    box = page.locator(".timeline .over").bounding_box()
    assert box is not None
    y, asks = box["y"] + 5, re.compile(r"/api/lanes\?since=\d+&until=\d+")
    with page.expect_response(asks) as answered:
        page.mouse.move(box["x"] + 0.25 * box["width"], y)
        page.mouse.down()
        page.mouse.move(box["x"] + 0.75 * box["width"], y, steps=3)
        page.mouse.up()
    found = answered.value.json()
    assert found["seconds"] == pytest.approx(15, abs=0.5)
    page.get_by_role("button", name="zoom out").wait_for()
    with page.expect_response(re.compile(r"/api/lanes\?seconds=30")):
        page.keyboard.press("z")
    expect(page.get_by_role("button", name="zoom out")).to_have_count(0)
    with page.expect_response(re.compile(r"/api/lanes\?seconds=0")) as whole:
        page.keyboard.press("w")
    assert whole.value.json()["begin"] == whole.value.json()["recorded_from"]


def settings_at_their_defaults_are_hidden(opened: OpenPage) -> None:
    page = opened.page
    page.keyboard.press("7")
    page.get_by_text("worker.groups_in_flight").first.wait_for()
    page.get_by_label("only values that differ").check()
    expect(page.get_by_text("worker.groups_in_flight")).to_have_count(0)
    page.get_by_text("staleness.max_age").first.wait_for()


def narrow_screens_show_all(opened: OpenPage) -> None:
    """Without scrolling sideways; and the rows of tiles are full at every width."""
    page = opened.page
    usual = page.viewport_size
    assert usual is not None
    for name in OWN:
        page.set_viewport_size({"width": 420, "height": 900})
        page.click(f"#pages a[data-page={name}]")
        page.locator(OWN[name]).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, name
    for width in (420, 800, 1280, 1900):
        page.set_viewport_size({"width": width, "height": 900})
        tops = page.evaluate("[...document.querySelectorAll('.tile')].map((tile) => tile.getBoundingClientRect().top)")
        assert len(set(Counter(tops).values())) == 1, (width, tops)
    page.set_viewport_size(usual)


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
            opened.page.get_by_text("The run has ended, and with it its Redis").wait_for()
            opened.page.keyboard.press("1")
            opened.page.get_by_text("Stopped: was stopped after step").wait_for()
            opened.page.get_by_text("■ stopped").wait_for()
            assert opened.problems == []
