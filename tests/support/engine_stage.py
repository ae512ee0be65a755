"""A small model, its engine, and what a full forward pass without any engine says about it."""

import asyncio
import importlib.util
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from async_rl.config.rollout import WorkerConfig
from async_rl.megatron import parallel
from async_rl.megatron.compat import GPTModel
from async_rl.megatron.engine.async_scheduling import async_schedule_mode
from async_rl.megatron.model import build_model, forward_packed, pack
from async_rl.megatron.parameters.full_parameters import load_full
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.rollout_engine import EngineSetup
from rollout_workers.inference.stepped_engine import SteppedEngine
from tests.support.full_parameters import gather_full
from tests.support.packed_outputs import completion_logprobs

MEGATRON_SCHEDULES = importlib.util.find_spec("megatron.core.inference.config") is not None
"""Newer versions of megatron-core divide prompts and share prefixes in their own way."""
SCHEDULES_ASYNC = pytest.mark.skipif(
    async_schedule_mode() is None, reason="this version of megatron-core has no async scheduling"
)

CPU = torch.device("cpu")
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
TOKENIZER = Characters(ALPHABET)


class Endless(Characters):
    """No generation ends before its limit."""

    end_id = -1


class Gate(Endless):
    """Holds the engine's thread in the middle of the step with number `after`, counted from 1."""

    def __init__(self, after: int) -> None:
        super().__init__(ALPHABET)
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._left = after
        self._opened = threading.Event()

    @property
    def end_id(self) -> int:
        self._left -= 1
        if self._left == 0:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._opened.wait()
        return -1

    def open(self) -> None:
        self._opened.set()


ENDLESS = Endless(ALPHABET)
SHAPE = ModelShape(
    hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=64, vocab_size=TOKENIZER.vocab_size, max_positions=64,
    rope_theta=1e4, init_std=0.3,
)  # fmt: skip
DEFAULTS = GenerationArgs(max_tokens=16, temperature=1.0, top_p=1.0, top_k=0, stop=())
Weights = Mapping[str, torch.Tensor]


@cache
def weights(seed: int) -> Weights:
    parallel.initialize(device=CPU)
    full = gather_full(build_model(SHAPE, device=CPU, dtype=torch.float32, seed=seed), SHAPE)
    assert full is not None
    return full


@cache
def plain_model() -> GPTModel:
    parallel.initialize(device=CPU)
    return build_model(SHAPE, device=CPU, dtype=torch.float32, seed=0)


def plain_model_with(weights: Weights) -> GPTModel:
    model = plain_model()
    load_full(model, SHAPE, weights)
    return model


def logits_of(weights: Weights, row: Sequence[int]) -> torch.Tensor:
    """One full forward pass, without engine, cache or pages."""
    model = plain_model_with(weights)
    with torch.no_grad():
        return forward_packed(model, *pack([torch.tensor(row)])).logits()


def next_logits(weights: Weights, row: Sequence[int]) -> torch.Tensor:
    return logits_of(weights, row)[-1]


def recomputed(
    weights: Weights,
    prompt: Sequence[int],
    completion: Completion,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
) -> np.ndarray:
    """Log-probabilities of the completion's tokens, as the learner computes them."""
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    return completion_logprobs(plain_model_with(weights), prompt, completion.token_ids, **how)


def engine(**changed: object) -> MegatronEngine:
    return MegatronEngine(**arguments(changed))


def engine_of(backend: str, **changed: object) -> SteppedEngine:
    """The engine of `worker.backend`."""
    if backend == "megatron":
        return engine(**changed)
    from rollout_workers.inference.huggingface.engine import HuggingFaceEngine  # late: transformers takes seconds

    given = arguments(changed)
    device = given.pop("device")
    return HuggingFaceEngine(EngineSetup(**given, devices=(device,), dtype=torch.float32))


def arguments(changed: Mapping[str, object]) -> dict[str, Any]:
    worker = WorkerConfig(kv_cache_gb=0.01, kv_block_tokens=8)
    return {
        "shape": SHAPE,
        "tokenizer": TOKENIZER,
        "worker": worker,
        "sampling": DEFAULTS,
        "device": CPU,
        "seed": 7,
    } | dict(changed)


def prompts(count: int, longest: int = 23) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(4, SHAPE.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def cache_of(*, blocks: int) -> WorkerConfig:
    tokens, floats = 8, 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim
    return WorkerConfig(kv_cache_gb=(blocks + 0.5) * tokens * floats * 4 / 2**30, kv_block_tokens=tokens)
