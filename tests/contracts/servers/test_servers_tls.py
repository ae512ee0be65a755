"""Access over a network: valid and invalid certificates, passwords, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from async_rl.config import Config
from async_rl.errors import BufferUnreachable, ConfigError
from buffer import open_buffer
from buffer.server.client import PASSWORD_VARIABLE, read_credentials
from tests.support.certificates import make_authority, make_certificate
from tests.support.private_fleet import free_port
from tests.support.private_server import binaries, client_of, running, wait_until_it_answers
from tests.support.runs import started

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a test CA, the certificates it signed for server and client, and an untrusted CA."""
    folder = tmp_path_factory.mktemp("certificates")
    for authority in ("ca", "stranger"):
        make_authority(folder, authority)
    for holder in ("server", "client"):
        make_certificate(folder, holder, names="IP:127.0.0.1,DNS:localhost")
    return folder


@pytest.fixture(scope="module", params=["no", "yes"], ids=["", "wants-ours"])
def tls_server(request: pytest.FixtureRequest, certificates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TLS-only server with a password; the second one also requires a client certificate."""
    for binary in binaries().values():
        port = free_port()
        files = ("--tls-cert-file server.crt", "--tls-key-file server.key", "--tls-ca-cert-file ca.crt")
        options = f"--port 0 --tls-port {port} {' '.join(files)} --tls-auth-clients {request.param}"
        folder = tmp_path_factory.mktemp("server")
        for name in ("server.crt", "server.key", "ca.crt"):
            (folder / name).write_bytes((certificates / name).read_bytes())
        command = [str(binary), *options.split(), "--dir", str(folder), "--requirepass", PASSWORD, "--save", ""]
        with running(command, cwd=folder) as process:
            client = client_of(
                port=port,
                ssl=True,
                ssl_ca_certs=str(certificates / "ca.crt"),
                ssl_certfile=str(certificates / "client.crt"),
                ssl_keyfile=str(certificates / "client.key"),
                password=PASSWORD,
            )
            with client:
                if wait_until_it_answers(client, process):
                    yield f"rediss://127.0.0.1:{port}"
                    return
    pytest.skip("no server here was built with TLS (Debian's redis-server is)")


def config_for(url: str, folder: Path, **redis: object) -> Config:
    (folder / "password").write_text(f"{PASSWORD}\n")
    return Config.model_validate(
        {
            "run": {"name": "r", "folder": folder},
            "redis": {"url": url, "connect_timeout_s": 60, "password_file": folder / "password", **redis},
            "model": {"size": {"hidden": 8, "layers": 1, "heads": 1}},
            "environments": [{"type": "even_digits"}],
        }
    )


def trusting(certificates: Path, authority: str = "ca", *, ours: bool = True) -> dict[str, Path]:
    own = {"cert_file": certificates / "client.crt", "key_file": certificates / "client.key"} if ours else {}
    return {"ca_file": certificates / f"{authority}.crt", **own}


async def test_a_run_works_over_tls(tls_server: str, certificates: Path, tmp_path: Path):
    async with open_buffer(config_for(tls_server, tmp_path, **trusting(certificates))) as buffer:
        await started(buffer)
        assert (await buffer.audit()).is_clean
        # A wait has a connection of its own, which must use TLS, too.
        assert len(await buffer.reserve("w", version=0, count=1, wait_s=1)) == 1


async def refusal(config: Config) -> str:
    with pytest.raises(BufferUnreachable) as found:
        async with open_buffer(config):
            pass
    return str(found.value)


async def test_a_server_that_a_stranger_vouches_for_is_refused_at_once(tls_server: str, certificates: Path, tmp_path: Path):
    config = config_for(tls_server, tmp_path, connect_timeout_s=60, **trusting(certificates, "stranger"))
    assert "is not signed by redis.ca_file" in await refusal(config)


async def test_a_certificate_for_another_host_is_refused(tls_server: str, certificates: Path, tmp_path: Path):
    elsewhere = tls_server.replace("127.0.0.1", "127.0.0.2")  # reaches the same server only if it listens there too
    config = config_for(elsewhere, tmp_path, **trusting(certificates))
    assert "made for another host" in await refusal(config)


async def test_a_wrong_password_is_refused_at_once(tls_server: str, certificates: Path, tmp_path: Path):
    config = config_for(tls_server, tmp_path, connect_timeout_s=60, **trusting(certificates))
    (tmp_path / "password").write_text("wrong")
    message = await refusal(config)
    assert "refuses our password" in message
    assert "wrong" not in message


@pytest.mark.parametrize("tls_server", ["yes"], ids=["wants-ours"], indirect=True)
async def test_without_a_certificate_that_the_server_wants_we_are_told(tls_server: str, certificates: Path, tmp_path: Path):
    config = config_for(tls_server, tmp_path, connect_timeout_s=2, **trusting(certificates, ours=False))
    assert "does it want redis.cert_file?" in await refusal(config)


async def test_plain_words_to_a_tls_port_are_one_sentence(tls_server: str, tmp_path: Path):
    plain = tls_server.replace("rediss", "redis")
    assert "no Redis has answered" in await refusal(config_for(plain, tmp_path, connect_timeout_s=0.5))


@pytest.mark.parametrize(
    ("url", "missing"),
    [
        ("redis://10.1.2.3:6379", "without TLS"),
        ("redis+cluster://127.0.0.1:1,10.1.2.3:1", "without TLS"),
        ("rediss://redis.example:6379", "without a password"),
        ("redis+sentinel://a:1,b:2/main", "without TLS and without a password"),
    ],
)
async def test_what_would_cross_a_network_in_the_clear_is_refused(url: str, missing: str, tmp_path: Path):
    with_password = "password" not in missing
    given = {} if with_password else {"password_file": None}
    with pytest.raises(ConfigError, match=missing) as found:
        async with open_buffer(config_for(url, tmp_path, **given)):
            pass
    assert "redis.insecure: true" in str(found.value)
    assert read_credentials(config_for(url, tmp_path, insecure=True, **given).redis, {}).password == (
        PASSWORD if with_password else None
    )


def test_the_password_may_stand_in_the_environment(tmp_path: Path):
    config = config_for("rediss://redis.example", tmp_path, password_file=None)
    assert read_credentials(config.redis, {PASSWORD_VARIABLE: "secret"}).password == "secret"


def test_files_for_tls_without_tls_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"redis\.url must begin with rediss"):
        config_for("redis://127.0.0.1", tmp_path, ca_file=tmp_path / "ca.crt")
    with pytest.raises(ValueError, match="belong together"):
        config_for("rediss://127.0.0.1", tmp_path, cert_file=tmp_path / "client.crt")
