"""Ranks that a launcher starts one by one, as across machines: they meet over Redis, whatever dead ranks left there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from async_rl.errors import ConfigError, ServiceStopped
from buffer import open_group_stores
from buffer.group_store import RedisGroupStore
from learner.ranks.redis_rendezvous import wait_for_rank_0, wait_for_ranks
from tests.support.run_history import check, last_step, lives
from tests.support.run_processes import Program, audit, program, read_config, write_config
from tests.support.waiting import until

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=0.5)


@contextmanager
def stores(redis_server: str, name: str, folder: Path, count: int) -> Iterator[list[RedisGroupStore]]:
    """The same store as so many processes would see it."""
    config = read_config(write_config(folder, name, redis={"url": redis_server}))
    with ExitStack() as opened:
        yield [opened.enter_context(open_group_stores(config)).open("ranks") for _ in range(count)]


def test_all_ranks_agree_on_the_life_that_they_meet_in(redis_server: str, run_name: str, tmp_path: Path) -> None:
    with stores(redis_server, run_name, tmp_path, 3) as places, ThreadPoolExecutor() as pool:
        for life in (7, 8):  # what the first one left behind does not confuse the second
            others = [
                pool.submit(wait_for_rank_0, places[rank], rank=rank, world_size=3, within=LONG)
                for rank in ((1, 2) if life == 7 else (2, 1))
            ]
            wait_for_ranks(places[0], world_size=3, life=life, within=LONG)
            assert [other.result(60) for other in others] == [life, life]


def test_a_rank_that_died_waiting_is_replaced_by_its_successor(redis_server: str, run_name: str, tmp_path: Path) -> None:
    with stores(redis_server, run_name, tmp_path, 3) as places, ThreadPoolExecutor() as pool:
        places[1].set("here/1", "dead")
        caller = pool.submit(wait_for_ranks, places[0], world_size=3, life=7, within=LONG)
        places[1].wait(["call/dead"], LONG)
        first = pool.submit(wait_for_rank_0, places[1], rank=1, world_size=3, within=LONG)
        second = pool.submit(wait_for_rank_0, places[2], rank=2, world_size=3, within=LONG)
        assert (first.result(60), second.result(60), caller.result(60)) == (7, 7, None)


def test_ranks_follow_the_newest_rank_0(redis_server: str, run_name: str, tmp_path: Path) -> None:
    with stores(redis_server, run_name, tmp_path, 2) as places, ThreadPoolExecutor() as pool:
        other: Future[int] = pool.submit(wait_for_rank_0, places[1], rank=1, world_size=2, within=LONG)
        name = places[0].get("here/1").decode()
        places[0].set(f"call/{name}", "6 2")  # and then this rank 0 dies
        places[0].wait([f"answer/{name}/6"], LONG)
        wait_for_ranks(places[0], world_size=2, life=7, within=LONG)
        assert other.result(60) == 7


def test_a_missing_rank_is_named(redis_server: str, run_name: str, tmp_path: Path) -> None:
    with stores(redis_server, run_name, tmp_path, 2) as (store, other), ThreadPoolExecutor() as pool:
        with pytest.raises(ServiceStopped, match=r"rank 1 of 2 has not registered within 0\.5 s"):
            wait_for_ranks(store, world_size=2, life=7, within=SHORT)
        with pytest.raises(ServiceStopped, match="rank 0 of 2 has not registered"):
            wait_for_rank_0(store, rank=1, world_size=2, within=SHORT)
        with pytest.raises(ServiceStopped, match="rank 1 of 2 has not registered"):  # it was there, and is gone
            wait_for_ranks(store, world_size=2, life=7, within=SHORT)
        gone = store.get("here/1")
        refused = pool.submit(wait_for_rank_0, other, rank=1, world_size=3, within=LONG)
        until(lambda: store.get("here/1") != gone, "the other rank has registered")
        with pytest.raises(ServiceStopped):
            wait_for_ranks(store, world_size=2, life=7, within=timedelta(seconds=3))
        with pytest.raises(ConfigError, match="WORLD_SIZE is 3 for rank 1 and 2 for rank 0"):
            refused.result(60)


@pytest.mark.parametrize("restarts", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_of_any_launcher_train_together_and_start_again(
    redis_server: str, run_name: str, tmp_path: Path, restarts: int
) -> None:
    steps = 3 + 5 * restarts
    path = write_config(tmp_path, run_name, redis={"url": redis_server}, learner={"steps": steps, "checkpoint_every": 2})
    config = read_config(path)
    with open_group_stores(config) as opened, ExitStack() as started:
        opened.open("ranks").set("here/1", "dead")

        def gang(*ranks: int) -> list[Program]:
            place = {"WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
            each = [os.environ | place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in ranks]
            return [started.enter_context(program(tmp_path, "learner", "@", path, environment=one)) for one in each]

        worker = started.enter_context(program(tmp_path, "worker", "@", path))
        for _ in range(restarts):
            ranks = gang(0, 1)
            until(lambda ranks=ranks: last_step(config) >= 3, "they train", while_alive=ranks[0])
            for rank in ranks:
                rank.signal(signal.SIGKILL)
                rank.exit_code()
        ranks = gang(1, 0)
        assert [rank.exit_code() for rank in ranks] == [0, 0], [rank.output for rank in ranks]
        worker.signal(signal.SIGTERM)
        assert worker.exit_code() == 0, worker.output
    assert len(lives(config)) == 1 + restarts
    check(config, steps=steps)
    assert audit(path)["clean"]
