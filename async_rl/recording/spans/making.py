"""Makes spans from what is recorded: a trace per group, per step and per push.

group                       a ticket, from its reservation until its step was trained
  roll out                  in a worker
    task                    the environment poses it
    rollout                 an episode
      engine queue, generation, environment, grading
  queue                     committed, ready in the buffer
  wait for the step         taken by the learner
  train                     linked to the step
  wait for the checkpoint   until the one that contains it
step                        linked to its groups: wait for groups, checkpoint
push                        linked to its step: swap, in each worker; generations are linked to the push of their weights
blocked                     code that blocked a worker
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from async_rl.recording.events import Event
from async_rl.recording.lives import Life, LifeSpan, life_of
from async_rl.recording.reading import Recording
from async_rl.recording.recorded import RecordedGroup, RecordedRollout
from async_rl.recording.spans.span import Span, SpanId, Value, is_chosen, span_of, trace_of

LEARNER, BUFFER = "learner", "buffer"
EVENTS = ("start", "take", "step", "checkpoint", "push", "swap", "blocked")
"""The kinds of events that spans are made of, beside groups."""
MOST_LINKS = 128
"""Links of a span, as the specification of OpenTelemetry proposes."""
GROUPS_REMEMBERED = 100_000
"""Trained groups that no checkpoint contains yet."""

_STAGES = {
    "task": "task",
    "queue": "engine queue",
    "inference": "generation",
    "environment": "environment",
    "reward": "grading",
}
_AFTERWARDS = {"in queue": ("queue", BUFFER), "taken": ("wait for the step", LEARNER), "trained": ("train", LEARNER)}
"""Stretches of a life that follow the rolling out -> name and process of their spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """A group that waits for its checkpoint."""

    step: int
    root: SpanId
    at: float


class SpanMaker:
    """Makes the spans of one run from its events and groups, given in about the order in which they ended."""

    def __init__(self, run: str, *, share: float = 1.0) -> None:
        """`run`: its id. `share`: the part of the groups that gets spans; steps and pushes always get them."""
        self._run, self._share = run, share
        self._timeline = ""
        """Id of the learner's timeline: one that resumes may train the same steps again."""
        self._trained: deque[_Trained] = deque(maxlen=GROUPS_REMEMBERED)

    # -- groups ---------------------------------------------------------------------------------------------------
    def of_group(self, group: RecordedGroup) -> list[Span]:
        trace = trace_of(self._run, f"group {group.id}")
        life = life_of(group, None)
        if not life.spans or not is_chosen(trace, self._share):
            return []
        root, worker, facts = span_of(trace, f"group {self._timeline}"), group.content.worker, group.facts
        begin, end = min(span.start for span in life.spans), max(span.stop for span in life.spans)
        made = [Span(name="group", process=worker, id=root, start=begin, stop=end, attributes=_about(group))]
        if facts.step is not None:
            self._trained.append(_Trained(step=facts.step, root=root, at=end))
        for span in life.spans:
            if span.what == "rolled out":
                rolling = span_of(trace, "roll out")
                made.append(
                    Span(
                        name="roll out", process=worker, id=rolling, parent=root.span, start=span.start, stop=span.stop,
                        attributes={"async_rl.rollouts": len(group.content.rollouts)},
                    )
                )  # fmt: skip
                made += self._episodes(group, life, span, rolling)
            elif (after := _AFTERWARDS.get(span.what)) is not None:
                name, process = after
                links = (self._step(facts.step),) if span.what == "trained" and facts.step is not None else ()
                own = span_of(trace, f"{name} {self._timeline}")
                made.append(
                    Span(
                        name=name, process=process, id=own, parent=root.span, start=span.start, stop=span.stop, links=links
                    )
                )  # fmt: skip
        return made

    def _episodes(self, group: RecordedGroup, life: Life, whole: LifeSpan, rolling: SpanId) -> Iterator[Span]:
        """Yield the rollouts of a group and what they did."""
        worker, trace = group.content.worker, rolling.trace
        stages: defaultdict[int, list[LifeSpan]] = defaultdict(list)
        for span in life.spans:
            if span.what in _STAGES:
                stages[span.sibling].append(span)
        for rollout in group.rollouts:
            own, done = span_of(trace, f"rollout {rollout.sibling}"), stages[rollout.sibling]
            failure = rollout.content.failure
            yield Span(
                name="rollout",
                process=worker,
                id=own,
                parent=rolling.span,
                start=min((span.start for span in done), default=whole.start),
                stop=max((span.stop for span in done), default=whole.stop),
                attributes=_about_rollout(rollout),
                error=f"{failure.boundary}: {failure.kind}" if failure is not None else "",
            )
        for sibling, done in stages.items():
            parent = rolling if sibling < 0 else span_of(trace, f"rollout {sibling}")
            for number, span in enumerate(done):
                versions = {span.oldest_version, span.newest_version} - {-1}
                about: dict[str, Value] = {"async_rl.version.oldest": min(versions)} if versions else {}
                about |= {"async_rl.version.newest": max(versions)} if versions else {}
                yield Span(
                    name=_STAGES[span.what],
                    process=worker,
                    id=span_of(trace, f"rollout {sibling} {span.what} {number}"),
                    parent=parent.span,
                    start=span.start,
                    stop=span.stop,
                    attributes=about,
                    links=tuple(self._push(version) for version in sorted(versions)),
                )

    # -- events ---------------------------------------------------------------------------------------------------
    def of_event(self, event: Event) -> list[Span]:
        match event.kind:
            case "start":
                self._timeline = str(event.fields["timeline"])
                self._trained.clear()  # a checkpoint contains them already, or they are trained again
            case "take":
                step = self._step(event.fields["step"])
                return [self._part("wait for groups", event, step)]
            case "step":
                return [self._of_step(event)]
            case "checkpoint":
                step = self._step(event.fields["step"])
                return [self._part("checkpoint", event, step), *self._contained(event)]
            case "push":
                return [self._of_push(event)]
            case "swap":
                return [self._of_swap(event)]
            case "blocked":
                worker = str(event.fields["worker"])
                own = span_of(trace_of(self._run, f"blocked {worker} {event.at}"), "blocked")
                place = str(event.fields["place"])
                return [self._whole("blocked", event, own, process=worker, error=f"code blocks the worker at {place}")]
            case _:
                pass
        return []

    def _of_step(self, event: Event) -> Span:
        groups = [str(group) for group in event.fields.get("groups", ())]
        traces = [trace_of(self._run, f"group {group}") for group in groups]
        links = [span_of(trace, f"group {self._timeline}") for trace in traces if is_chosen(trace, self._share)]
        error = "its loss or gradient was not finite" if event.fields.get("skipped") else ""
        return self._whole("step", event, self._step(event.fields["step"]), links=links[:MOST_LINKS], error=error)

    def _of_push(self, event: Event) -> Span:
        own, dropped = self._push(event.fields["version"]), event.fields.get("dropped") or {}
        error = "; ".join(f"{worker}: {why}" for worker, why in dropped.items())
        step = event.fields.get("step")
        return self._whole("push", event, own, links=[self._step(step)] if step is not None else (), error=error)

    def _of_swap(self, event: Event) -> Span:
        worker, push = str(event.fields["worker"]), self._push(event.fields["version"])
        own = span_of(push.trace, f"swap {worker} {event.at}")
        return self._whole("swap", event, own, parent=push.span, process=worker)

    def _contained(self, event: Event) -> Iterator[Span]:
        """Yield the wait of the groups that a checkpoint is the first to contain."""
        saved_step, complete = int(event.fields["step"]), event.at + event.seconds
        while self._trained and self._trained[0].step <= saved_step:
            group = self._trained.popleft()
            yield Span(
                name="wait for the checkpoint",
                process=LEARNER,
                id=span_of(group.root.trace, f"wait for the checkpoint {self._timeline}"),
                parent=group.root.span,
                start=group.at,
                stop=max(complete, group.at),
                attributes={"async_rl.step": saved_step},
                links=(self._step(saved_step),),
            )

    def _step(self, step: int) -> SpanId:
        return span_of(trace_of(self._run, f"step {step} {self._timeline}"), "step")

    def _push(self, version: int) -> SpanId:
        return span_of(trace_of(self._run, f"push {version}"), "push")

    def _part(self, name: str, event: Event, of: SpanId) -> Span:
        return self._whole(name, event, span_of(of.trace, name), parent=of.span)

    def _whole(
        self,
        name: str,
        event: Event,
        own: SpanId,
        *,
        parent: int | None = None,
        process: str = LEARNER,
        links: Iterable[SpanId] = (),
        error: str = "",
    ) -> Span:
        """Return the span of an event, with the fields that are plain values."""
        plain = {f"async_rl.{name}": value for name, value in event.fields.items() if isinstance(value, str | int | float)}
        return Span(
            name=name, process=process, id=own, parent=parent, start=event.at, stop=event.at + event.seconds,
            attributes=plain, links=tuple(links), error=error,
        )  # fmt: skip


def spans_of_window(recording: Recording, run: str, since: float, until: float) -> Iterator[Span]:
    """Yield the spans of what a run recorded from `since` to `until`, as if it were sent while the run lived."""
    maker = SpanMaker(run)
    events = [(event.at + event.seconds, event) for event in recording.events(until=until, kinds=EVENTS)]
    steps = {event.fields["step"]: ended for ended, event in events if event.kind == "step"}
    groups = [(steps.get(row.step, row.at), row) for row in recording.groups()]
    for at, each in sorted([*events, *((at, row) for at, row in groups if since <= at <= until)], key=lambda pair: pair[0]):
        if isinstance(each, Event):
            spans = maker.of_event(each)
            yield from spans if since <= at <= until else ()
        elif (group := recording.group(each.id)) is not None:
            yield from maker.of_group(group)


def _about(group: RecordedGroup) -> Mapping[str, Value]:
    facts = group.facts
    known: dict[str, Value | None] = {
        "group": group.id,
        "task": group.task.key,
        "environment": group.task.environment,
        "worker": group.content.worker,
        "attempt": facts.attempt,
        "fate": facts.fate,
        "step": facts.step,
        "age": group.age,
        "version_at_commit": facts.version_at_commit,
        "version_at_take": facts.version_at_take,
    }
    return {f"async_rl.{name}": value for name, value in known.items() if value is not None}


def _about_rollout(rollout: RecordedRollout) -> Mapping[str, Value]:
    known: dict[str, Value | None] = {
        "rollout": rollout.id,
        "status": rollout.content.status.value,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "sampled": rollout.num_sampled,
        "tokens": rollout.num_tokens,
        "turns": int(rollout.content.metrics.get("turns", 1)),
    }
    return {f"async_rl.{name}": value for name, value in known.items() if value is not None}
