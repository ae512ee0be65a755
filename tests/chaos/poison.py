"""Corrupts the payload of a ready group in Redis."""

from __future__ import annotations

from urllib.parse import urlsplit

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from async_rl.config import Config
from tests.chaos.stage import RUN

TIMEOUT_S = 0.2
ONCE = Retry(NoBackoff(), retries=0)

# The length stays the same, so that the memory accounting stays right. One script, so that no group can end in between and
# leave a payload without a ticket.
SCRIPT = """
local id = redis.call('ZRANGE', KEYS[1], -1, -1)[1]
local payload = id and redis.call('HGET', KEYS[2], id)
if not payload then return '' end
local middle = math.floor(#payload / 2)
local flipped = string.char((string.byte(payload, middle) + 1) % 256)
redis.call('HSET', KEYS[2], id, string.sub(payload, 1, middle - 1) .. flipped .. string.sub(payload, middle + 1))
return id
"""


def poison(config: Config) -> str:
    """Corrupt one payload and return its ticket; empty if no group is ready."""
    path = urlsplit(config.redis_url).path
    with Redis(unix_socket_path=path, decode_responses=True, socket_timeout=TIMEOUT_S, retry=ONCE) as client:
        return str(client.eval(SCRIPT, 2, f"{{{RUN}}}:ready", f"{{{RUN}}}:payloads"))
