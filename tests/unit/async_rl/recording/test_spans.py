"""Spans of recorded groups, steps and pushes, as a real OTLP/HTTP receiver gets them."""

import sys
from pathlib import Path

import pytest
import yaml
from structlog.testing import capture_logs

from async_rl.cli.main import dispatch
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.recording import Recording
from async_rl.recording.recorded import GroupFacts
from async_rl.recording.recorder import Recorder
from async_rl.recording.spans.export import SpanExport
from async_rl.recording.spans.making import SpanMaker
from async_rl.recording.spans.sender import SpanSender
from tests.support.otlp_receiver import ReceivedSpan, otlp_receiver
from tests.support.recorded_run import BEGAN, group

RUN = "f00dcafe"
KEY = "recording.otlp_endpoint"
NOWHERE = "http://127.0.0.1:1"


def record_a_run(folder: Path, endpoint: str, *, share: float = 1.0) -> Recorder:
    """Two groups that train step 1, one that is dropped, a push, a swap and a checkpoint."""
    spans = SpanExport(SpanMaker(RUN, share=share), SpanSender(endpoint, run="seen", key=KEY))
    with Recorder(folder, "learner", events_bytes=2**20, rollouts_bytes=2**20, spans=spans) as kept:
        kept.event("start", at=BEGAN, step=0, version=0, timeline=RUN)
        kept.event("take", at=BEGAN + 4, seconds=3.0, step=1, version=2, groups=["t000000001", "t000000002"])
        kept.event("step", at=BEGAN + 8, seconds=1.0, step=1, version=2, groups=["t000000001", "t000000002"], wait_s=4.0)
        for number in (1, 2, 3):
            fate = {"step": 1, "version_at_take": 3, "taken_at": BEGAN + 7, "trained_from": BEGAN + 8, "trained_at": BEGAN + 9}
            facts = {"fate": "trained", **fate} if number < 3 else {"fate": "no_signal"}
            kept.group(GroupFacts(**facts, reserved_at=BEGAN + number, ready_at=BEGAN + number + 3), group(number))  # pyright: ignore[reportArgumentType]
        kept.event("push", at=BEGAN + 9, seconds=0.5, version=2, step=1, bytes=9, staged=["worker-1"], dropped={"w": "gone"})
        kept.event("swap", at=BEGAN + 9.5, seconds=0.2, worker="worker-1", version=2, how="push")
        kept.event("checkpoint", at=BEGAN + 10, seconds=2.0, step=1, bytes=7, stall_s=0.1)
        kept.event("blocked", at=BEGAN + 11, seconds=6.0, worker="worker-1", environment="sums", place="a.py:7 in f")
    return kept


def names(spans: list[ReceivedSpan]) -> list[str]:
    return [span.name for span in spans]


def test_the_life_of_a_group_is_one_trace(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        kept = record_a_run(tmp_path, receiver.url)
    assert kept.spans_dropped == 0
    root = next(span for span in receiver.named("group") if span.attributes["async_rl.group"] == "t000000001")
    assert {name: root.attributes[f"async_rl.{name}"] for name in ("fate", "step", "age")} == {
        "fate": "trained",
        "step": 1,
        "age": 2,
    }
    assert (root.begin, root.end, root.parent) == (pytest.approx(BEGAN + 1), pytest.approx(BEGAN + 9), "")
    parts = receiver.under(root)
    assert names(parts) == ["roll out", "queue", "wait for the step", "train", "wait for the checkpoint"]
    assert [span.service for span in parts] == [
        f"async_rl.{name}" for name in ("worker", "buffer", "learner", "learner", "learner")
    ]
    assert (parts[-1].begin, parts[-1].end) == (pytest.approx(BEGAN + 9), pytest.approx(BEGAN + 12))
    rollouts = receiver.under(parts[0])
    assert [span.attributes["async_rl.rollout"] for span in rollouts] == [f"t000000001/{number}" for number in range(4)]
    assert [span.instance for span in rollouts] == ["worker-1"] * 4
    assert [span.error for span in rollouts] == ["", "", "", "environment: ToolError"]
    assert names(receiver.under(rollouts[0])) == ["engine queue", "generation", "environment", "grading"]
    assert "environment" not in str([span.attributes for span in rollouts]), "no text of the run is sent"
    assert len({span.id for span in receiver.spans}) == len(receiver.spans)


def test_steps_and_pushes_are_traces_with_links(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        record_a_run(tmp_path, receiver.url)
    (step,), (push,), (blocked,) = (receiver.named(name) for name in ("step", "push", "blocked"))
    assert names(receiver.under(step)) == ["wait for groups", "checkpoint"]
    trained = [span for span in receiver.named("group") if span.attributes["async_rl.fate"] == "trained"]
    assert step.links == [(span.trace, span.id) for span in trained]
    assert [span.links for span in receiver.named("train")] == [[(step.trace, step.id)]] * 2
    assert push.links == [(step.trace, step.id)]
    assert push.error == "w: gone"
    (swap,) = receiver.under(push)
    assert (swap.name, swap.service, swap.instance) == ("swap", "async_rl.worker", "worker-1")
    assert blocked.error == "code blocks the worker at a.py:7 in f"
    (dropped,) = [span for span in receiver.named("group") if span.attributes["async_rl.fate"] == "no_signal"]
    assert names(receiver.under(dropped)) == ["roll out"]


def test_a_window_that_is_sent_later_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "seen"
    with otlp_receiver() as live:
        record_a_run(folder, live.url)
    (folder / "trained.jsonl").write_text(f'{{"resumed_after":0,"version":0,"timeline":"{RUN}","fence":1,"lost":0}}\n')
    config = tmp_path / "run.yaml"
    tree = {
        "run": {"name": "seen", "folder": str(tmp_path)},
        "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
        "environments": [{"type": "counting"}],
    }
    config.write_text(yaml.safe_dump(tree))
    seconds = ["--from", "0", "--seconds", str(10**9)]  # the dropped group counts when it was recorded, which is today
    with otlp_receiver() as later:
        assert dispatch(["trace", "@", str(config), *seconds, "--otlp", later.url]) == 0
    assert f"{len(live.spans)} spans of 1e+09 s were sent to {later.url}" in capsys.readouterr().out

    assert sorted(map(str, later.spans)) == sorted(map(str, live.spans))
    with (
        otlp_receiver(status=400) as refusing,
        pytest.raises(ConfigError, match=rf"^--otlp: {refusing.url} takes no spans: it answers 400 Bad Request$"),
    ):
        dispatch(["trace", "@", str(config), *seconds, "--otlp", refusing.url])
    with pytest.raises(ConfigError, match="--otlp sends the window, --out writes it to a file: give one of them"):
        dispatch(["trace", "@", str(config), "--otlp", NOWHERE, "--out", "x.json"])


@pytest.mark.parametrize(("status", "problem"), [(400, "it answers 400 Bad Request"), (0, "it cannot be reached")])
def test_an_endpoint_that_takes_nothing_costs_spans_alone(tmp_path: Path, status: int, problem: str) -> None:
    with otlp_receiver(status) as receiver, capture_logs() as logs:
        kept = record_a_run(tmp_path, receiver.url if status else NOWHERE)
    assert kept.spans_dropped == 80
    assert kept.dropped == 0, "files have everything"
    assert len(Recording(tmp_path).groups()) == 3
    told = [record["event"] for record in logs]
    assert len(told) == 1
    assert problem in told[0]


def test_a_share_of_the_groups_is_sent_and_all_steps(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        record_a_run(tmp_path, receiver.url, share=0.0)
    assert set(names(receiver.spans)) == {"step", "wait for groups", "checkpoint", "push", "swap", "blocked"}
    assert receiver.named("step")[0].links == []


def test_a_missing_package_and_a_wrong_address_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"^recording.otlp_endpoint needs .* pip install 'async-rl\[otel\]'$"):
        SpanSender(NOWHERE, run="seen", key=KEY)
    tree = {"model": {"size": {"hidden": 8, "layers": 1, "heads": 1}}, "environments": [{"type": "counting"}]}
    with pytest.raises(ValueError, match=r"must be an address such as http://127\.0\.0\.1:4318"):
        Config.model_validate({**tree, "recording": {"otlp_endpoint": "localhost:4318"}})
