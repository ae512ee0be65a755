"""An engine that is stepped by hand, so that prompts and decoding are timed apart."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.shape import ModelShape
from gpu_checks import counts
from gpu_checks.report import Machine
from gpu_checks.token_ids import TokenIds
from rollout_workers.inference.engine_core import EngineCore
from rollout_workers.inference.generation import Generation, Sampling

PROMPT_TOKENS_PER_STEP = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    batch: int
    context: int
    """Tokens that each request attends to in the middle of the measurement."""
    prefill_tokens_per_s: float
    step_s: float
    must_move_bytes: int
    """Weights and keys and values that a step must read at least."""

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def bytes_per_s(self) -> float:
        return self.must_move_bytes / self.step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    kernels: float
    """Kernels and copies per step on the device."""
    device_s: float
    """Time per step that the device spends in them."""


class Decoder:
    def __init__(
        self, machine: Machine, shape: ModelShape, *, room_for: Sequence[tuple[int, int]], async_scheduling: bool = False
    ) -> None:
        """`room_for`: requests, and tokens of each, of which the largest must fit into the cache."""
        self.shape, self._machine = shape, machine
        self._dtype = parallel.resolve_dtype(machine.device)
        self._ids = itertools.count()
        self._random = torch.Generator().manual_seed(11)
        page = WorkerConfig().kv_block_tokens
        pages = max(requests * -(-tokens // page) for requests, tokens in [*room_for, (1, shape.context_tokens)]) + 3
        needed = pages * page * counts.kv_bytes_per_token(shape, self._dtype)
        self.core = EngineCore(
            shape=shape,
            tokenizer=TokenIds(shape.vocab_size),
            worker=WorkerConfig(
                kv_cache_gb=needed / 2**30,
                prompt_tokens_per_step=PROMPT_TOKENS_PER_STEP,
                max_running=max(requests for requests, _ in room_for),
                async_scheduling=async_scheduling,
            ),
            device=machine.device,
            dtype=self._dtype,
            seed=7,
            layer_spec="local",
        )
        self.core.swap(0, self.random_weights(seed=1))

    @property
    def replays(self) -> int:
        """Steps so far that were CUDA graphs."""
        return self.core.graphs.replays if self.core.graphs is not None else 0

    def random_weights(self, seed: int) -> dict[str, torch.Tensor]:
        random = torch.Generator(self._machine.device).manual_seed(seed)
        return {
            spec.name: torch.randn(spec.shape, generator=random, device=self._machine.device).mul_(0.02).to(self._dtype)
            for spec in specs(self.shape, self._dtype)
        }

    def measure(self, batch: int, prompt: int, *, steps: int, warm_up: int = 5) -> Decoded:
        """Time the prompts of `batch` requests, then `steps` steps in which all of them decode."""
        while_others_begin = -(-batch * prompt // PROMPT_TOKENS_PER_STEP) + 2
        running = self.start(batch, prompt, tokens=while_others_begin + warm_up + steps + 1)
        prefill_s = self._timed(lambda: self.step_until(lambda: all(each.token_ids for each in running)))
        self.steps(warm_up)
        before = sum(len(each.token_ids) for each in running)
        spent = self._timed(lambda: self.steps(steps))
        made = sum(len(each.token_ids) for each in running) - before
        assert made == batch * steps, f"{made} tokens in {steps} steps of {batch} requests"
        context = prompt + (before + made // 2) // batch
        self.finish(running)
        return Decoded(
            batch=batch,
            context=context,
            prefill_tokens_per_s=batch * prompt / prefill_s,
            step_s=spent / steps,
            must_move_bytes=counts.weight_bytes(self.shape, self._dtype)
            + batch * context * counts.kv_bytes_per_token(self.shape, self._dtype),
        )

    def start(self, batch: int, prompt: int, tokens: int, *, finish: Callable[[], object] = lambda: None) -> list[Generation]:
        """Submit requests whose prompts no request had before, so that none is remembered. `finish` is called at each end."""
        sampling = Sampling(max_tokens=tokens, temperature=1.0, top_p=1.0, top_k=0, stop=(), stop_token_ids=(), seed=None)
        running = [
            Generation(
                id=next(self._ids),
                prompt=torch.randint(4, self.shape.vocab_size, (prompt,), generator=self._random).tolist(),
                sampling=sampling,
                finish=lambda _: finish(),
            )
            for _ in range(batch)
        ]
        for each in running:
            self.core.submit(each)
        return running

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def step_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self.core.step()

    def finish(self, running: list[Generation]) -> None:
        """End the requests, so that the next measurement begins with an empty engine."""
        for each in running:
            self.core.cancel(each)
        self.step_until(lambda: not self.core.can_step)

    def profile(self, batch: int, prompt: int, *, steps: int = 5) -> Profiled:
        """Profile steps in which `batch` requests decode."""
        running = self.start(batch, prompt, tokens=-(-batch * prompt // PROMPT_TOKENS_PER_STEP) + 2 * steps + 3)
        self.step_until(lambda: all(each.token_ids for each in running))
        self.steps(steps)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._machine.is_gpu else [])]
        with profile(activities=activities) as seen:
            self.steps(steps)
            self._machine.synchronize()
        self.finish(running)
        on_device = [event for event in seen.events() or () if event.device_type == DeviceType.CUDA]
        return Profiled(
            kernels=len(on_device) / steps, device_s=sum(event.time_range.elapsed_us() for event in on_device) / steps / 1e6
        )

    def _timed(self, work: Callable[[], None]) -> float:
        self._machine.synchronize()
        started = time.perf_counter()
        work()
        self._machine.synchronize()
        return time.perf_counter() - started
