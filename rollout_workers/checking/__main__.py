"""`async-rl env check [WHAT]`: play some episodes, show them, and exit with code 2 if there are problems."""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rich.console import Console

from async_rl.cli.env import CHECK, arguments, config_words
from async_rl.cli.grammar import CommandLine, read
from async_rl.config import Config
from async_rl.config.loading import load
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard
from async_rl.protocols import EpisodeContext
from async_rl.telemetry import configure_logs
from async_rl.types import Ticket
from rollout_workers.checking.findings import Findings, judge
from rollout_workers.checking.printing import as_json, show
from rollout_workers.checking.respondents import open_respondents
from rollout_workers.checking.trials import EnvironmentTrials, TrialSettings, chosen, try_environment
from rollout_workers.gateway import open_gateway
from rollout_workers.graders import open_graders

NO_TICKET = Ticket(id="check", task_index=0, version=0, attempt=1)


def main(words: Sequence[str]) -> None:
    guard()
    line = read(CHECK, words)
    config = load(config_words(line))
    configure_logs("check")
    seen = asyncio.run(check(config, line))
    wrong = [played.section.label for played, findings in seen if findings.problems]
    if wrong:
        count = sum(len(findings.problems) for _, findings in seen)
        raise ConfigError(f"{', '.join(wrong)}: {count} {'thing is' if count == 1 else 'things are'} wrong, see above")


async def check(config: Config, line: CommandLine) -> list[tuple[EnvironmentTrials, Findings]]:
    given = {"args": args} if (args := arguments(line.text("args"))) is not None else {}
    sections = chosen(config.environments, line.operands[0] if line.operands else "", **given)
    script, model = line.text("script"), line.text("model")
    count = line.integer("episodes", 3)
    seen: list[tuple[EnvironmentTrials, Findings]] = []
    async with (
        open_respondents(config, script=script, model=model) as respondents,
        _open_settings(config, respondents.context_tokens) as settings,
    ):
        for section in sections:
            one = await try_environment(section, settings, count, respondents.answerers)
            limits = {"context_tokens": respondents.context_tokens, "max_tokens": config.sampling.max_tokens}
            findings = judge(one, respondents.tokenizer, **limits)
            seen.append((one, findings))
            if not line.has("json"):
                show(Console(highlight=False, markup=False, emoji=False, soft_wrap=True), one, findings, respondents.tokenizer)
    if line.has("json"):
        print(json.dumps({"environments": [as_json(*each) for each in seen]}))
    return seen


@asynccontextmanager
async def _open_settings(config: Config, context_tokens: int) -> AsyncGenerator[TrialSettings]:
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(open_graders(config.worker.grader_processes))
        gateway = await opened.enter_async_context(
            open_gateway(config.worker.gateway, context_tokens=context_tokens, run_token=secrets.token_hex(16))
        )
        policies: dict[str, Any] = {}
        if config.policies:
            from async_rl.megatron.parallel import resolve_device  # late: only a model needs torch
            from rollout_workers.policies import open_policies

            policies |= await opened.enter_async_context(open_policies(config.policies, device=resolve_device(config.device)))
        context = EpisodeContext(ticket=NO_TICKET, sibling=0, seed=0, gateway=gateway, policies=policies)
        yield TrialSettings(worker=config.worker, group_size=config.batch.group_size, seed=config.run.seed, context=context)


if __name__ == "__main__":
    with boundary("async-rl env check"):
        main(sys.argv[1:])
