"""What the page of rollouts is told about a recorded run."""

from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.recording import Fates, Recording
from async_rl.view.recorded.rollouts import FOLDED, PIECE, RolloutBrowser, ledger_of, texts_of
from tests.support.recorded_run import ALPHABET, HOSTILE, LONG, record_run

CONFIG = Config.model_validate(
    {
        "model": {"size": {"hidden": 64, "layers": 2, "heads": 4}},
        "tokenizer": {"type": "characters", "alphabet": ALPHABET},
        "environments": [{"type": "counting"}],
    }
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> RolloutBrowser:
    folder: Path = tmp_path_factory.mktemp("run")
    record_run(folder, 30)
    return RolloutBrowser(Recording(folder), CONFIG)


def test_a_list_is_filtered_and_comes_in_pages(browser: RolloutBrowser):
    page = browser.page({"environment": "games", "min_reward": "0.5", "limit": "3", "offset": "1", "text": ""})
    assert [row["id"] for row in page["rows"]] == ["t000000027/2", "t000000024/1", "t000000024/2"]
    assert (page["total"], page["recorded"], page["searched"]) == (20, 120, 0)
    assert page["environments"] == ["games", "sums"]
    assert page["fates"] == {"no_signal": 6, "trained": 24}
    assert browser.page({"fate": "dropped", "status": "failed"})["total"] == 6
    assert browser.page({"limit": "100000"})["offset"] == 0
    found = browser.page({"text": "EVIL"})
    assert (found["total"], found["searched"], found["is_complete"]) == (3, 30, True)


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"min_reward": "high"}, "min_reward is 'high', and must be a number"),
        ({"max_age": "1.5"}, "max_age is '1.5', and must be an integer"),
        ({"order": "odd"}, "order is 'odd', and must be one of newest"),
        ({"colour": "red"}, "'colour' is not a filter of rollouts; there are environment"),
    ],
)
def test_a_wrong_filter_is_named(browser: RolloutBrowser, query: dict[str, str], problem: str):
    with pytest.raises(ConfigError) as raised:
        browser.page(query)
    assert str(raised.value).startswith(problem)


def test_a_rollout_has_its_conversation_its_group_and_its_life(browser: RolloutBrowser):
    rollout = browser.rollout("t000000007/1")
    assert rollout is not None
    assert [message["role"] for message in rollout["messages"]] == ["user", "assistant", "tool"]
    assert rollout["messages"][1]["tool_calls"] == [{"name": "add", "arguments": {"text": '{"a": 1}', "length": 8}, "id": "c1"}]
    assert (rollout["reward"], rollout["group_mean"], rollout["age"]) == (0.5, 0.5, 2)
    assert [sibling["status"] for sibling in rollout["siblings"]] == ["ok", "ok", "ok", "failed"]
    stages = [span["what"] for span in rollout["life"]]
    assert stages == [
        "rolled out",
        "queue",
        "inference",
        "environment",
        "reward",
        "in queue",
        "taken",
        "trained",
        "until checkpoint",
    ]
    assert (rollout["checkpoint_step"], rollout["missing"]) == (7, [])


def test_what_is_not_recorded_of_a_dropped_rollout_is_said(browser: RolloutBrowser):
    dropped = browser.rollout("t000000005/3")
    assert dropped is not None
    assert dropped["is_head"]
    assert (dropped["samples"], dropped["reward"]) == ([], None)
    assert dropped["failure"]["kind"] == "ToolError"
    assert dropped["missing"] == [
        "when its ticket was reserved: its worker did not send times",
        "a step: it was dropped (no_signal)",
    ]
    assert browser.tokens("t000000005/3", 0, 0) is None


def test_every_token_has_its_probability_its_version_and_that_of_its_keys(browser: RolloutBrowser):
    row = browser.tokens("t000000007/2", 0, 4)
    assert row is not None
    assert "".join(row["texts"]) == "=?the sum is 8"
    assert (row["start"], row["total"]) == (4, 18)
    assert row["logprobs"][:2] == [None, None]
    assert all(value < 0 for value in row["logprobs"][2:])
    assert row["versions"] == [None, None, 7, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8]
    assert row["keys"] == [None] * 7 + [7] * 7


def test_long_hostile_text_comes_unchanged_in_pieces(browser: RolloutBrowser):
    rollout = browser.rollout("t000000029/1")
    assert rollout is not None
    said = rollout["messages"][1]
    assert said["text"].startswith(f"the sum is 13{HOSTILE}")
    assert (len(said["text"]), said["length"]) == (FOLDED, 13 + len(HOSTILE) + len(LONG))
    whole = said["text"]
    while len(whole) < said["length"]:
        piece = browser.text("t000000029/1", 1, len(whole))
        assert piece is not None
        assert 0 < len(piece["text"]) <= PIECE
        whole += piece["text"]
    assert whole == f"the sum is 13{HOSTILE}{LONG}"
    assert browser.text("t000000029/1", 7, 0) is None


def test_a_group_knows_its_best_and_its_worst(browser: RolloutBrowser):
    group = browser.group("t000000007")
    assert group is not None
    assert (group["best"], group["worst"], group["answer"]["text"]) == (2, 0, "8")
    assert browser.group("t000000999") is None
    assert browser.rollout("t000000007/9") is None
    assert browser.rollout("../../etc/passwd") is None


def test_the_ledger_adds_up(browser: RolloutBrowser):
    ledger = browser.fates()
    assert ledger is not None
    assert sum(row["tickets"] for row in ledger["rows"]) == ledger["issued"] == 33
    assert sum(row["permille"] for row in ledger["rows"]) == 1000
    assert all(row["help"] for row in ledger["rows"])


def test_after_the_end_of_a_run_nothing_is_in_flight():
    fates = Fates(at=0.0, step=1, issued=4, trained=1, dropped={}, in_flight={"ready": 2, "again": 0, "taken": 1}, tokens={})
    ledger = ledger_of(fates, is_running=False)
    assert [(row["fate"], row["permille"]) for row in ledger["rows"]] == [
        ("trained", 250),
        ("left_over/ready", 500),
        ("left_over/taken", 250),
    ]
    assert all(row["help"] for row in ledger["rows"])


def test_shares_add_up_to_1000_however_they_are_rounded():
    fates = Fates(at=0.0, step=1, issued=7, trained=1, dropped={"stale": 1, "failed": 1}, in_flight={"ready": 3}, tokens={})
    rows = {row["fate"]: (row["tickets"], row["permille"]) for row in ledger_of(fates)["rows"]}
    assert rows == {
        "trained": (1, 143),
        "in_flight/ready": (3, 428),
        "dropped/stale": (1, 143),
        "dropped/failed": (1, 143),
        "unaccounted": (1, 143),
    }


def test_a_character_of_several_tokens_is_shown_once():
    class Bytes:
        vocab_size, end_id = 256, 0

        def decode(self, token_ids: list[int]) -> str:
            return bytes(token_ids).decode(errors="replace")

    texts = texts_of([*"aé".encode(), 0xFF, 0xE2, 0x82, 0xAC, 98], Bytes())  # pyright: ignore[reportArgumentType]
    assert texts == ["a", "", "é", "\ufffd", "", "", "€", "b"]
    assert texts_of([1, 2], None) == ["", ""]
