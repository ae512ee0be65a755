"""Several servers of our own that belong together: a Cluster, or a master with a replica and its Sentinels."""

from __future__ import annotations

import random
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redis import Redis

from tests.support.private_server import START_S, client_of, wait_until_it_answers
from tests.support.waiting import until

SLOTS = 16384
NODE_TIMEOUT_MS = DOWN_AFTER_MS = 15_000
"""After which a silent node or master is replaced by its replica, unless `replace_the_dead` was called: not while it merely
stands still."""
SOON_MS = 300
PORTS_TRIED = 5
MASTER = "main"
"""What our Sentinels call their master."""


@dataclass(kw_only=True)
class Node:
    """One process of a fleet; `kill` ends it as a power cut would."""

    port: int
    process: subprocess.Popen[bytes]
    ask: Redis = field(init=False)

    def __post_init__(self) -> None:
        self.ask = client_of(port=self.port, socket_timeout=START_S, protocol=2)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def private_cluster(binary: Path, *, masters: int = 3, replicas: int = 0) -> Iterator[list[Node]]:
    """Masters first, then the replicas, of the first master and so on."""
    with _opened() as start:
        options = (
            "--cluster-enabled",
            "yes",
            "--cluster-node-timeout",
            str(NODE_TIMEOUT_MS),
            "--cluster-replica-validity-factor",
            "0",
        )
        nodes = [start(binary, *options) for _ in range(masters + replicas)]
        for number, node in enumerate(nodes[:masters]):
            node.ask.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            node.ask.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS * number // masters, SLOTS * (number + 1) // masters))
        for node in nodes[1:]:
            nodes[0].ask.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
        ids = [_text(node.ask.execute_command("CLUSTER", "MYID")) for node in nodes]
        until(lambda: all(set(ids) <= _known(node) for node in nodes), "the nodes of the Cluster have met")
        for number, node in enumerate(nodes[masters:]):
            node.ask.execute_command("CLUSTER", "REPLICATE", ids[number % masters])
        until(lambda: all(_is_whole(node, masters) for node in nodes), "the Cluster is whole")
        until(lambda: all(_follows(node) for node in nodes[masters:]), "every replica follows")
        yield nodes


def cluster_url(nodes: Sequence[Node]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)


def owner(nodes: Sequence[Node], run: str) -> Node:
    """The master that the run's keys live on."""
    alive = [node for node in nodes if node.process.poll() is None]
    slot = alive[0].ask.execute_command("CLUSTER", "KEYSLOT", f"{{{run}}}:state")
    ranges: Any = alive[0].ask.execute_command("CLUSTER", "SLOTS")
    [port] = [place[1] for first, last, place, *_ in ranges if first <= slot <= last]
    return next(node for node in nodes if node.port == port)


def replace_the_dead(nodes: Sequence[Node]) -> None:
    """Let the nodes of a Cluster replace at once one that was killed."""
    for node in nodes:
        if node.process.poll() is None:
            node.ask.config_set("cluster-node-timeout", 3 * SOON_MS)


@contextmanager
def private_sentinels(binary: Path, *, sentinels: int = 3) -> Iterator[tuple[list[Node], list[Node]]]:
    """A master and its replica, and the Sentinels that watch them."""
    with _opened() as start:
        servers = [start(binary, "--appendonly", "yes", "--repl-diskless-sync-delay", "0") for _ in range(2)]
        servers[1].ask.replicaof("127.0.0.1", servers[0].port)
        until(lambda: _follows(servers[1]), "the replica follows")
        watching = (
            *("--sentinel", "monitor", MASTER, "127.0.0.1", str(servers[0].port), str(sentinels // 2 + 1)),
            *("--sentinel", "down-after-milliseconds", MASTER, str(DOWN_AFTER_MS)),
            *("--sentinel", "failover-timeout", MASTER, "600000"),  # also until a replica of nobody is set right
        )
        watchers = [start(binary, *watching, sentinel=True) for _ in range(sentinels)]
        others = f"num-other-sentinels {sentinels - 1}"
        until(lambda: all(_knows_all(watcher, others) for watcher in watchers), "the Sentinels know each other and the replica")
        yield servers, watchers


def promote_the_replica(sentinels: Sequence[Node]) -> None:
    """Let the Sentinels replace at once a master that was killed."""
    for sentinel in sentinels:
        for name, value in (("down-after-milliseconds", SOON_MS), ("failover-timeout", 2000)):
            sentinel.ask.execute_command("SENTINEL SET", MASTER, name, value)


def sentinel_url(sentinels: Sequence[Node]) -> str:
    return "redis+sentinel://" + ",".join(f"127.0.0.1:{node.port}" for node in sentinels) + f"/{MASTER}"


@contextmanager
def _opened() -> Iterator[Callable[..., Node]]:
    """Starts nodes in folders of their own; all end with the block."""
    with tempfile.TemporaryDirectory(prefix="arl") as root, ExitStack() as stack:

        def start(binary: Path, *options: str, sentinel: bool = False) -> Node:
            for _ in range(PORTS_TRIED):
                node = launch(binary, *options, sentinel=sentinel)
                stack.callback(node.ask.close)
                stack.callback(node.kill)
                if wait_until_it_answers(node.ask, node.process):
                    return node
            raise AssertionError(f"{binary} ended at once on each of {PORTS_TRIED} ports")

        def launch(binary: Path, *options: str, sentinel: bool) -> Node:
            port = free_port()
            folder = Path(tempfile.mkdtemp(dir=root))
            common = [
                "--port",
                str(port),
                "--bind",
                "127.0.0.1",
                "--dir",
                str(folder),
                "--daemonize",
                "no",
                "--loglevel",
                "warning",
            ]
            if sentinel:
                config = folder / "sentinel.conf"
                config.write_text(_as_lines([*common, *options]))
                command = [str(binary), str(config), "--sentinel"]
            else:
                command = [str(binary), *common, "--save", "", *options]
            return Node(port=port, process=subprocess.Popen(command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL))

        yield start


def _as_lines(options: Sequence[str]) -> str:
    """Sentinels rewrite their configuration, so they want it in a file."""
    lines: list[str] = []
    for word in options:
        if word.startswith("--"):
            lines.append(word[2:])
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


def free_port() -> int:
    """Below the ports that connections are given, as is the Cluster's bus, which is 10 000 higher. Somebody may still be
    faster: what starts on it must be ready for that.
    """
    while True:
        port = random.randrange(12_000, 22_000)
        with socket.socket() as probe, socket.socket() as bus:
            try:
                probe.bind(("127.0.0.1", port))
                bus.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
            return port


def _known(node: Node) -> set[str]:
    lines = _text(_raw(node, "CLUSTER NODES")).splitlines()
    return {line.split()[0] for line in lines if "handshake" not in line and "noaddr" not in line}


def _is_whole(node: Node, masters: int) -> bool:
    info = _text(_raw(node, "CLUSTER INFO"))
    return "cluster_state:ok" in info and f"cluster_size:{masters}" in info


def _follows(node: Node) -> bool:
    return node.ask.info("replication").get("master_link_status") == "up"


def _knows_all(watcher: Node, others: str) -> bool:
    said = _raw(watcher, "SENTINEL MASTER", MASTER)
    fields = {_text(said[at]): _text(said[at + 1]) for at in range(0, len(said), 2)}
    return fields["num-slaves"] == "1" and f"num-other-sentinels {fields['num-other-sentinels']}" == others


def _raw(node: Node, command: str, *arguments: str) -> Any:
    """The reply as it was sent: redis-py would make something else of it."""
    connection = node.ask.connection_pool.get_connection()
    try:
        connection.send_command(*command.split(), *arguments)
        return connection.read_response()
    finally:
        node.ask.connection_pool.release(connection)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
