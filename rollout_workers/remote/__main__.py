"""`async-rl env serve TYPE`. It needs no torch, Megatron or Redis, so it runs in a small virtual environment."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from async_rl.cli.env import SERVE, section_of
from async_rl.cli.grammar import CommandLine, read
from async_rl.config.exposure import read_token
from async_rl.config.rollout import GatewayConfig
from async_rl.config.tokenizer import HuggingFaceTokenizer
from async_rl.errors import boundary
from async_rl.launch.package_guard import guard
from async_rl.supervision import drain_on_signals, stall_watchdog
from async_rl.telemetry import configure_logs
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.episodes.failure_log import FailureLog
from rollout_workers.episodes.leaked_tasks import track_episode_tasks
from rollout_workers.gateway import open_gateway
from rollout_workers.graders import open_graders
from rollout_workers.remote.server import EnvironmentServer

ANY_CONTEXT = 1 << 20
"""Never limits: the worker's model refuses what is too long."""

log = structlog.get_logger("environment")


def main(words: Sequence[str]) -> None:
    guard()
    line = read(SERVE, words)
    configure_logs("environment")
    asyncio.run(serve(line))


async def serve(line: CommandLine) -> None:
    section, token = section_of(line), read_token(line.text("token-file"), key="--token-file")
    folder = line.text("tokenizer")
    tokenizer = None if folder is None else open_tokenizer(HuggingFaceTokenizer(type="huggingface", folder=Path(folder)))
    stop = drain_on_signals()
    with stall_watchdog(), track_episode_tasks(FailureLog().note_leak):
        async with (
            open_graders(),
            open_gateway(GatewayConfig(), context_tokens=ANY_CONTEXT, run_token=secrets.token_hex(16)) as gateway,
            EnvironmentServer(
                section=section,
                token=token,
                tokenizer=tokenizer,
                gateway=gateway,
                max_episodes=line.integer("max-episodes", 1024),
            ).listening(host=line.text("host", "127.0.0.1"), port=line.integer("port", 0)) as url,
        ):
            print(f"environment {section.label} is served: {{type: remote, args: {{url: {url}}}}}", flush=True)
            await stop.wait()


if __name__ == "__main__":
    with boundary("async-rl env serve"):
        main(sys.argv[1:])
