"""How one rank leads the others. Rank 0 alone talks to Redis; the rest do what it says, in the order it says it.

    rank 0    Crew.step(batch) ──▶ broadcast(STEP, shards) ──▶ train_step ──▶ result
    rank 1+   follow()         ──▶ receive                 ──▶ train_step ──▶ receive ...

Orders are broadcast over the world's group with CPU tensors (gloo, also where gradients go over NCCL). What can fail on one
rank alone, reading and writing files, ends with an all-reduce of success, so that the ranks fail together.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import structlog
import torch
import torch.distributed as dist
from torch import Tensor

from async_rl.checkpoint_files import FORMAT, Damaged, FileFacts, Manifest, candidates, file_of, read_manifest
from async_rl.config import Config
from async_rl.errors import CheckpointError, ServiceStopped
from async_rl.megatron import parallel
from async_rl.megatron.compat import parallel_state
from async_rl.megatron.hf import load_folder
from async_rl.model_shape import ModelShape
from learner import checkpoint, training_state
from learner.batch import PackedBatch, shard_from_bytes, shard_to_bytes
from learner.model import TrainingModel
from learner.objective import Objective
from learner.policy_update import Reader
from learner.rank_trainer import RankTrainer
from learner.step import StepResult

log = structlog.get_logger()


class Order(IntEnum):
    STEP = 0
    GATHER = 1
    SAVE = 2
    LOAD = 3
    IDLE = 4
    STOP = 5


class Crew:
    """All learner ranks at once, as rank 0 sees them. Every method blocks; all belong on the thread that made it."""

    def __init__(self, config: Config, objective: Objective, shape: ModelShape):
        self._hand = _Hand(config, objective, shape)
        self._obeys = True

    @property
    def model(self) -> TrainingModel:
        """Rank 0's part."""
        return self._hand.model

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def num_shards(self) -> int:
        """How many ways a batch must be divided."""
        return self.model.layout.data

    def step(self, batch: PackedBatch) -> StepResult:
        if batch.num_shards != self.num_shards:
            raise ValueError(f"the batch has {batch.num_shards} shards for {self.num_shards} data-parallel ranks")
        shards = [shard_to_bytes(batch, shard) for shard in range(batch.num_shards)]
        with self._told(Order.STEP, shards):
            result = self._hand.step(shards)
        return replace(result, metrics={**batch.metrics, **result.metrics})

    def gather(self) -> dict[str, Tensor]:
        """A snapshot of the full weights, which training on does not change."""
        with self._told(Order.GATHER):
            gathered = self.model.gather()
        assert gathered is not None
        return gathered

    def save(
        self,
        folder: Path,
        *,
        step: int,
        extra: Mapping[str, Any],
        keep: int,
        life: int = 0,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """A checkpoint that is durable when this returns; all but the newest `keep` are removed. `extra` must fit JSON.
        Checkpoints of a later `life` are newer, whatever their step.

        `confirm` is called when everything is written and before it counts; if it raises, there is no checkpoint.
        """
        with self._told(Order.SAVE, {"folder": str(folder), "step": step, "life": life}):
            self._hand.save(folder, step, life, extra, confirm)
        checkpoint.prune(folder, keep, newest=step, life=life)

    def load(self, folder: Path) -> dict[str, Any] | None:
        """Go on from the newest checkpoint that is whole. Returns its `extra`; None where there is no checkpoint."""
        with self._told(Order.LOAD, {"folder": str(folder)}):
            return self._hand.load(folder)

    def idle(self) -> None:
        """Tell the others that all is well, before their wait for an order runs into its time limit."""
        with self._told(Order.IDLE):
            pass

    def stop(self) -> None:
        """Let the others end. Nothing may be asked of the crew afterwards."""
        if self._obeys:
            _send(Order.STOP)
        parallel.shutdown()

    @contextmanager
    def _told(self, order: Order, told: object = None) -> Iterator[None]:
        """After a failure the others have failed too, or wait for what will not come: leaving the group ends them."""
        try:
            _send(order, told)
            yield
        except BaseException:
            self._obeys = False
            raise


def follow(config: Config, objective: Objective, shape: ModelShape) -> None:
    """The whole life of a rank above 0.

    consumes: orders      waits for:    rank 0
    produces: nothing     unblocked by: an order (IDLE, at the least, well within parallel.GROUP_TIMEOUT); rank 0's death
    """
    # torchrun signals every rank; rank 0 alone decides how the run ends, and needs the others for its last checkpoint
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    hand = _Hand(config, objective, shape)
    while (received := _receive())[0] is not Order.STOP:
        order, told = received
        if order is Order.STEP:
            hand.step(told)
        elif order is Order.GATHER:
            hand.model.gather()
        elif order is Order.SAVE:
            hand.save(Path(told["folder"]), told["step"], told["life"], {})
        elif order is Order.LOAD:
            hand.load(Path(told["folder"]))
    parallel.shutdown()


class _Hand:
    """What every rank does, rank 0 included."""

    def __init__(self, config: Config, objective: Objective, shape: ModelShape):
        device = parallel.resolve_device(config.device)
        if device.type == "cpu":
            # small matrices: a second thread costs more than it brings, and the workers need the core
            torch.set_num_threads(1)
        learner = config.learner
        parallel.initialize(device=device, tensor=learner.parallel.tensor, pipeline=learner.parallel.pipeline)
        dtype = parallel.resolve_dtype(device)
        self.model = TrainingModel(
            shape,
            learner.optimizer,
            device=device,
            dtype=dtype,
            seed=config.run.seed,
            total_updates=learner.steps,
            layer_spec=config.model.layer_spec,
        )
        if config.model.folder is not None:
            self.model.load(load_folder(config.model.folder, shape, dtype))
        read = Reader(vocab_size=shape.vocab_size, sampling=config.sampling)
        self._trainer = RankTrainer(self.model, objective, config.batch, read)

    def step(self, shards: list[bytes]) -> StepResult:
        return self._trainer.step(shard_from_bytes(shards[parallel_state.get_data_parallel_rank()]))

    def save(
        self, folder: Path, step: int, life: int, extra: Mapping[str, Any], confirm: Callable[[], None] = lambda: None
    ) -> None:
        draft, failure, facts = checkpoint.draft(folder, step, life), None, None
        if dist.get_rank() == 0:
            failure = _failure_of(draft.open)
        _agree(failure, "begin a checkpoint")
        try:
            facts = draft.write(dist.get_rank(), training_state.capture(self.model))
        except OSError as error:
            failure = error
        files = _everybodys(facts)
        _agree(failure, "write its part of a checkpoint")
        if dist.get_rank() == 0:
            manifest = Manifest(format=FORMAT, step=step, layout=self.model.layout, files=files, extra=dict(extra))
            confirm()
            failure = _failure_of(lambda: draft.commit(manifest))
        _agree(failure, "complete a checkpoint")

    def load(self, folder: Path) -> dict[str, Any] | None:
        found = candidates(folder)
        for path in found:
            try:
                manifest, state, problem = *self._read(path), None
            except Damaged as error:
                manifest, state, problem = None, None, error
            if _all_succeeded(problem is None):
                assert manifest is not None
                assert state is not None
                training_state.restore(self.model, state)
                return dict(manifest.extra)
            log.warning(
                f"checkpoint {path.name} is damaged, the one before it is tried", reason=str(problem or "another rank's part")
            )
        if found:
            raise CheckpointError(f"every checkpoint in {folder} is damaged; move the folder away to begin anew")
        return None

    def _read(self, path: Path) -> tuple[Manifest, dict[str, Tensor]]:
        manifest = read_manifest(path)
        if manifest.layout != self.model.layout:
            raise CheckpointError(
                f"checkpoint {path} was written by ranks divided as {manifest.layout}, these are {self.model.layout}: "
                "start as many ranks as then, with the same learner.parallel"
            )
        return manifest, checkpoint.read_rank(path, manifest, dist.get_rank())


# -- between ranks --------------------------------------------------------------------------------------------------------


def _send(order: Order, told: object = None) -> None:
    if dist.get_world_size() == 1:
        return
    payload = msgpack.packb(told)
    assert payload is not None
    dist.broadcast(torch.tensor([order, len(payload)]), src=0)
    dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0)


def _receive() -> tuple[Order, Any]:
    header = torch.zeros(2, dtype=torch.int64)
    try:
        dist.broadcast(header, src=0)
        payload = torch.empty(int(header[1]), dtype=torch.uint8)
        dist.broadcast(payload, src=0)
    except RuntimeError as error:
        raise ServiceStopped(f"learner rank {dist.get_rank()} hears no more of rank 0: {error}") from error
    return Order(int(header[0])), msgpack.unpackb(payload.numpy().tobytes())


def _all_succeeded(succeeded: bool) -> bool:
    flag = torch.tensor([int(succeeded)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _agree(failure: Exception | None, what: str) -> None:
    """Goes on only where every rank succeeded; else all raise, each with what it knows."""
    if not _all_succeeded(failure is None):
        raise CheckpointError(
            f"could not {what}: {failure or 'another rank failed'}; older checkpoints are untouched"
        ) from failure


def _failure_of(act: Callable[[], None]) -> Exception | None:
    try:
        act()
    except OSError as error:
        return error
    return None


def _everybodys(facts: FileFacts | None) -> dict[str, FileFacts]:
    own = torch.tensor([facts.bytes, int(facts.xxh3, 16) - 2**63] if facts is not None else [0, 0])
    all_of_them = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, own)
    return {
        file_of(rank): FileFacts(bytes=int(each[0]), xxh3=f"{int(each[1]) + 2**63:016x}")
        for rank, each in enumerate(all_of_them)
    }
