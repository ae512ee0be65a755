"""Megatron inference behind `InferenceInterface`: one thread steps the engine, all generations share its batches.

event loop                                  engine thread
generate ──▶ commands: submit, cancel, swap ──▶ between two steps
    ◀────────── completion, error ──────────── step, step, step ...
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor

from async_rl.config.rollout import WorkerConfig
from async_rl.errors import ServiceStopped
from async_rl.megatron import parallel
from async_rl.megatron.model import LayerSpec
from async_rl.megatron.parameters.full_parameters import specs
from async_rl.models.parameter_spec import ParameterSpec
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs, Prompt, Returns, Tokenizer
from async_rl.supervision import working
from async_rl.types import Completion
from rollout_workers.inference.engine_core import EngineCore, EngineMetrics
from rollout_workers.inference.generation import Generation, resolve
from rollout_workers.inference.interface import Inference, prompt_ids

Value = TypeVar("Value")


class MegatronEngine(Inference):
    """Enter with `async with`: entering builds the model on the engine's thread, leaving ends every generation."""

    returns: Returns = "logprobs"

    def __init__(
        self,
        shape: ModelShape,
        tokenizer: Tokenizer,
        worker: WorkerConfig,
        sampling: GenerationArgs,
        *,
        device: torch.device,
        seed: int,
        dtype: torch.dtype | None = None,
        layer_spec: LayerSpec = "local",
        core: Callable[..., EngineCore] = EngineCore,
    ) -> None:
        """`sampling` holds the run's defaults; `seed` should differ between workers, or they sample alike.

        `dtype` None means the device's default. `core` makes the object that the thread calls.
        """
        self.tokenizer = tokenizer
        self.device = device
        """The device from which weights of a swap are read fastest."""
        self._dtype = dtype if dtype is not None else parallel.resolve_dtype(device)
        self.shape = shape
        self._defaults = sampling
        self._build = lambda: core(
            shape=shape,
            tokenizer=tokenizer,
            worker=worker,
            device=device,
            dtype=self._dtype,
            seed=seed,
            layer_spec=layer_spec,
        )
        self._ids = itertools.count()
        self._commands: deque[Callable[[EngineCore], None]] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._core: EngineCore | None = None
        self._waiters: set[asyncio.Future[Completion]] = set()

    async def __aenter__(self) -> MegatronEngine:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        ready: asyncio.Future[None] = self._loop.create_future()
        # A daemon thread does not keep the process alive if the event loop dies inside the `async with`.
        self._thread = threading.Thread(target=self._serve, args=(ready,), name="megatron-engine", daemon=True)
        self._thread.start()
        try:
            await ready
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()
        if self._failure is not None and error is None:
            raise ServiceStopped(f"the inference engine broke: {self._failure}") from self._failure

    async def watch(self) -> None:
        """Service: return when the engine is closed, raise what broke its thread."""
        await asyncio.shield(self._ended)

    async def _generate(self, prompt: Prompt, args: GenerationArgs) -> Completion:
        """Raises ValueError for what cannot be generated."""
        token_ids = self._token_ids(prompt)
        sampling = resolve(args.over(self._defaults), prompt_length=len(token_ids), max_positions=self.shape.max_positions)
        done: asyncio.Future[Completion] = self._loop.create_future()
        generation = Generation(
            id=next(self._ids),
            prompt=token_ids,
            sampling=sampling,
            finish=lambda completion: self._settle(done, completion, None),
        )
        self._waiters.add(done)
        try:
            self._post(lambda core: core.submit(generation))
            return await done
        except asyncio.CancelledError:
            self._post(lambda core: core.cancel(generation), only_if_alive=True)
            raise
        finally:
            self._waiters.discard(done)

    async def swap(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Serve other weights from the next step on; `tensors` are full parameters under canonical names.

        Running generations continue on them, with the KV cache they have. Raises ValueError, and changes nothing, when the
        tensors do not fit or `version` does not exceed the one held.
        """
        await self._call(lambda core: core.swap(version, tensors))

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
            return EngineMetrics(tokens_generated=0, steps=0, busy_s=0.0, active_requests=0)
        return self._core.metrics

    def _token_ids(self, prompt: Prompt) -> list[int]:
        token_ids = prompt_ids(prompt, self.tokenizer)
        if wrong := [token for token in token_ids if not 0 <= token < self.shape.vocab_size]:
            raise ValueError(f"token id {wrong[0]} is outside the model's vocabulary of {self.shape.vocab_size}")
        return token_ids

    # -- between the loop and the thread --------------------------------------------------------------------------------

    def _post(self, command: Callable[[EngineCore], None], *, only_if_alive: bool = False) -> None:
        with self._wake:
            if self._is_closing or self._failure is not None:
                if only_if_alive:
                    return
                raise self._stopped() from self._failure
            self._commands.append(command)
            self._wake.notify()

    async def _call(self, command: Callable[[EngineCore], Value]) -> Value:
        answer: asyncio.Future[Value] = self._loop.create_future()

        def run(core: EngineCore) -> None:
            try:
                value = command(core)
            except Exception as error:
                self._settle(answer, None, error)
            else:
                self._settle(answer, value, None)

        self._waiters.add(answer)  # pyright: ignore[reportArgumentType]
        try:
            self._post(run)
            return await answer
        finally:
            self._waiters.discard(answer)  # pyright: ignore[reportArgumentType]

    def _settle(self, future: asyncio.Future[Value], value: Value | None, error: BaseException | None) -> None:
        """Resolve a future of the event loop from the engine's thread."""

        def settle() -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # pyright: ignore[reportArgumentType]

        self._loop.call_soon_threadsafe(settle)

    def _stopped(self) -> ServiceStopped:
        if self._failure is not None:
            return ServiceStopped(f"the inference engine broke: {self._failure}")
        return ServiceStopped("the inference engine is closed")

    async def _close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        self._release_waiters()
        if not self._ended.done():
            self._ended.set_result(None)

    def _release_waiters(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                error = self._stopped()
                error.__cause__ = self._failure
                waiter.set_exception(error)

    # -- the thread -----------------------------------------------------------------------------------------------------

    def _serve(self, ready: asyncio.Future[None]) -> None:
        try:
            with working("the construction of the engine"):
                core = self._build()
        except BaseException as error:
            self._settle(ready, None, error)
            return
        self._core = core
        self._settle(ready, None, None)
        try:
            while self._next_commands(core):
                if core.can_step:
                    with working("an engine step"):
                        core.step()
        except BaseException as error:
            self._fail(error)
        finally:
            core.close()

    def _next_commands(self, core: EngineCore) -> bool:
        """Run posted commands, waiting for one while there is nothing to step. Returns False when closing.

        consumes: commands (_post)     waits for:    a command, unless a generation can go on
        produces: completions          unblocked by: generate, swap, closing
        """
        with self._wake:
            self._wake.wait_for(lambda: self._commands or self._is_closing or core.can_step)
            commands, self._commands = self._commands, deque()
            if self._is_closing:
                return False
        with working("new weights or requests of the engine"):
            for command in commands:
                command(core)
        return True

    def _fail(self, error: BaseException) -> None:
        with self._wake:
            self._failure = error

        def tell() -> None:
            self._release_waiters()
            if not self._ended.done():
                self._ended.set_exception(error)
                self._ended.exception()  # retrieved: without `watch` it is raised by generate and __aexit__

        self._loop.call_soon_threadsafe(tell)
