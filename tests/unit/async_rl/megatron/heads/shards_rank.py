"""One of two tensor ranks: computes with its half of the vocabulary, and writes what it found."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from async_rl.megatron import parallel
from async_rl.megatron.heads.divergence import divergence
from async_rl.megatron.heads.logprobs import token_logprobs_and_entropies
from async_rl.megatron.heads.output_layer import OutputLayer
from async_rl.megatron.heads.packed_output import PackedOutput
from tests.unit.async_rl.megatron.heads.naive import Given

TEMPERATURE = 0.7
VOCABULARIES = {"padding": 19, "a rank with padding alone": 9}
"""Of 22 entries, of which each rank has 11."""
SPLITS = {"whole tokens": False, "own tokens": True}
"""Whether each rank has a part of the tokens as well (sequence parallelism)."""
BYTES = 3 * 3 * 11 * 8


def given(vocab_size: int) -> Given:
    return Given.random(10, vocab_size=vocab_size)


def teacher(vocab_size: int) -> Given:
    return Given.random(10, vocab_size=vocab_size, width=4, seed=2)


def output(hidden: Tensor, weight: Tensor, vocab_size: int, *, sequence: bool) -> PackedOutput:
    layer = OutputLayer(None, vocab_size=vocab_size, bytes_at_once=BYTES, sequence_parallel=sequence)
    return PackedOutput(hidden=hidden, tokens=10, output_layer=layer, weight=weight)


def main(folder: Path, rank: int) -> None:
    meeting = parallel.Rendezvous(store=FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    parallel.initialize(device=torch.device("cpu"), rendezvous=meeting, tensor=2)
    written: dict[str, Tensor] = {}
    for vocabulary, vocab_size in VOCABULARIES.items():
        for split, sequence in SPLITS.items():
            mine, of_teacher = given(vocab_size), teacher(vocab_size)
            hidden = (mine.hidden.chunk(2)[rank] if sequence else mine.hidden).clone().requires_grad_()
            weight = mine.weight.chunk(2)[rank].clone().requires_grad_()
            frozen = of_teacher.hidden.chunk(2)[rank] if sequence else of_teacher.hidden
            beside = output(frozen, of_teacher.weight.chunk(2)[rank], vocab_size, sequence=sequence)
            student = output(hidden, weight, vocab_size, sequence=sequence)
            logprobs, entropies = token_logprobs_and_entropies(student, mine.targets, temperature=TEMPERATURE)
            apart = divergence(student, beside, direction="mixed", temperature=TEMPERATURE)
            for name, value in {"logprobs": logprobs, "entropies": entropies, "divergence": apart}.items():
                directions = torch.linspace(-1, 1, 10, dtype=torch.float64)
                gradients = torch.autograd.grad((value * directions).sum(), (hidden, weight), retain_graph=True)
                label = f"{vocabulary}.{split}.{name}"
                written |= {f"{label}.value": value.detach(), f"{label}.hidden": gradients[0], f"{label}.weight": gradients[1]}
    save_file({name: tensor.contiguous() for name, tensor in written.items()}, folder / f"{rank}.safetensors")
    parallel.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
