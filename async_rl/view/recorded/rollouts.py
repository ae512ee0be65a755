"""What the page "Rollouts" shows, as documents for JSON: a filtered list, one rollout, its tokens, its group, the ledger of
fates.

Every document is bounded: lists come in pages, texts and token rows in pieces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from statistics import fmean
from typing import Any, TypeVar, cast, get_args

from async_rl.config import Config
from async_rl.config.pretrained import described
from async_rl.errors import ConfigError
from async_rl.protocols import Tokenizer
from async_rl.recording import (
    Fates,
    LetGo,
    Life,
    LifeSpan,
    RecordedGroup,
    RecordedRollout,
    Recording,
    RolloutFilter,
    RolloutRow,
)
from async_rl.recording.selection import Order
from async_rl.tokenization.tokenizers import open_tokenizer
from async_rl.types import Message, Sample
from async_rl.view.recorded.stages import BLOCKED, STAGES, blocked_s, blocks_by_worker, latest_stages

T = TypeVar("T", int, float)

ROWS = 100
"""Rollouts of a list at most."""
MESSAGES = 100
"""Messages of a conversation per answer."""
FOLDED = 4000
"""Characters of a text that are sent with its rollout."""
PIECE = 100_000
"""Characters of a text per further answer."""
TOKENS = 2000
"""Tokens per answer."""
JOINED = 4
"""Tokens that may make up one character."""

FATES = {
    "trained": "trained in a step that a checkpoint contains",
    "in_flight/reserved": "being rolled out now",
    "in_flight/ready": "ready in the buffer for the learner",
    "in_flight/again": "trained, and ready for another use",
    "in_flight/taken": "in training, or trained since the last checkpoint",
    "left_over/reserved": "being rolled out when the run ended",
    "left_over/ready": "ready in the buffer when the run ended",
    "left_over/again": "trained, and ready for another use when the run ended",
    "left_over/taken": "trained after the last checkpoint, so a resumed run trains it again",
    "dropped/no_signal": "all its rewards are equal, so it has no advantages",
    "dropped/stale": "older than staleness.max_age before it was taken",
    "dropped/failed": "every rollout failed",
    "dropped/abandoned": "its worker handed it back; the task was rolled out again",
    "dropped/lease_lost": "its worker stopped renewing it; the task was rolled out again",
    "dropped/detached": "its environment was detached",
    "dropped/quarantined": "the buffer refused its content",
    "dropped/lost_to_rollback": "trained after the checkpoint that the run resumed from",
}


class RolloutBrowser:
    """Answers the page's questions about one run. Not thread-safe."""

    def __init__(self, recording: Recording, config: Config | None, is_running: Callable[[], bool] = lambda: True) -> None:
        """`config`: the run's, for its tokenizer; None: tokens are shown as ids."""
        self._recording, self._config, self._is_running = recording, config, is_running

    def read_index(self) -> None:
        """Read the index of the rollouts: later answers read what was added to it since."""
        self._recording.groups()

    # -- the list -------------------------------------------------------------------------------------------------
    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the rollouts that a query accepts: fields of `RolloutFilter`, `order`, `offset`, `limit`.

        Raises ConfigError.
        """
        wanted, order, offset, limit = read_query(query)
        found = self._recording.rollouts(wanted, offset=offset, limit=limit, order=order)
        groups = self._recording.groups()
        return {
            "rows": [_row(row) for row in found.rows],
            "total": found.total,
            "offset": offset,
            "is_complete": found.is_complete,
            "searched": found.searched,
            "recorded": sum(len(group.numbers) for group in groups),
            "environments": sorted({group.environment for group in groups}),
            "fates": dict(Counter(group.fate for group in groups)),
            "let_go": _let_go(found.let_go),
        }

    # -- one rollout ----------------------------------------------------------------------------------------------
    def rollout(self, rollout_id: str) -> dict[str, Any] | None:
        rollout = self._recording.rollout(rollout_id)
        if rollout is None:
            return None
        group, content, facts = rollout.group, rollout.content, rollout.group.facts
        life = self._recording.life(group)
        rewards = [each.reward for each in group.rollouts if each.reward is not None]
        return {
            **_facts(group),
            "id": rollout.id,
            "sibling": rollout.sibling,
            "siblings": [_sibling(each) for each in group.rollouts],
            "status": content.status.value,
            "failure": asdict(content.failure) if content.failure is not None else None,
            "reward": rollout.reward,
            "advantage": rollout.advantage,
            "group_mean": fmean(rewards) if rewards else None,
            "reward_parts": dict(content.reward_parts),
            "metrics": dict(content.metrics),
            **self.messages(rollout_id, 0),
            "samples": [{"tokens": len(sample), "sampled": sample.num_sampled} for sample in content.samples],
            "is_head": facts.is_head,
            "keeps_old_keys": self._keeps_old_keys,
            "life": self._life(group, life.of(rollout.sibling)),
            "checkpoint_step": life.checkpoint_step,
            "missing": list(_missing(group, life)),
        }

    def _life(self, group: RecordedGroup, spans: Sequence[LifeSpan]) -> list[dict[str, Any]]:
        """Return spans with the seconds in which the worker was blocked, and these blocks as spans."""
        from_s, to_s = group.facts.reserved_at, group.facts.ready_at
        if not from_s < to_s:
            return [asdict(span) | {"blocked_s": 0.0, "detail": ""} for span in spans]
        events = self._recording.events(since=from_s, until=to_s, kinds=(BLOCKED,))
        blocks = blocks_by_worker(events).get(group.content.worker, ())
        described = [
            asdict(span) | {"blocked_s": blocked_s(span.start, span.stop, blocks) if span.what in STAGES else 0.0, "detail": ""}
            for span in spans
        ]
        cut = [(max(block.start, from_s), min(block.stop, to_s), block.place) for block in blocks]
        return described + [
            asdict(LifeSpan(what=BLOCKED, start=start, stop=stop)) | {"blocked_s": 0.0, "detail": place}
            for start, stop, place in cut
        ]

    def messages(self, rollout_id: str, start: int) -> dict[str, Any]:
        """Return messages of a conversation from number `start` on, each with the head of its text. The first is number 0."""
        rollout = self._recording.rollout(rollout_id)
        said = _conversation(rollout) if rollout is not None else ()
        shown = [_message(number, said[number]) for number in range(start, min(start + MESSAGES, len(said)))]
        return {"messages": shown, "num_messages": len(said)}

    def text(self, rollout_id: str, message: int, start: int) -> dict[str, Any] | None:
        """Return a piece of a message's text."""
        rollout = self._recording.rollout(rollout_id)
        said = _conversation(rollout) if rollout is not None else ()
        if not 0 <= message < len(said):
            return None
        content = said[message].content
        return {"text": content[start : start + PIECE], "start": start, "length": len(content)}

    def tokens(self, rollout_id: str, number: int, start: int) -> dict[str, Any] | None:
        """Return the tokens of sample `number` from `start` on, as one list per property.

        `keys` is the oldest version that computed keys and values of its answer, where that differs from the token's own.
        """
        rollout = self._recording.rollout(rollout_id)
        if rollout is None or not 0 <= number < len(rollout.content.samples):
            return None
        sample = rollout.content.samples[number]
        stop = min(start + TOKENS, len(sample))
        token_ids, mask = sample.token_ids[start:stop].tolist(), sample.loss_mask[start:stop].tolist()
        versions = _versions(sample)
        keys = _oldest_keys(sample, versions) if self._keeps_old_keys else [None] * len(sample)
        return {
            "start": start,
            "total": len(sample),
            "ids": token_ids,
            "texts": texts_of(token_ids, self._tokenizer),
            "logprobs": [
                value if sampled else None for value, sampled in zip(sample.logprobs[start:stop].tolist(), mask, strict=True)
            ],
            "versions": versions[start:stop],
            "keys": keys[start:stop],
            "has_text": self._tokenizer is not None,
        }

    # -- a group --------------------------------------------------------------------------------------------------
    def group(self, group_id: str) -> dict[str, Any] | None:
        group = self._recording.group(group_id)
        if group is None:
            return None
        prompt = group.task.prompt
        text = prompt if isinstance(prompt, str) else "\n".join(message.content for message in prompt)
        scored = [each for each in group.rollouts if each.reward is not None]
        return {
            **_facts(group),
            "prompt": _folded(text),
            "answer": _folded(group.task.answer),
            "is_head": group.facts.is_head,
            "siblings": [
                {**_sibling(each), "parts": dict(each.content.reward_parts), "ends": _ends(each)} for each in group.rollouts
            ],
            "best": max(scored, key=lambda each: each.content.reward).sibling if scored else None,
            "worst": min(scored, key=lambda each: each.content.reward).sibling if scored else None,
        }

    # -- all of them ----------------------------------------------------------------------------------------------
    def stages(self) -> dict[str, Any]:
        """Return the mean seconds of the latest trained episodes by stage."""
        found = latest_stages(self._recording)
        names = [name for name in (*STAGES, BLOCKED) if found.seconds.get(name)]
        return {"episodes": found.episodes, "stages": [(name, found.mean(name)) for name in names]}

    # -- fates ----------------------------------------------------------------------------------------------------
    def fates(self) -> dict[str, Any] | None:
        """Return the ledger of the last step; None before the first."""
        fates = self._recording.fates()
        return ledger_of(fates, is_running=self._is_running()) if fates is not None else None

    @property
    def _keeps_old_keys(self) -> bool:
        return self._config is not None and self._config.worker.kv_on_swap == "keep"

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return open_tokenizer(described(self._config.tokenizer)) if self._config is not None else None
        except ConfigError:  # it is not on this machine and cannot be fetched: ids are shown
            return None


# -- the query ----------------------------------------------------------------------------------------------------------
_WORDS = ("environment", "fate", "status", "group", "task", "worker", "text")
_NUMBERS = {
    **dict.fromkeys(("min_reward", "max_reward"), float),
    **dict.fromkeys(("min_age", "max_age", "min_step", "max_step", "min_sampled", "max_sampled"), int),
}


def read_query(query: Mapping[str, str]) -> tuple[RolloutFilter, Order, int, int]:
    """Return filter, order, offset and limit. Empty values are as if they were not given. Raises ConfigError."""
    given = {name: value for name, value in query.items() if value}
    known = {*_WORDS, *_NUMBERS, "order", "offset", "limit"}
    if unknown := given.keys() - known:
        raise ConfigError(f"{min(unknown)!r} is not a filter of rollouts; there are {', '.join(sorted(known))}")
    order = given.get("order", "newest")
    if order not in get_args(Order):
        raise ConfigError(f"order is {order!r}, and must be one of {', '.join(get_args(Order))}")
    words: dict[str, Any] = {name: given[name] for name in _WORDS if name in given}
    numbers: dict[str, Any] = {name: _number(name, given[name], kind) for name, kind in _NUMBERS.items() if name in given}
    offset, limit = _number("offset", given.get("offset", "0"), int), _number("limit", given.get("limit", "50"), int)
    return RolloutFilter(**words, **numbers), cast("Order", order), max(0, offset), min(max(0, limit), ROWS)


def _number(name: str, text: str, kind: type[T]) -> T:
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} is {text[:40]!r}, and must be a{'n integer' if kind is int else ' number'}") from error


# -- parts of a document ------------------------------------------------------------------------------------------------
def _row(row: RolloutRow) -> dict[str, Any]:
    group = row.group
    return {
        "id": row.id,
        "environment": group.environment,
        "task": group.task,
        "worker": group.worker,
        "attempt": group.attempt,
        "at": group.at,
        "fate": group.fate,
        "step": group.step,
        "age": group.age,
        "status": row.status,
        "reward": row.reward,
        "sampled": row.sampled,
        "tokens": row.tokens,
        "turns": row.turns,
        "advantage": row.advantage,
        "seconds": row.seconds,
    }


def _facts(group: RecordedGroup) -> dict[str, Any]:
    facts = group.facts
    return {
        "group": group.id,
        "environment": group.task.environment,
        "task": group.task.key,
        "task_index": facts.task_index,
        "attempt": facts.attempt,
        "worker": group.content.worker,
        "fate": facts.fate,
        "step": facts.step,
        "age": group.age,
        "version_at_commit": facts.version_at_commit,
        "version_at_take": facts.version_at_take,
    }


def _sibling(rollout: RecordedRollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "sibling": rollout.sibling,
        "status": rollout.content.status.value,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
        "sampled": rollout.num_sampled,
        "samples": len(rollout.content.samples),
    }


def _conversation(rollout: RecordedRollout) -> Sequence[Message]:
    """Return the conversation; the prompt alone where none was recorded."""
    if rollout.content.conversation:
        return rollout.content.conversation
    prompt = rollout.group.task.prompt
    return (Message(role="user", content=prompt),) if isinstance(prompt, str) else prompt


def _message(number: int, message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": _folded(call.arguments), "id": call.id} for call in message.tool_calls]
    return {
        "number": number,
        "role": message.role,
        **_folded(message.content),
        "tool_calls": calls,
        "answers": message.tool_call_id,
    }


def _folded(text: str) -> dict[str, Any]:
    return {"text": text[:FOLDED], "length": len(text)}


def _ends(rollout: RecordedRollout) -> str:
    content = rollout.content
    if content.failure is not None:
        return f"{content.failure.boundary}, {content.failure.kind}: {content.failure.message}"[:FOLDED]
    answers = [message.content for message in content.conversation if message.role == "assistant"]
    return answers[-1][-FOLDED:] if answers else ""


def _let_go(let_go: LetGo) -> dict[str, Any]:
    return {**asdict(let_go), "is_everything_kept": let_go.is_everything_kept}


def _missing(group: RecordedGroup, life: Life) -> Iterator[str]:
    """Say which parts of a life are not recorded."""
    facts = group.facts
    if not facts.reserved_at:
        yield "when its ticket was reserved: its worker did not send times"
    elif all(span.sibling < 0 for span in life.spans):
        yield "what its episodes did: their stages are not recorded"
    if facts.step is None:
        yield f"a step: it was dropped ({facts.fate})"
        return
    if not facts.taken_at:
        yield "when the learner took it"
    if not facts.trained_at:
        yield "when its step was trained"
    if not facts.advantages:
        yield "an advantage: its objective has no single one per rollout, or an older release recorded it"
    if life.checkpoint_step is None:
        yield "a checkpoint: none contains its step yet, or its event is no longer kept"


# -- tokens -------------------------------------------------------------------------------------------------------------
def texts_of(token_ids: Sequence[int], tokenizer: Tokenizer | None) -> list[str]:
    """Return the text of each token; "" without a tokenizer.

    A character that several tokens make up is the text of the last of them.
    """
    if tokenizer is None:
        return [""] * len(token_ids)
    texts: list[str] = []
    for place, token_id in enumerate(token_ids):
        text = tokenizer.decode([token_id]) if 0 <= token_id < tokenizer.vocab_size else ""
        begun = 0  # tokens before this one that belong to its character
        if text == _BROKEN:
            while begun < min(JOINED - 1, place) and texts[place - begun - 1] == _BROKEN:
                begun += 1
                joined = tokenizer.decode(list(token_ids[place - begun : place + 1]))
                if _BROKEN not in joined:
                    texts[place - begun :], text = [""] * begun, joined
                    break
        texts.append(text)
    return texts


_BROKEN = "\N{REPLACEMENT CHARACTER}"


def _versions(sample: Sample) -> list[int | None]:
    versions: list[int | None] = [None] * len(sample)
    for span in sample.versions:
        versions[span.start : span.stop] = [span.version] * (span.stop - span.start)
    return versions


def _oldest_keys(sample: Sample, versions: Sequence[int | None]) -> list[int | None]:
    """Return for each sampled token the version that its answer began with, where it is older than the token's own.

    Keys and values of an answer stay those of the weights that computed them; each answer begins with keys of the live weights.
    """
    keys: list[int | None] = [None] * len(sample)
    began: int | None = None
    for position, (sampled, version) in enumerate(zip(sample.loss_mask.tolist(), versions, strict=True)):
        began = (version if began is None else began) if sampled else None
        if began is not None and version is not None and began < version:
            keys[position] = began
    return keys


# -- fates --------------------------------------------------------------------------------------------------------------
def ledger_of(fates: Fates, *, is_running: bool = True) -> dict[str, Any]:
    """Return a row per fate. After the end of a run, nothing is in flight: it is left over.

    The shares, in tenths of a percent, add up to 1000: what rounding leaves goes to the largest remainders.
    """
    counts = {"trained": fates.trained}
    open_fate = "in_flight" if is_running else "left_over"
    counts |= {f"{open_fate}/{state}": count for state, count in fates.in_flight.items() if count or is_running}
    counts |= {f"dropped/{reason}": count for reason, count in sorted(fates.dropped.items(), key=lambda each: -each[1])}
    known = sum(counts.values())
    if fates.issued != known:
        counts["unaccounted"] = fates.issued - known
    shares = _rounded(list(counts.values()))
    return {
        "at": fates.at,
        "step": fates.step,
        "issued": fates.issued,
        "rows": [
            {"fate": fate, "tickets": count, "permille": share, "help": FATES.get(fate, "")}
            for (fate, count), share in zip(counts.items(), shares, strict=True)
        ],
        "tokens": dict(fates.tokens),
    }


def _rounded(counts: Sequence[int]) -> list[int]:
    total = sum(counts)
    if not total:
        return [0] * len(counts)
    shares = [1000 * count // total for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda place: -(1000 * counts[place] % total))
    for place in by_remainder[: 1000 - sum(shares)]:
        shares[place] += 1
    return shares
