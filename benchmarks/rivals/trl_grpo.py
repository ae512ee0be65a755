"""TRL's GRPOTrainer on the even-digits task, on a CPU: trains until the reward is reached and prints one line of JSON.

Runs in the virtual environment of `trl_requirements.txt`; benchmarks/end_to_end.py makes it and passes every flag from
configs/end_to_end.yaml. Nothing is downloaded: tokenizer, model and tasks are made here.
"""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

PAD, BOS, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
NUM_TASKS = 4096
PROMPT_DIGITS = 7


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--target", type=float, default=0.9, help="reward at which training ends")
    parser.add_argument("--window", type=int, default=3, help="steps whose mean reward must reach the target")
    parser.add_argument("--steps", type=int, default=100, help="give up after this many")
    parser.add_argument("--alphabet", default="0123456789=+-*/()abcdefghijklmnopqrstuvwxyz")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=512)
    parser.add_argument("--max-positions", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of one step")
    parser.add_argument("--group-size", type=int, default=8, help="completions of one prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of one completion")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--wait-median", type=float, default=0.0, help="seconds; every episode waits so long for its reward")
    parser.add_argument("--wait-sigma", type=float, default=1.0, help="of the lognormal distribution of waits")
    return parser.parse_args()


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate([PAD, BOS, END, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=END, unk_token=UNKNOWN, padding_side="left"
    )


def llama(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    ids = tokenizer.get_vocab()
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(ids),
            hidden_size=args.hidden,
            intermediate_size=args.ffn,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads,
            max_position_embeddings=args.max_positions,
            pad_token_id=ids[PAD],
            bos_token_id=ids[BOS],
            eos_token_id=ids[END],
            tie_word_embeddings=True,
        )
    )


def prompts(seed: int) -> Dataset:
    draw = random.Random(seed)
    return Dataset.from_dict({"prompt": ["".join(draw.choices("0123456789", k=PROMPT_DIGITS)) + "=" for _ in range(NUM_TASKS)]})


class EvenDigits:
    """Return the even digits as a share of the largest number of tokens, so that ending early gains nothing."""

    __name__ = "even_digits"  # TRL names its metrics after the reward function

    def __init__(self, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace) -> None:
        ids = tokenizer.get_vocab()
        self._even = {ids[digit] for digit in "02468"}
        self._max_tokens, self._median_s, self._sigma = args.max_tokens, args.wait_median, args.wait_sigma
        self._draw = random.Random(args.seed)

    def __call__(self, *, completion_ids: list[list[int]], **_: Any) -> list[float]:
        if self._median_s > 0:  # all at once, which is the best case
            time.sleep(max(self._draw.lognormvariate(math.log(self._median_s), self._sigma) for _ in completion_ids))
        return [sum(token in self._even for token in row) / self._max_tokens for row in completion_ids]


class StopAtReward(TrainerCallback):
    """Records the reward curve, in seconds from the start of training, and ends training at the target."""

    def __init__(self, target: float, window: int) -> None:
        self.rewards: list[float] = []
        self.seconds: list[float] = []
        self.reached = False
        self._target, self._window = target, window
        self._began = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if logs is None or "reward" not in logs:  # the closing summary has no reward
            return
        self.rewards.append(logs["reward"])
        self.seconds.append(time.perf_counter() - self._began)
        recent = self.rewards[-self._window :]
        if len(recent) == self._window and sum(recent) / self._window >= self._target:
            self.reached = control.should_training_stop = True


def grpo_config(args: argparse.Namespace, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        seed=args.seed,
        max_steps=args.steps,
        per_device_train_batch_size=args.prompts * args.group_size,
        gradient_accumulation_steps=1,
        num_generations=args.group_size,
        max_completion_length=args.max_tokens,
        temperature=args.temperature,
        beta=0.0,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        max_grad_norm=args.clip_grad,
        # The rest makes TRL as fast as possible on a CPU, and silent.
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        dataloader_num_workers=0,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )


def train(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = character_tokenizer(args.alphabet)
    model = llama(args, tokenizer)
    curve = StopAtReward(args.target, args.window)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=EvenDigits(tokenizer, args),
            args=grpo_config(args, folder),
            train_dataset=prompts(args.seed),
            processing_class=tokenizer,
            callbacks=[curve],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    steps = len(curve.rewards)
    return {
        "reached": curve.reached,
        "wall_s": curve.seconds[-1],
        "samples": steps * args.prompts * args.group_size,
        "steps": steps,
        "rewards": curve.rewards,
        "seconds": curve.seconds,
    }


def main() -> None:
    args = parse_args()
    with contextlib.redirect_stdout(sys.stderr):  # stdout carries only the result
        result = train(args)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
