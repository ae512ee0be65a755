"""`buffer show`: a group for people: a table of its rollouts, then one rollout as a conversation or token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from async_rl.cli.grammar import CommandLine
from async_rl.errors import ConfigError
from async_rl.payloads.as_json import rollout_fields, task_fields
from async_rl.protocols import Tokenizer
from async_rl.types import Rollout, RolloutGroup, Status
from buffer.tools.find_group import FoundGroup, find
from buffer.tools.open_run import OpenRun
from buffer.tools.output import Cell, console, one_line, print_json, print_table, visible
from buffer.tools.tokens import print_tokens, probabilities, tokenizer_of, tokens_of

ABSTRACT = 80
"""Characters of a prompt that the overview shows."""
FACTS = ("environment", "worker", "task", "attempt", "oldest_version", "age", "tokens", "bytes", "size")
"""Facts shown of a group, where they are known."""


async def show(run: OpenRun, line: CommandLine) -> None:
    show_group(await find(run, line.operands[0]), run, line)


def show_group(found: FoundGroup, run: OpenRun, line: CommandLine) -> None:
    with_tokens = line.has("tokens")
    tokenizer = tokenizer_of(run.config) if with_tokens else None
    chosen = _chosen_rollouts(found.group, line.integer("rollout"))
    if line.has("json"):
        print_json(_as_document(found, chosen, tokenizer, with_tokens=with_tokens))
        return
    page = console()
    print_found(page, found)
    if found.group is not None and (with_tokens or line.has("rollout")):
        for index in chosen:
            page.print()
            _print_rollout(page, index, found.group.rollouts[index], tokenizer, with_tokens=with_tokens)


def print_found(page: Console, found: FoundGroup) -> None:
    page.print(Text(f"{found.id}: {visible(found.sentence)}", "bold"))
    facts = {name: found.facts[name] for name in FACTS if found.facts.get(name) not in (None, "")}
    if facts:
        page.print(visible(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())))
    if found.group is not None:
        _print_overview(page, found.group)


def _print_overview(page: Console, group: RolloutGroup) -> None:
    task = group.task
    prompt = task.prompt if isinstance(task.prompt, str) else task.prompt[-1].content if task.prompt else ""
    page.print(f"task {visible(task.key)} of {visible(task.environment)}: {one_line(prompt, ABSTRACT)}")
    if task.answer:
        page.print(f"answer: {one_line(task.answer, ABSTRACT)}")
    parts = sorted({name for rollout in group.rollouts for name in rollout.reward_parts})
    page.print()
    head = ["rollout", "status", "reward", *parts, "tokens", "versions", "mean p", "least p", "ends with"]
    print_table(page, head, (_row(index, rollout, parts) for index, rollout in enumerate(group.rollouts)))


def _row(index: int, rollout: Rollout, parts: Sequence[str]) -> list[Cell]:
    chances = probabilities(rollout)
    scores = [rollout.reward_parts.get(part) for part in parts]
    said = [
        rollout.num_sampled,
        versions(rollout),
        fmean(chances) if chances else None,
        min(chances, default=None),
        _outcome(rollout),
    ]
    return [index, rollout.status.value, reward(rollout), *scores, *said]


def _print_rollout(page: Console, index: int, rollout: Rollout, tokenizer: Tokenizer | None, *, with_tokens: bool) -> None:
    page.print(Text(f"rollout {index}: {visible(_result_line(rollout))}", "bold"))
    for name, value in rollout.metrics.items():
        page.print(visible(f"  {name} {value:g}"), style="dim")
    if not with_tokens:
        for message in rollout.conversation:
            page.print(Text(f"{visible(message.role)}:", "bold cyan"))
            page.print(Text(visible(message.content)))
        if not rollout.conversation:
            page.print("it recorded no conversation; --tokens shows what was sampled")
        return
    for number, sample in enumerate(rollout.samples):
        if len(rollout.samples) > 1:
            page.print(f"sample {number} of {len(rollout.samples)}")
        print_tokens(page, sample, tokenizer)


def reward(rollout: Rollout) -> float | None:
    return None if rollout.status is Status.FAILED else rollout.reward


def versions(rollout: Rollout) -> str:
    """Return the versions that sampled a rollout, in order: `3` or `3>4`."""
    seen = [span.version for sample in rollout.samples for span in sample.versions]
    return ">".join(str(version) for version in dict.fromkeys(seen))


def _result_line(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return f"{rollout.status.value} in {rollout.failure.boundary}, {rollout.failure.kind}: {rollout.failure.message}"
    parts = " + ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items())
    return f"{rollout.status.value}, reward {rollout.reward:g}" + (f" ({parts})" if parts else "")


def _outcome(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return one_line(f"{rollout.failure.kind}: {rollout.failure.message}", ABSTRACT)
    return one_line(rollout.conversation[-1].content, ABSTRACT) if rollout.conversation else ""


def _chosen_rollouts(group: RolloutGroup | None, wanted: int | None) -> Sequence[int]:
    if group is None:
        return ()
    if wanted is None:
        return range(len(group.rollouts))
    if not 0 <= wanted < len(group.rollouts):
        raise ConfigError(f"{group.id} has no rollout {wanted}; it has {len(group.rollouts)}, counted from 0")
    return [wanted]


def _as_document(found: FoundGroup, chosen: Sequence[int], tokenizer: Tokenizer | None, *, with_tokens: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"id": found.id, "place": found.place, "says": found.sentence, "facts": found.facts}
    group = found.group
    if group is None:
        return document
    rollouts = [_rollout_document(index, group.rollouts[index]) for index in chosen]
    if with_tokens:
        for index, rollout in zip(chosen, rollouts, strict=True):
            samples = group.rollouts[index].samples
            rollout["samples"] = [[asdict(token) for token in tokens_of(sample, tokenizer)] for sample in samples]
    return document | {"worker": group.worker, "task": task_fields(group.task), "rollouts": rollouts}


def _rollout_document(index: int, rollout: Rollout) -> dict[str, Any]:
    chances = probabilities(rollout)
    return {
        "rollout": index,
        **rollout_fields(rollout),
        "tokens": rollout.num_sampled,
        "versions": [asdict(span) for sample in rollout.samples for span in sample.versions],
        "mean_probability": fmean(chances) if chances else None,
        "least_probability": min(chances, default=None),
    }
