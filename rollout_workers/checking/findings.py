"""Pure: the problems of an environment, from its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from async_rl.protocols import Tokenizer
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Task
from rollout_workers.checking.stalls import EnvironmentStall
from rollout_workers.checking.trials import EnvironmentTrials, Trial

RIGHT = "right"
SETUP_S = 1.0
"""A package may block the loop for this long, for example to make a client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    problems: tuple[str, ...]
    """What would harm training."""
    notes: tuple[str, ...]
    """What is worth knowing."""


def judge(seen: EnvironmentTrials, tokenizer: Tokenizer, *, context_tokens: int, max_tokens: int) -> Findings:
    blocking = [stall for stall in seen.stalls if not _is_setup(stall)]
    lengths = [len(tokenizer.render(task.prompt)) for task in seen.tasks]
    problems = [
        *(f"a task cannot be posed: {failure.kind}: {failure.message}" for failure in seen.not_posed[:1]),
        *seen.impurities,
        *_failures(seen.trials),
        *too_long(lengths, context_tokens),
        *_unreadable(seen.tasks, tokenizer),
        *(f"it blocks the event loop for {stall.seconds:.1f} s at {stall.place}" for stall in blocking[:3]),
        *(f"it leaks {what}" for what in dict.fromkeys(seen.leaked)),
    ]
    equal = _equal_rewards(seen.trials)
    knows_the_answer = any(trial.answer == RIGHT for trial in seen.trials)
    if equal and knows_the_answer:
        problems.append(equal)
    notes = [
        *([equal] if equal and not knows_the_answer else []),
        *cramped(lengths, context_tokens, max_tokens),
        *_monotonous(seen.tasks),
        *_slow_setup([stall for stall in seen.stalls if _is_setup(stall)]),
    ]
    return Findings(problems=tuple(problems), notes=tuple(notes))


def _is_setup(stall: EnvironmentStall) -> bool:
    """A short stall inside a package, such as making an HTTP client: slow, but not a mistake."""
    return stall.is_in_package and stall.seconds < SETUP_S


def _slow_setup(stalls: Sequence[EnvironmentStall]) -> Iterator[str]:
    for place, times in Counter(stall.place for stall in stalls).items():
        longest = max(stall.seconds for stall in stalls if stall.place == place)
        yield (
            f"a package blocks the event loop for up to {longest:.1f} s at {place} ({times} times): what is slow to make, "
            "such as a client, can be made once in __aenter__"
        )


def _failures(trials: Sequence[Trial]) -> Iterator[str]:
    found = dict.fromkeys(
        f"an episode fails ({trial.rollout.failure.boundary}): {trial.rollout.failure.kind}: {trial.rollout.failure.message}"
        for trial in trials
        if trial.rollout.failure is not None
    )
    return iter(found)


def _equal_rewards(trials: Sequence[Trial]) -> str:
    scored = [trial for trial in trials if trial.rollout.failure is None]
    answers = list(dict.fromkeys(trial.answer for trial in scored))
    if len({trial.rollout.reward for trial in scored}) != 1 or len(scored) < 2:
        return ""
    worth = f"{scored[0].rollout.reward:g}"
    if len(answers) == 1:
        return f"every episode is worth {worth}: nothing would be learned from them"
    return f"all answers are worth {worth}, {', '.join(answers[:-1])} and {answers[-1]} alike: nothing would be learned"


def too_long(lengths: Sequence[int], context_tokens: int) -> Iterator[str]:
    if lengths and max(lengths) >= context_tokens:
        yield (
            f"a prompt has {max(lengths)} tokens, and a sequence at most {context_tokens} (model.max_sequence, or the model's "
            "positions): nothing can be answered"
        )


def cramped(lengths: Sequence[int], context_tokens: int, max_tokens: int) -> Iterator[str]:
    if lengths and context_tokens - max_tokens < max(lengths) < context_tokens:
        yield (
            f"a prompt has {max(lengths)} tokens: of the {max_tokens} that an answer may have (sampling.max_tokens) "
            f"only {context_tokens - max(lengths)} fit into a sequence of {context_tokens} (model.max_sequence)"
        )


def _unreadable(tasks: Sequence[Task], tokenizer: Tokenizer) -> Iterator[str]:
    if not isinstance(tokenizer, Characters):
        return
    for what, texts in {"prompts": map(_text, tasks), "answers": (task.answer for task in tasks)}.items():
        unknown = sorted({letter for text in texts for letter in text if tokenizer.unknown_id in tokenizer.encode(letter)})
        if unknown:
            yield f"the {what} hold characters that tokenizer.alphabet lacks: {''.join(unknown)!r}"


def _monotonous(tasks: Sequence[Task]) -> Iterator[str]:
    if len(tasks) > 1 and len({(_text(task), task.answer) for task in tasks}) == 1:
        yield f"the first {len(tasks)} tasks are all the same"


def _text(task: Task) -> str:
    prompt = task.prompt
    return prompt if isinstance(prompt, str) else "".join(f"{message.role}: {message.content}\n" for message in prompt)
