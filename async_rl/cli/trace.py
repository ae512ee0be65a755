"""`async-rl trace`: a time window of a run's recorded events as a file for Perfetto, or as spans sent over OTLP."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from async_rl.checkpoints.trained_steps import first_timeline
from async_rl.cli.grammar import CommandLine, Option, Verb
from async_rl.config import Config
from async_rl.config.loading import load_unfetched
from async_rl.durable.best_effort import explain_write_error
from async_rl.errors import ConfigError
from async_rl.recording import Recording
from async_rl.recording.spans.making import spans_of_window
from async_rl.recording.spans.sender import AT_ONCE, SpanSender
from async_rl.recording.spans.span import Span
from async_rl.recording.trace import Spans, chrome_trace

SECONDS = 10.0


def trace(line: CommandLine) -> int:
    config = load_unfetched(line.config)
    endpoint = line.text("otlp", "")
    if endpoint and line.has("out"):
        raise ConfigError("--otlp sends the window, --out writes it to a file: give one of them")
    recording = Recording(config.run_folder)
    since, until = _window(recording, line.number("from"), line.number("seconds", SECONDS))
    if endpoint:
        number = _send(endpoint, config, recording, since, until)
        print(f"{number} spans of {until - since:g} s were sent to {endpoint}")
    else:
        _write(Path(line.text("out", "trace.json")), recording, since, until)
    if not (let_go := recording.events_let_go()).is_everything_kept:
        print(f"the recording lacks: {let_go}")
    return 0


def _write(out: Path, recording: Recording, since: float, until: float) -> None:
    def spans_of(group_id: str) -> Spans:
        group = recording.group(group_id)
        return group.content.times.spans if group is not None and group.content.times is not None else ()

    made = chrome_trace(recording.events(since=since, until=until), since=since, until=until, spans_of=spans_of)
    try:
        out.write_text(json.dumps(made))
    except OSError as error:
        raise ConfigError(f"--out: {explain_write_error(error, out)}") from error
    spans = sum(event["ph"] == "X" for event in made["traceEvents"])
    print(f"{out}: {spans} spans of {until - since:g} s; open it in https://ui.perfetto.dev or chrome://tracing")


def _send(endpoint: str, config: Config, recording: Recording, since: float, until: float) -> int:
    """Send what ended in the window, and return the number of spans. Raises ConfigError."""
    sender = SpanSender(endpoint, run=config.run.name, key="--otlp")
    sent, waiting = 0, list[Span]()
    for span in spans_of_window(recording, first_timeline(config.run_folder), since, until):
        waiting.append(span)
        if len(waiting) == AT_ONCE:
            sent, waiting = sent + _sent(sender, waiting), []
    sent += _sent(sender, waiting)
    sender.close()
    return sent


def _sent(sender: SpanSender, spans: Sequence[Span]) -> int:
    if spans and (problem := sender.send(spans)):
        raise ConfigError(f"--otlp: {sender.endpoint} takes no spans: {problem}")
    return len(spans)


def _window(recording: Recording, start: float | None, seconds: float) -> tuple[float, float]:
    """Return the begin and end of the window: `start` seconds after the first event, or the last `seconds`."""
    first, last = math.inf, -math.inf
    for event in recording.events():
        first, last = min(first, event.at), max(last, event.at + event.seconds)
    if first > last:
        raise ConfigError("the run's folder holds no recorded events; they are kept with recording.events_mb above 0")
    since = max(first, last - seconds) if start is None else first + start
    if since > last:
        raise ConfigError(f"--from {start:g} is after the last recorded event; the recording has {last - first:.0f} s")
    return since, since + seconds


VERBS = (
    Verb(
        words="trace",
        help="Write a time window of the recorded events as a trace for Perfetto, or send it over OTLP.",
        run=trace,
        options=(
            Option(name="seconds", value="S", read=float, least=0.001, help=f"length of the window ({SECONDS:g})"),
            Option(
                name="from",
                value="S",
                read=float,
                least=0,
                help="its begin, in seconds after the first event; default: the end",
            ),
            Option(name="out", value="FILE", help="where to write it (trace.json)"),
            Option(name="otlp", value="URL", help="send it there instead, as OpenTelemetry spans over OTLP/HTTP (extra otel)"),
        ),
    ),
)
