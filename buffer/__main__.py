"""`python -P -m buffer serve | stats | audit @ config.yaml [--json]`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict

from async_rl.config import Config
from async_rl.config_files import load_named
from async_rl.errors import ConfigError, boundary
from async_rl.protocols import BufferStats
from async_rl.telemetry import configure_logs
from buffer import open_buffer
from buffer.embedded_server import EmbeddedServer, is_asleep
from buffer.redis_buffer import RedisBuffer

USAGE = """usage: buffer VERB @ config.yaml [--dotted.key value ...]

  serve            start the run's own Redis server and keep it alive
  stats [--json]   what the buffer holds
  audit [--json]   prove that every ticket is in exactly one place; exit code 1 if not"""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else ConfigError.exit_code
    verb, rest = arguments[0], [word for word in arguments[1:] if word != "--json"]
    as_json = "--json" in arguments
    if verb not in ("serve", "stats", "audit"):
        raise ConfigError(f"{verb!r} is no verb of buffer; choose serve, stats or audit")
    config = load_named(rest)
    if verb == "serve":
        configure_logs("buffer")
        return asyncio.run(_serve(config))
    if verb == "stats":
        return asyncio.run(_stats(config, as_json))
    return asyncio.run(_audit(config, as_json))


async def _serve(config: Config) -> int:
    """Until SIGTERM or SIGINT; a second one is not needed, because stopping the server is short."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with EmbeddedServer(config) as server:
        print(f"redis serves run {config.run.name!r} at {config.redis_url} (process {server.pid})", flush=True)
        await stop.wait()
    return 0


@asynccontextmanager
async def _opened(config: Config) -> AsyncGenerator[RedisBuffer]:
    """The run's buffer. Of a run that has ended, its own server is woken for as long as it takes to look."""
    async with AsyncExitStack() as stack:
        if not config.redis.url and not config.redis_folder.exists():
            raise ConfigError(f"there is no run in {config.run_folder} (run.folder is seen from where you are)")
        if is_asleep(config):
            await stack.enter_async_context(EmbeddedServer(config))
        yield await stack.enter_async_context(open_buffer(config))


async def _stats(config: Config, as_json: bool) -> int:
    async with _opened(config) as buffer:
        stats = await buffer.stats()
    print(json.dumps(asdict(stats)) if as_json else _table(stats))
    return 0


async def _audit(config: Config, as_json: bool) -> int:
    async with _opened(config) as buffer:
        found = await buffer.audit()
        refused = await buffer.quarantined()
    if as_json:
        print(
            json.dumps(
                {"clean": found.is_clean, "problems": found.problems, "quarantine": refused, "stats": asdict(found.stats)}
            )
        )
        return 0 if found.is_clean else 1
    print(_table(found.stats))
    for report in refused:
        print(f"quarantined: {report['ticket']} of worker {report['worker']}: {report['reason']}")
    for problem in found.problems:
        print(f"PROBLEM: {problem}")
    print("clean: every ticket is in exactly one place" if found.is_clean else f"{len(found.problems)} problems")
    return 0 if found.is_clean else 1


def _table(stats: BufferStats) -> str:
    flat: dict[str, object] = {}
    for name, value in asdict(stats).items():
        if isinstance(value, dict):
            flat[name] = ", ".join(f"{key}: {number}" for key, number in value.items()) or "-"  # pyright: ignore[reportUnknownVariableType]
        else:
            flat[name] = value
    return "\n".join(f"{name:<17} {value}" for name, value in flat.items())


if __name__ == "__main__":
    with boundary("buffer"):
        raise SystemExit(main(sys.argv[1:]))
