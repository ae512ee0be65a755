"""Steps as CUDA graphs: captured once for some numbers of tokens, replayed with one launch.

tokens of a step ──▶ copied into tensors that stay in place ──▶ the smallest graph that holds them ──▶ logits
                      rows of padding have no keys                     reads the weights where they lie

A step may also compute short prompts: each of their tokens is a row, like one that decodes.

New weights are copied into the old ones' memory, so that a graph computes with them. Without a GPU a step runs as it is, on the
same tensors with the same padding.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import structlog
import torch
from torch import Tensor

from async_rl.megatron.engine.decode_step import DecodeInputs

log = structlog.get_logger("rollout_workers.inference")

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Runs a function at least once, and returns what does the same again."""

SHORTEST_REACH, REACH_FACTOR = 4096, 8
"""Bound of the lengths of the first graphs, and how much further the next ones reach."""
MOST_PROMPT_TOKENS, MOST_PROMPT_KEYS = 512, 1 << 19
"""Tokens of the prompts in a captured step, for which there are rows besides those of running requests; and keys that these
rows read. Longer prompts are faster in kernels that read keys once for many tokens (docs/decisions/cuda_path.md).
"""


class Step(Protocol):
    """See decode_step.DecodeStep."""

    def __call__(self, inputs: DecodeInputs, longest: int) -> Tensor: ...

    def addresses(self) -> tuple[int, ...]: ...


class DecodeGraphs:
    """Captures at construction. Not thread-safe: the engine's thread builds and calls it, in inference mode."""

    def __init__(
        self,
        step: Step,
        *,
        requests: int,
        prompt_tokens: int,
        columns: int,
        context_tokens: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """For at most `requests` of `columns` blocks and `context_tokens` tokens each, and at most `prompt_tokens` of
        prompts beside them, up to MOST_PROMPT_TOKENS.
        """
        self.replays = 0
        """Steps that a graph computed."""
        self._step = step
        self._capture = capture
        rows = requests + min(prompt_tokens, MOST_PROMPT_TOKENS)
        self._sizes = sorted({*batch_sizes(requests), *batch_sizes(rows)})
        self._reaches = reaches(context_tokens)
        self._inputs = DecodeInputs.empty(rows, requests, columns, device)
        self._logits = torch.empty_like(step(self._inputs, self._reaches[0]))
        self._used = 0, 0
        """Rows and requests of the inputs that the last step filled; the others have no keys, and the first row's logits."""
        self._replay: dict[tuple[int, int], Run] = {}
        self._capture_all()

    def fits(self, tokens: int, prompt_keys: int) -> bool:
        """Whether a step of so many tokens can be run, and should: `prompt_keys` are those that its prompts' tokens read."""
        return tokens <= self._sizes[-1] and prompt_keys <= MOST_PROMPT_KEYS

    def run(self, inputs: DecodeInputs, *, longest: int) -> Tensor:
        """Logits [requests, vocabulary] of a step, to be read before the next one; `longest` bounds `inputs.lengths`."""
        rows, requests = len(inputs.tokens), len(inputs.last)
        own = self._inputs
        own.tokens[:rows].copy_(inputs.tokens)
        own.lengths[:rows].copy_(inputs.lengths)
        own.blocks[:rows].copy_(inputs.blocks)
        own.last[:requests].copy_(inputs.last)
        for padded, filled, before in zip((own.lengths, own.last), (rows, requests), self._used, strict=True):
            if filled < before:
                padded[filled:before].zero_()
        self._used = rows, requests
        self._replay[_next_of(self._sizes, rows), _next_of(self._reaches, longest)]()
        self.replays += 1
        return self._logits[:requests]

    def refresh(self) -> None:
        """Capture again if weights or cache have moved since, as after a change that did not copy in place."""
        if self._step.addresses() != self._addresses:
            self._capture_all()

    def _capture_all(self) -> None:
        began = time.perf_counter()
        self._inputs.lengths.zero_()  # nothing of a running generation is written
        self._inputs.last.zero_()
        self._logits = torch.empty_like(self._logits)  # those of the last step may not have been read yet
        self._used = 0, 0
        self._addresses = self._step.addresses()
        # The largest first: the memory of its numbers between layers is enough for all others. Replaced graphs are kept
        # until then, because a memory pool that no graph uses any more is gone.
        self._replay = {
            (size, reach): self._capture(partial(self._run, size, reach))
            for size in reversed(self._sizes)
            for reach in self._reaches
        }
        log.info("steps are captured", graphs=len(self._replay), seconds=round(time.perf_counter() - began, 2))

    def _run(self, size: int, reach: int) -> None:
        self._logits[:size].copy_(self._step(self._inputs.first(size), reach))


class CudaCapture:
    """Captures CUDA graphs that share a memory pool. They run one at a time, so what one leaves there another may overwrite."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, run: Run) -> Run:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # compiles kernels and makes workspaces, which a capture must not
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.current_stream()
        try:
            # Other threads of a worker receive weights meanwhile: their calls must not end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(before)  # torch leaves another one behind if the capture fails
        return graph.replay


def run_again(run: Run) -> Run:
    """The `Capture` of devices without graphs."""
    run()
    return run


def batch_sizes(most: int) -> Sequence[int]:
    """Numbers of rows to capture: powers of 2, from 64 on also those in the middle between two, and `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length())]
    middles = [power * 3 // 2 for power in powers if power >= 64]
    return sorted({size for size in (*powers, *middles) if size < most} | {most})


def reaches(context_tokens: int) -> Sequence[int]:
    """Bounds of lengths to capture: attention to longer sequences is divided among more programs, all of which are launched."""
    found = []
    reach = SHORTEST_REACH
    while reach < context_tokens:
        found.append(reach)
        reach *= REACH_FACTOR
    return [*found, context_tokens]


def _next_of(bounds: Sequence[int], number: int) -> int:
    """The first bound that is not below a number."""
    return bounds[bisect_left(bounds, number)]
