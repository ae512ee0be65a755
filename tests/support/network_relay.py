"""A bad network between hosts as a process of one of them: bytes are late, connections break, SIGUSR1 resets all at once.

python -m tests.support.network_relay HOST:PORT TARGET_HOST:PORT
"""

from __future__ import annotations

import asyncio
import signal
import sys

from tests.support.chaos_proxy import ChaosProxy, Weather

WEATHER = Weather(tear=0.005, delay_s=(0.0, 0.02))


async def relay(listens: str, target: str) -> None:
    host, _, port = listens.rpartition(":")
    async with ChaosProxy(target, seed=1, listens=(host, int(port))) as proxy:
        proxy.weather = WEATHER

        def reset() -> None:
            print(f"reset {proxy.reset_all()} connections", flush=True)

        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reset)
        print(f"relays to {target}", flush=True)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(relay(*sys.argv[1:]))
