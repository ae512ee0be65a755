"""Rules for listening addresses: beyond loopback, a server needs a token or an explicit `insecure` setting."""

from __future__ import annotations

import hmac
import ipaddress
from pathlib import Path

from async_rl.errors import ConfigError


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_wildcard(host: str) -> bool:
    """Whether the address means every interface of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def refuse_exposure(what: str, host: str, *, token: str, insecure: bool, way_out: str) -> None:
    """Raise ConfigError if `what` would listen beyond loopback without a token; `way_out` completes the sentence."""
    if not is_loopback(host) and not token and not insecure:
        raise ConfigError(f"{what} would serve unauthenticated requests on {host}: {way_out}, or listen on 127.0.0.1")


def knows(authorization: str, token: str) -> bool:
    """Whether an Authorization header carries the token, compared in constant time. True if no token is required."""
    return not token or hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {token}".encode())


def read_token(file: str | Path | None, *, key: str) -> str:
    """Read a token file; "" if `file` is unset. Raises ConfigError naming `key`, the setting or option that gave the path."""
    if file is None or not str(file):
        return ""
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"{key}: {file} is empty")
    return token
