"""Print a check: each episode with its conversation and its token row, then the problems."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from async_rl.protocols import Tokenizer
from async_rl.types import Rollout, Sample
from rollout_workers.checking.findings import Findings
from rollout_workers.checking.trials import EnvironmentTrials, Trial

TOKENS_SHOWN = 240
GIVEN, SAMPLED = "dim", "bold green"


def show(page: Console, seen: EnvironmentTrials, findings: Findings, tokenizer: Tokenizer) -> None:
    page.print(Rule(Text(seen.section.label, "bold")))
    for trial in seen.trials:
        _show_trial(page, trial, tokenizer)
    for problem in findings.problems:
        page.print(Text.assemble(("wrong  ", "bold red"), _visible(problem)))
    for note in findings.notes:
        page.print(Text.assemble(("note   ", "bold yellow"), _visible(note)))
    if not findings.problems:
        page.print(Text.assemble(("fine   ", "bold green"), f"{len(seen.trials)} episodes of {len(seen.tasks)} tasks"))


def _show_trial(page: Console, trial: Trial, tokenizer: Tokenizer) -> None:
    rollout = trial.rollout
    color = "red" if rollout.failure is not None else "cyan"
    page.print(Text.assemble((trial.task.key, "bold"), f", answered by {trial.answer}: ", (_outcome(rollout), color)))
    for message in rollout.conversation:
        page.print(Text.assemble(f"  {message.role:>9}  ", _visible(message.content)))
    for sample in rollout.samples:
        page.print(Text.assemble("     tokens  ", tokens_of(sample, tokenizer)))
    others_s = max(0.0, trial.seconds - trial.generating_s)  # siblings that play together generate concurrently
    tokens = f"{rollout.num_sampled} tokens sampled of {sum(map(len, rollout.samples))}"
    timings = f"{trial.generating_s:.3f} s generating, {others_s:.3f} s environment and reward"
    page.print(Text(f"             {tokens}; {timings}", GIVEN))


def _outcome(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return f"failed ({rollout.failure.boundary}): {_visible(rollout.failure.message)}"
    parts = ", ".join(f"{name} {value:g}" for name, value in rollout.reward_parts.items())
    return f"{rollout.status}, reward {rollout.reward:g}{f' ({parts})' if parts else ''}"


def tokens_of(sample: Sample, tokenizer: Tokenizer) -> Text:
    """The token row as text; sampled tokens, the only ones trained on, are highlighted."""
    row = Text()
    for token_id, is_sampled in list(zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True))[:TOKENS_SHOWN]:
        piece = tokenizer.decode([token_id])
        row.append(_visible(piece).replace("\n", "⏎") if piece else f"<{token_id}>", SAMPLED if is_sampled else GIVEN)
    if len(sample) > TOKENS_SHOWN:
        row.append(f" … and {len(sample) - TOKENS_SHOWN} more", GIVEN)
    return row


def _visible(text: str) -> str:
    """Replace control characters, which a terminal would obey: texts come from environments and models."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text)


def as_json(seen: EnvironmentTrials, findings: Findings) -> Mapping[str, Any]:
    return {
        "name": seen.section.label,
        "type": seen.section.type,
        "problems": findings.problems,
        "notes": findings.notes,
        "episodes": [
            {
                "task": trial.task.key,
                "answer": trial.answer,
                "status": trial.rollout.status,
                "reward": None if trial.rollout.failure is not None else trial.rollout.reward,
                "parts": dict(trial.rollout.reward_parts),
                "failure": None if trial.rollout.failure is None else trial.rollout.failure.message,
                "sampled": trial.rollout.num_sampled,
                "seconds": trial.seconds,
                "generating_s": trial.generating_s,
            }
            for trial in seen.trials
        ],
    }
