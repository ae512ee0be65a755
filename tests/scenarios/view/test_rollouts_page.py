"""The rollouts of a recorded run in a browser: found by filters and keys, opened at a token, compared; hostile text is text."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from playwright.sync_api import Page, expect

from async_rl.recording.recorded import GroupFacts
from async_rl.recording.recorder import Recorder
from tests.support.browser import open_page
from tests.support.recorded_run import ALPHABET, BEGAN, HOSTILE, group, record_run
from tests.support.view_client import Viewed, viewed

CONFIG = {
    "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}},
    "tokenizer": {"type": "characters", "alphabet": ALPHABET},
    "environments": [{"type": "counting"}],
}


def test_rollouts_are_found_opened_and_compared(tmp_path: Path):
    run = tmp_path / "run"
    record_run(run, 30)
    with Recorder(run, "learner", events_bytes=2**20, rollouts_bytes=2**26) as recorder:
        place = {"worker": "worker-1", "environment": "sums", "place": "sums.py:7 in reward"}
        recorder.event("blocked", at=BEGAN + 7 + 1.0, seconds=5.0, **place)  # while t000000007 was rolled out
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    with viewed(tmp_path, run) as view, open_page(view.url) as opened:
        page = opened.page
        wrong_requests_are_answered_in_a_sentence(view)
        durations_are_listed_and_explained(page)
        filters_narrow_the_list(page)
        keys_lead_through_rollouts(page)
        a_link_leads_to_a_token(page, view.url)
        siblings_are_compared(page)
        hostile_text_stays_text(page)
        the_ledger_adds_up(page)
        narrow_screens_show_rollouts_and_groups(page)
        new_groups_are_listed_by_themselves(page, run)
        assert [problem for problem in opened.problems if "ERR_ABORTED" not in problem] == []  # a reload aborts requests
        show(page, "#/rollouts/t000000029/<script>")
        expect(page.locator("p.bad")).to_contain_text("is not recorded")


def wrong_requests_are_answered_in_a_sentence(view: Viewed) -> None:
    for path, status, said in (
        ("rollouts?min_reward=high", 400, b"min_reward is 'high', and must be a number"),
        ("tokens?id=t000000007/1&start=-1", 400, b"start is '-1', and must be a number"),
        ("rollout?id=t000000999/0", 404, b"'t000000999/0' is not recorded"),
        ("group?id=../config.yaml", 404, b"'../config.yaml' is not recorded"),
    ):
        answered, _, body = view.ask(f"/api/{path}", Authorization=f"Bearer {view.token}")
        assert (answered, body[: len(said)]) == (status, said)
    assert view.ask("/api/rollouts")[0] == 401


def show(page: Page, address: str) -> None:
    page.evaluate("address => { location.hash = address; }", address)


def durations_are_listed_and_explained(page: Page) -> None:
    """Where the sentence of the overview leads: the slowest first, and what an episode spends its time on."""
    show(page, "#/rollouts?order=slowest")
    expect(page.locator("select[name=order]")).to_have_value("slowest")
    expect(page.locator("table.list thead")).to_contain_text("took")
    expect(page.locator("table.list tbody tr").first).to_contain_text("2.9 s")
    expect(page.locator(".stages")).to_contain_text("generation 1.4 s, 49.1 %")
    expect(page.locator(".stages")).to_contain_text("blocked worker 283 ms")
    show(page, "#/rollouts/t000000007/1")
    expect(page.locator(".lanes tr", has_text="generation")).to_contain_text("600 ms, and 1.0 s blocked")
    expect(page.locator(".lanes tr", has_text="blocked: code stopped its worker")).to_contain_text("2.0 s")


def filters_narrow_the_list(page: Page) -> None:
    show(page, "#/rollouts")
    expect(page.locator(".summary")).to_contain_text("120 of 120 recorded rollouts")
    page.locator("select[name=environment]").select_option("games")
    expect(page.locator(".summary")).to_contain_text("40 of 120")
    page.locator("input[name=min_reward]").fill("1")
    page.locator("input[name=min_reward]").press("Enter")
    expect(page.locator(".summary")).to_contain_text("10 of 120")
    assert "environment=games" in page.url
    page.locator("input[name=text]").fill("is 28")
    page.locator("input[name=text]").press("Enter")
    expect(page.locator("table.list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="clear").click()
    page.get_by_role("link", name="next", exact=True).click()
    expect(page.locator(".pages")).to_contain_text("51 to 100 of 120")


def keys_lead_through_rollouts(page: Page) -> None:
    page.locator("table.list a").first.click()
    heading = page.locator("article h2")
    expect(heading).to_have_text("Rollout t000000017/2")
    for key, leads_to in (("]", "Rollout t000000017/3"), ("[", "Rollout t000000017/2"), ("j", "Rollout t000000017/3")):
        page.keyboard.press(key)
        expect(heading).to_have_text(leads_to)
    page.keyboard.press("g")
    expect(heading).to_have_text("Group t000000017")
    page.keyboard.press("l")
    expect(page.locator(".pages")).to_contain_text("51 to 100 of 120")


def a_link_leads_to_a_token(page: Page, url: str) -> None:
    page.goto(f"{url}#/rollouts/t000000007/2?token=12")
    page.reload()
    about = page.locator(".about-token")
    expect(about).to_have_text(
        re.compile('token 12 · id 16 · "m" · log-probability -.* · version 8 · keys and values from version 7')
    )
    expect(page.locator(".token.chosen")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(about).to_contain_text('token 11 · id 24 · "u"')
    page.locator(".token-row .token").nth(8).click()
    assert page.url.endswith("#/rollouts/t000000007/2?token=8")
    expect(page.locator(".legend")).to_contain_text("version 7")
    expect(page.locator(".lanes")).to_contain_text("grading")


def siblings_are_compared(page: Page) -> None:
    page.get_by_role("link", name="group side by side").click()
    expect(page.locator(".comparison")).to_contain_text("The first 17 tokens are the same")
    expect(page.locator(".column h4").first).to_have_text("rollout 2: reward 1, advantage 1")
    expect(page.locator(".column").nth(0).locator(".differs")).to_have_text(["8"])
    expect(page.locator(".column").nth(1).locator(".differs")).to_have_text(["1", "2"])
    page.locator(".comparison select").nth(1).select_option("1")
    expect(page.locator(".column").nth(1).locator(".differs")).to_have_text(["1", "3"])
    show(page, "#/rollouts/t000000005")
    expect(page.locator(".comparison")).to_contain_text("The first 11 characters are the same")


def hostile_text_stays_text(page: Page) -> None:
    show(page, "#/rollouts/t000000029/1")
    said = page.locator(".message.assistant .said").first
    expect(said).to_contain_text(HOSTILE[: HOSTILE.index("\x00")])
    text = said.inner_text()
    assert not set("\x00\x1b\u202e\u202c\u200b") & set(text)
    page.locator(".message.assistant").get_by_role("button").click()
    expect(page.locator(".message.assistant").get_by_role("button")).to_contain_text("show more: 896,")
    show(page, "#/rollouts/t000000029")
    expect(page.locator("table.rows")).to_contain_text("no such tool <script>")
    assert page.evaluate("window.hacked") is None


def narrow_screens_show_rollouts_and_groups(page: Page) -> None:
    """Without scrolling sideways."""
    usual = page.viewport_size
    assert usual is not None
    page.set_viewport_size({"width": 420, "height": 900})
    for address, own in (("t000000007/1", ".life .lanes"), ("t000000007", ".comparison"), ("t000000005", ".comparison")):
        show(page, f"#/rollouts/{address}")
        page.locator("h2", has_text=re.compile(f"{address}$")).wait_for()
        page.locator(own).wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 420, address
    page.set_viewport_size(usual)


def new_groups_are_listed_by_themselves(page: Page, run: Path) -> None:
    """With each step; the filters stay as they are, and so does the focus."""
    show(page, "#/rollouts?environment=sums")
    expect(page.locator(".summary")).to_contain_text("80 of 120")
    page.locator("table.list a").nth(1).focus()
    with Recorder(run, "learner", events_bytes=2**20, rollouts_bytes=2**26) as recorder:
        recorder.group(GroupFacts(fate="trained", step=7, version_at_take=8, advantages=(0.0, 0.5, -0.25, None)), group(31))
    (run / "metrics.jsonl").write_text('{"step": 7, "time": 1.0, "reward/mean": 0.5}\n')
    expect(page.locator(".summary")).to_contain_text("84 of 124")
    expect(page.locator("table.list a").first).to_have_text("t000000031/0")
    expect(page.locator("table.list a").nth(5)).to_be_focused()
    expect(page.locator("table.list tbody tr").nth(2)).to_contain_text("-0.25")


def the_ledger_adds_up(page: Page) -> None:
    show(page, "#/rollouts")
    expect(page.locator(".ledger tr.total")).to_contain_text("100.0 %")
    page.locator(".ledger").get_by_role("link", name="dropped: no signal").click()
    expect(page.locator(".summary")).to_contain_text("24 of 120")
