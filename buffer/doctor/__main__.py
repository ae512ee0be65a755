"""`python -P -m buffer.doctor [@ config.yaml]`: the process that `async-rl doctor` runs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from async_rl.board.machines import own_machine
from async_rl.cli.doctor import DOCTOR
from async_rl.cli.grammar import CommandLine, read
from async_rl.config import Config
from async_rl.config.loading import load_with_origins
from async_rl.doctor.disk import gather_disk, judge_disk
from async_rl.doctor.gpu import gather_gpu, judge_gpu
from async_rl.doctor.network import gather_network, judge_network
from async_rl.doctor.resources import gather_resources, judge_resources
from async_rl.doctor.verdict import MIB, Verdict, as_document, ok, refuse_unfit
from async_rl.doctor.versions import gather_versions, judge_versions
from async_rl.errors import boundary
from buffer.doctor.fleet_facts import gather_fleet
from buffer.doctor.fleet_rules import judge_fleet
from buffer.doctor.redis_facts import gather_redis
from buffer.doctor.redis_rules import judge_redis
from buffer.joining import joined
from buffer.server.embedded.programs import find_binary
from buffer.server.embedded.server import is_asleep
from buffer.tools.output import console, print_json, visible


def main(arguments: Sequence[str]) -> int:
    line = read(DOCTOR, arguments)
    config = _config(line)
    verdicts = list(_verdicts(config, os.environ, only_worker=line.has("join")))
    if line.has("json"):
        print_json(as_document(verdicts))
    else:
        for each in verdicts:
            console().print(visible(each.line))
    refuse_unfit(verdicts)
    return 0


def _config(line: CommandLine) -> Config | None:
    if (address := line.text("join")) is not None:
        return joined(address, line.config).config
    return load_with_origins(line.config).config if line.config else None


def _verdicts(config: Config | None, environ: Mapping[str, str], *, only_worker: bool) -> Iterator[Verdict]:
    has_own_redis = config is not None and not config.redis.url
    yield from judge_versions(gather_versions())
    on_gpu = config is not None and config.device == "cuda"
    yield from judge_gpu(gather_gpu(environ, required=on_gpu, is_run=config is not None and not only_worker))
    needed = config.redis.max_memory_mb * MIB if config is not None and has_own_redis else 0
    yield from judge_resources(gather_resources(environ, memory_needed=needed))
    folder = config.run_folder if config is not None else Path.cwd()
    yield from judge_disk(gather_disk("disk", folder, holds_redis=has_own_redis))
    if config is None:
        return
    if Path(config.redis.payloads).is_absolute():
        size = config.redis.payloads_max_mb * MIB
        yield from judge_disk(gather_disk("payload files", Path(config.redis.payloads), needed=size, may_go_away=True))
    is_live = _serves_itself(config)
    yield from judge_network(gather_network(config, only_worker=only_worker, is_live=is_live))
    if has_own_redis and not is_live:
        yield ok("redis", f"`async-rl run` starts a private one: {find_binary()}")
    else:
        redis = asyncio.run(gather_redis(config))
        yield from judge_redis(redis)
        if not redis.problem and config.run.name:
            yield from judge_fleet(asyncio.run(gather_fleet(config)), own_machine("doctor"))


def _serves_itself(config: Config) -> bool:
    """Whether the run's private server runs."""
    return not config.redis.url and (config.redis_folder / "server.lock").exists() and not is_asleep(config)


if __name__ == "__main__":
    with boundary("async-rl doctor"):
        raise SystemExit(main(sys.argv[1:]))
