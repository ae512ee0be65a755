"""Open the store over which the ranks of a learner find each other: a file on one machine, the run's Redis across machines."""

from __future__ import annotations

import structlog
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.errors import ConfigError
from async_rl.megatron.parallel import GROUP_TIMEOUT, Rendezvous
from async_rl.protocols import GroupStores
from learner.ranks.place import RankPlace
from learner.ranks.redis_rendezvous import wait_for_rank_0, wait_for_ranks

log = structlog.get_logger("learner")


def open_rendezvous(place: RankPlace, stores: GroupStores, *, life: int | None) -> Rendezvous | None:
    """Return the rendezvous, or None for a single rank. Blocks until all ranks are there.

    Rank 0 passes its fence as `life`; the other ranks pass None and learn it from rank 0.
    """
    if place.world_size == 1 or place.file is not None or place.is_under_torchrun:
        return open_local_rendezvous(place)
    board = stores.open("ranks")
    if life is None:
        life = wait_for_rank_0(board, rank=place.rank, world_size=place.world_size, within=GROUP_TIMEOUT)
    else:
        wait_for_ranks(board, world_size=place.world_size, life=life, within=GROUP_TIMEOUT)
    return Rendezvous(store=stores.open(f"ranks/{life}"), rank=place.rank, world_size=place.world_size)


def open_local_rendezvous(place: RankPlace) -> Rendezvous | None:
    """The rendezvous of ranks that `async-rl` or a launcher started, None for a single rank.

    Raises ConfigError if one of several ranks has no store: it would train a model of its own.
    """
    if place.world_size == 1:
        return None
    if place.file is not None:
        store = FileStore(str(place.file), place.world_size)
        return Rendezvous(store=store, rank=place.rank, world_size=place.world_size)
    if place.has_master:
        _warn_of_torchs_store(place)
        return Rendezvous(store=None, rank=place.rank, world_size=place.world_size)
    raise ConfigError(
        f"this is rank {place.rank} of {place.world_size} (RANK, WORLD_SIZE) and no store for the rendezvous is configured; "
        "set MASTER_ADDR and MASTER_PORT to an address of rank 0 in a private network, or let `async-rl` start the ranks"
    )


def _warn_of_torchs_store(place: RankPlace) -> None:
    if place.rank > 0:
        return
    if place.is_under_torchrun:
        log.warning(
            "torchrun's store listens on every address, asks for no password and unpickles what it finds: any client that "
            "reaches its port can run code here. Let `async-rl` start the ranks, or give torchrun --rdzv-backend=static, which "
            "does not unpickle (docs/parallelism.md)"
        )
    else:
        log.warning(
            "the ranks use torch's store at MASTER_ADDR, which listens on every address and asks for no password: "
            "any client that reaches its port can disrupt them. Let `async-rl` start ranks of one machine (docs/parallelism.md)"
        )
