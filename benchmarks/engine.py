"""Compare the engine's speed with Hugging Face's `generate`: same weights, batch, lengths, dtype and threads.

Both have their turn in every round. The engine also returns log-probabilities and versions, which `generate` does not.

    python benchmarks/engine.py --rounds 9 --json result.json
    python benchmarks/engine.py --host            # the host's time of a step instead
    python benchmarks/engine.py --operators       # the operators of a step instead
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from engine_parts.host_time import host_time
from engine_parts.operators import decode, operator_times, print_times
from torch import Tensor

from async_rl.config import Config
from async_rl.config.tokenizer import CharacterTokenizer
from async_rl.megatron import parallel
from async_rl.megatron.huggingface.tensors import from_canonical
from async_rl.megatron.model import build_model
from async_rl.megatron.parameters.full_parameters import local_parameters
from async_rl.models.from_config import model_shape
from async_rl.models.shape import ModelShape
from async_rl.protocols import GenerationArgs
from async_rl.tokenization.tokenizers import Characters
from async_rl.types import Completion
from rollout_workers.inference.engine import MegatronEngine
from rollout_workers.inference.engine_core import EngineCore

REPOSITORY = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")


class Endless(Characters):
    """Only its limit ends a generation, so that both sides generate the same number of tokens."""

    end_id = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The requests of a round, the same for both sides."""

    batch: int
    prompt_tokens: int
    answer_tokens: int

    def prompts(self, vocab_size: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(4, vocab_size, (self.batch, self.prompt_tokens), generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    tokens_per_s_vs_hf_generate: float
    """Median of the rounds' ratios; above 1 the engine is faster."""
    tokens_per_s: float
    hf_tokens_per_s: float
    ms_per_step: float
    hf_ms_per_step: float
    largest_logprob_difference: float
    """Between the engine's log-probabilities and Hugging Face's forward pass over the same rows."""
    seconds: list[float]
    hf_seconds: list[float]
    batch: int
    prompt_tokens: int
    answer_tokens: int
    threads: int
    megatron_core: str
    transformers: str
    torch: str
    load_before: float


class HuggingFace:
    """Return transformers' Llama with the same weights."""

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        self._model: Any = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=shape.hidden,
                num_hidden_layers=shape.layers,
                num_attention_heads=shape.heads,
                num_key_value_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                intermediate_size=shape.ffn,
                vocab_size=shape.vocab_size,
                max_position_embeddings=shape.max_positions,
                rms_norm_eps=shape.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
                tie_word_embeddings=shape.tied_embeddings,
            )
        ).eval()
        missing, unexpected = self._model.load_state_dict(from_canonical(weights, shape), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing

    def generate(self, prompts: Tensor, answer_tokens: int) -> None:
        with torch.inference_mode():
            rows = self._model.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=answer_tokens,
                eos_token_id=None,
                pad_token_id=0,
                use_cache=True,
            )
        assert rows.shape == (len(prompts), prompts.shape[1] + answer_tokens)

    def logprobs(self, prompts: Tensor, answers: Tensor) -> Tensor:
        with torch.inference_mode():
            logits = self._model(torch.cat([prompts, answers], dim=1)).logits
        first = prompts.shape[1] - 1
        return logits[:, first:-1].log_softmax(-1).gather(-1, answers[:, :, None])[:, :, 0]


async def generate(engine: MegatronEngine, prompts: Tensor, answer_tokens: int) -> list[Completion]:
    args = GenerationArgs(max_tokens=answer_tokens)
    return await asyncio.gather(*(engine.generate(prompt, args) for prompt in prompts.tolist()))


def model_of(config: Config) -> tuple[ModelShape, Endless, dict[str, Tensor]]:
    """Return the configuration's model with a tokenizer whose generations do not end, and random weights."""
    assert isinstance(config.tokenizer, CharacterTokenizer), "this benchmark's prompts are characters"
    tokenizer = Endless(config.tokenizer.alphabet)
    shape = model_shape(config.model, tokenizer.vocab_size)
    parallel.initialize(device=CPU)
    model = build_model(shape, device=CPU, dtype=torch.float32, seed=1)
    return shape, tokenizer, {name: parameter.detach() for name, parameter in local_parameters(model).items()}


async def compare(config: Config, load: EngineLoad, rounds: int) -> Result:
    load_before = os.getloadavg()[0]
    shape, tokenizer, weights = model_of(config)
    rival = HuggingFace(shape, weights)
    prompts, found = torch.empty(0), list[Completion]()
    ours_s, theirs_s = list[float](), list[float]()
    sampling = config.sampling.generation_args
    async with MegatronEngine(shape, tokenizer, config.worker, sampling, device=CPU, seed=7) as engine:
        await engine.swap(0, weights)
        for number in range(-1, rounds):  # the first round only warms up
            prompts = load.prompts(shape.vocab_size, number + 1)
            started = time.perf_counter()
            found = await generate(engine, prompts, load.answer_tokens)
            between = time.perf_counter()
            rival.generate(prompts, load.answer_tokens)
            ended = time.perf_counter()
            if number >= 0:
                ours_s.append(between - started)
                theirs_s.append(ended - between)
    answers = torch.tensor([completion.token_ids.tolist() for completion in found])
    claimed = torch.tensor([completion.logprobs.tolist() for completion in found])
    ours, theirs = statistics.median(ours_s), statistics.median(theirs_s)
    tokens = load.batch * load.answer_tokens
    return Result(
        tokens_per_s_vs_hf_generate=statistics.median(b / a for a, b in zip(ours_s, theirs_s, strict=True)),
        tokens_per_s=tokens / ours,
        hf_tokens_per_s=tokens / theirs,
        ms_per_step=1e3 * ours / load.answer_tokens,
        hf_ms_per_step=1e3 * theirs / load.answer_tokens,
        largest_logprob_difference=(rival.logprobs(prompts, answers) - claimed).abs().max().item(),
        seconds=ours_s,
        hf_seconds=theirs_s,
        batch=load.batch,
        prompt_tokens=load.prompt_tokens,
        answer_tokens=load.answer_tokens,
        threads=torch.get_num_threads(),
        megatron_core=version("megatron-core"),
        transformers=version("transformers"),
        torch=torch.__version__,
        load_before=load_before,
    )


def measure_host(path: Path | None) -> None:
    times = [host_time(batch, 96, Endless("0123456789=")) for batch in (64, 256)]
    print("ms of thread CPU       decode step   turnover step   one layer   nn.Linear   decode step / nn.Linear")
    for each in times:
        print(
            f"batch {each.batch:<16} {each.decode_ms:11.2f} {each.turnover_ms:15.2f} {each.layer_ms:11.2f} "
            f"{each.linear_ms:11.4f} {each.decode_ms / each.linear_ms:25.0f}"
        )
    if path:
        figures = {f"{name}_{each.batch}": value for each in times for name, value in asdict(each).items() if name != "batch"}
        path.write_text(json.dumps(figures, indent=2) + "\n")


def compare_operators(config: Config, load: EngineLoad, path: Path | None) -> None:
    shape, tokenizer, weights = model_of(config)
    core = EngineCore(
        shape=shape, tokenizer=tokenizer, worker=config.worker, device=CPU, dtype=torch.float32, seed=7, layer_spec="local"
    )
    core.swap(0, weights)
    rival, prompts = HuggingFace(shape, weights), load.prompts(shape.vocab_size, 0)
    ours = operator_times(lambda: decode(core, prompts.tolist(), load.answer_tokens), load.answer_tokens)
    theirs = operator_times(lambda: rival.generate(prompts, load.answer_tokens), load.answer_tokens)
    print_times(ours, theirs)
    if path:
        named = {"engine": ours, "generate": theirs}
        figures = {f"{side}_{kind}_ms": took for side, column in named.items() for kind, took in column.items()}
        path.write_text(json.dumps({name.replace(" ", "_"): took for name, took in figures.items()}, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "quickstart.yaml", help="whose model to use")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=8)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1, help="of both sides; small matrices gain nothing from more")
    parser.add_argument("--host", action="store_true", help="measure the thread CPU time of a step outside the layers instead")
    parser.add_argument(
        "--operators", action="store_true", help="measure which operators a step of either side spends its time in"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.host:
        measure_host(args.json)
        return
    config = Config.model_validate(yaml.safe_load(args.config.read_text()))
    load = EngineLoad(batch=args.batch, prompt_tokens=args.prompt_tokens, answer_tokens=args.answer_tokens)
    if args.operators:
        compare_operators(config, load, args.json)
        return
    result = asyncio.run(compare(config, load, args.rounds))
    print(f"engine                 {result.tokens_per_s:9.0f} tokens/s   {result.ms_per_step:6.2f} ms per step")
    print(f"Hugging Face generate  {result.hf_tokens_per_s:9.0f} tokens/s   {result.hf_ms_per_step:6.2f} ms per step")
    print(f"ratio                  {result.tokens_per_s_vs_hf_generate:9.2f}   (medians of {args.rounds} interleaved rounds)")
    if args.json:
        args.json.write_text(json.dumps(asdict(result), indent=2) + "\n")


if __name__ == "__main__":
    main()
