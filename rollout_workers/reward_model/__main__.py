"""`async-rl reward serve`: one process with the reward model, for any number of environments."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from async_rl.cli.grammar import CommandLine, read
from async_rl.cli.reward import SERVE
from async_rl.cli.train import load_described
from async_rl.config.exposure import read_token, refuse_exposure
from async_rl.config.training import RewardModelTraining
from async_rl.errors import ConfigError, boundary
from async_rl.launch.package_guard import guard
from async_rl.models.from_config import model_shape
from async_rl.supervision import drain_on_signals, run_with, stall_watchdog, work_limit
from async_rl.telemetry import configure_logs
from async_rl.tokenization.rendering import PromptFormat, RenderedText
from async_rl.tokenization.tokenizers import open_tokenizer
from rollout_workers.reward_model.scorer import Scorer, checkpoint_of
from rollout_workers.reward_model.server import RewardServer, listening


def main(words: Sequence[str]) -> None:
    guard()
    line = read(SERVE, words)
    config = load_described(line.config)
    if not isinstance(config, RewardModelTraining):
        raise ConfigError(f"{config.run.name} is a run of `async-rl train {config.method}`, so it has no reward model to serve")
    configure_logs("reward")
    with work_limit(config.supervision.work_limit_s):
        asyncio.run(serve(config, line))


async def serve(config: RewardModelTraining, line: CommandLine) -> None:
    stop, loop = drain_on_signals(), asyncio.get_running_loop()
    host, token = line.text("host", "127.0.0.1"), read_token(line.text("token-file"), key="--token-file")
    way_out = "give --token-file, or --insecure where the network is private"
    refuse_exposure("the reward model", host, token=token, insecure=line.has("insecure"), way_out=way_out)
    tokenizer = open_tokenizer(config.tokenizer)
    shape = model_shape(config.model, tokenizer.vocab_size)
    checkpoint = checkpoint_of(config, line.text("checkpoint"))
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute") as thread:
        scorer = await loop.run_in_executor(thread, Scorer, config, shape, checkpoint)

        async def score(texts: Sequence[RenderedText]) -> list[float]:
            return await loop.run_in_executor(thread, scorer.scores, texts)

        server = RewardServer(
            score,
            tokenizer,
            PromptFormat(chat=config.data.chat, system=config.data.system),
            row_tokens=config.batch.bin_tokens,
            context_tokens=shape.context_tokens,
        )
        async with listening(server, host=host, port=line.integer("port", 0), token=token) as url:
            asked = f"{url}#token_file={line.text('token-file')}" if token else url
            print(f"reward model {config.run.name} ({checkpoint.name}) is served: scoring: {asked}", flush=True)
            with stall_watchdog():
                await run_with(stop.wait, scoring=server.serve)
        await loop.run_in_executor(thread, scorer.close)


if __name__ == "__main__":
    with boundary("async-rl reward serve"):
        main(sys.argv[1:])
