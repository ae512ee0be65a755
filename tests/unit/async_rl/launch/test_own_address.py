"""By which address other machines reach this one."""

import pytest

from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.launch.own_address import own_address, redis_hosts


def config(url: str) -> Config:
    return Config.model_validate(
        {
            "redis": {"url": url},
            "model": {"size": {"hidden": 32, "layers": 1, "heads": 2}},
            "environments": [{"type": "even_digits"}],
        }
    )


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("", []),
        ("redis://store:6379/2", ["store"]),
        ("rediss://user@10.0.0.1", ["10.0.0.1"]),
        ("redis://[fd00::1]:6379?db=1", ["fd00::1"]),
        ("rediss+sentinel://u:p@one:26379,two:26379/main", ["one", "two"]),
    ],
)
def test_the_hosts_of_an_address(url: str, hosts: list[str]) -> None:
    assert redis_hosts(config(url)) == hosts


def test_without_a_network_it_is_the_loopback_address() -> None:
    assert own_address(config("")) == "127.0.0.1"
    assert own_address(config("redis://127.0.0.1:6379")) == "127.0.0.1"


def test_a_host_without_an_address_is_named() -> None:
    with pytest.raises(ConfigError, match=r"redis\.url: this machine finds no way to 'no-such-host\.invalid'"):
        own_address(config("redis://no-such-host.invalid:6379"))
