"""An engine behind `InferenceInterface`: one thread steps its core, all generations share the core's batches.

event loop                                  engine thread
generate ──▶ commands: submit, cancel, swap ──▶ between two steps
    ◀────────── completion, error ──────────── step, step, step ...
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from async_rl.errors import ServiceStopped
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.supervision import working
from async_rl.tokenization.rendering import prompt_ids
from async_rl.types import Completion
from rollout_workers.inference.generation import Generation, resolve
from rollout_workers.inference.interface import Inference
from rollout_workers.inference.rollout_engine import EngineMetrics

RECENT = 64
"""Number of generations averaged for the queue time."""


class SteppedCore(Protocol):
    """Model, KV cache and running generations. One thread builds it and calls it."""

    @property
    def kernel(self) -> str:
        """Name of the attention kernel used for decoding."""
        ...

    @property
    def version(self) -> int: ...

    @property
    def metrics(self) -> EngineMetrics: ...

    @property
    def can_step(self) -> bool:
        """Whether there are weights and generations."""
        ...

    def submit(self, generation: Generation) -> None: ...

    def cancel(self, generation: Generation) -> None:
        """Forget a generation, which may have ended already."""
        ...

    def swap(self, number: int, tensors: Mapping[str, Tensor]) -> None: ...

    def step(self) -> None:
        """Sample one token for every running generation, and deliver the completions of those that end. Only if `can_step`."""
        ...

    def close(self) -> None: ...


class SteppedEngine(Inference):
    """Enter with `async with`: entering builds the core on the engine's thread, leaving ends every generation."""

    returns: Returns = "logprobs"

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        sampling: GenerationArgs,
        *,
        device: torch.device,
        dtype: torch.dtype,
        build: Callable[[], SteppedCore],
    ) -> None:
        """`sampling` holds the run's defaults. `build` makes the object that the thread calls."""
        self.tokenizer = tokenizer
        self.device = device
        """The device from which weights of a swap are read fastest."""
        self.shape = shape
        self._dtype = dtype
        self._defaults = sampling
        self._build = build
        self._ids = itertools.count()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inference-engine")
        self._core: SteppedCore | None = None
        self._is_closing = False
        self._failure: BaseException | None = None
        self._is_step_queued = False
        """Only the thread reads and writes it."""
        self._waiters: set[asyncio.Future[Completion]] = set()

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        try:
            await self._loop.run_in_executor(self._thread, self._open)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()
        if self._failure is not None and error is None:
            raise self._stopped()

    async def watch(self) -> None:
        """Service: return when the engine is closed, raise what broke its thread."""
        await asyncio.shield(self._ended)

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        """Raises ValueError for what cannot be generated."""
        token_ids = self._token_ids(prompt)
        sampling = resolve(args.over(self._defaults), prompt_length=len(token_ids), context_tokens=self.shape.context_tokens)
        done: asyncio.Future[Completion] = self._loop.create_future()
        generation = Generation(
            id=next(self._ids),
            prompt=token_ids,
            sampling=sampling,
            finish=lambda completion: self._loop.call_soon_threadsafe(_resolve, done, completion),
        )
        self._raise_if_stopped()
        self._waiters.add(done)
        try:
            self._thread.submit(self._run, lambda core: core.submit(generation))
            return await done
        except asyncio.CancelledError:
            if not self._is_closing:
                self._thread.submit(self._run, lambda core: core.cancel(generation))
            raise
        finally:
            self._waiters.discard(done)

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve other weights from the next step on; `tensors` are full parameters under canonical names.

        Running generations continue on them, with the KV cache they have. Raises ValueError, and changes nothing, when the
        tensors do not fit or `version` does not exceed the one held.
        """
        self._raise_if_stopped()
        await self._loop.run_in_executor(self._thread, self._swap, version, tensors)

    @property
    def specs(self) -> list[ParameterSpec]:
        """The parameters that `swap` expects."""
        return specs(self.shape, self._dtype)

    @property
    def version(self) -> int:
        """Version of the weights that sample the next token; -1 before the first."""
        return self._core.version if self._core is not None else -1

    @property
    def kernel(self) -> str:
        """Name of the attention kernel used for decoding."""
        return self._core.kernel if self._core is not None else ""

    @property
    def metrics(self) -> EngineMetrics:
        if self._core is None:
            return EngineMetrics()
        return self._core.metrics

    def _token_ids(self, prompt: Prompt) -> list[int]:
        token_ids = prompt_ids(prompt, self.tokenizer)
        if wrong := [token for token in token_ids if not 0 <= token < self.shape.vocab_size]:
            raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {self.shape.vocab_size}")
        return token_ids

    # -- the end --------------------------------------------------------------------------------------------------------

    def _raise_if_stopped(self) -> None:
        if self._is_closing or self._failure is not None:
            raise self._stopped()

    def _stopped(self) -> ServiceStopped:
        if self._failure is None:
            return ServiceStopped("the inference engine is closed")
        stopped = ServiceStopped(f"the inference engine broke: {self._failure}")
        stopped.__cause__ = self._failure
        return stopped

    async def _close(self) -> None:
        self._is_closing = True
        try:
            await asyncio.shield(self._loop.run_in_executor(self._thread, self._retire))
        finally:
            self._thread.shutdown(wait=False)
            self._release()

    def _release(self) -> None:
        """Fail all generations, and end `watch`."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._stopped())
        if self._ended.done():
            return
        if self._failure is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(self._failure)
            self._ended.exception()  # retrieved: without `watch` it is raised by generate and __aexit__

    # -- the thread -----------------------------------------------------------------------------------------------------

    @working("the construction of the engine")
    def _open(self) -> None:
        self._core = self._build()

    @working("new weights or requests of the engine")
    def _run(self, command: Callable[[SteppedCore], None]) -> None:
        """Run a command, and queue a step behind the commands that came meanwhile. An exception breaks the engine."""
        if self._core is None or self._is_closing or self._failure is not None:
            return
        try:
            command(self._core)
            self._queue_step(self._core)
        except BaseException as error:
            self._failure = error
            self._loop.call_soon_threadsafe(self._release)

    @working("new weights or requests of the engine")
    def _swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if self._core is None or self._is_closing or self._failure is not None:
            raise self._stopped()
        self._core.swap(version, tensors)
        self._queue_step(self._core)

    def _queue_step(self, core: SteppedCore) -> None:
        if core.can_step and not self._is_step_queued:
            self._is_step_queued = True
            self._thread.submit(self._run, self._step)

    @working("an engine step")
    def _step(self, core: SteppedCore) -> None:
        self._is_step_queued = False
        if core.can_step:  # or all were cancelled since it was queued
            core.step()

    def _retire(self) -> None:
        if self._core is not None:
            self._core.close()


def _resolve(done: asyncio.Future[Completion], completion: Completion) -> None:
    if not done.done():  # its caller may have left
        done.set_result(completion)
