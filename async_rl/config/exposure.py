"""Who may listen where: beyond this machine only with a token, or where a person has said that the network is private."""

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
    """It stands for every interface of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


def refuse_exposure(what: str, host: str, *, token: str, insecure: bool, way_out: str) -> None:
    """Raise ConfigError where `what` would answer anybody on a network."""
    if not is_loopback(host) and not token and not insecure:
        raise ConfigError(f"{what} would answer anybody who reaches {host}: {way_out}, or listen on 127.0.0.1")


def knows(authorization: str, token: str) -> bool:
    """Whether the Authorization header of a request brings the token; anything does where there is none."""
    return not token or hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())


def read_token(file: str | Path | None, *, key: str) -> str:
    """Empty where no file is named. `key` is what a person wrote to name it."""
    if file is None or not str(file):
        return ""
    try:
        token = Path(file).read_text().strip()
    except OSError as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error.strerror}") from error
    if not token:
        raise ConfigError(f"{key}: {file} is empty")
    return token
