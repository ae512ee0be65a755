"""Sampling as Triton kernels: logits are read once, each row in parts at the same time. Start with `TritonDraws`.

token          argmax of logit / temperature + Gumbel noise, which is a sample of the softmax
noise          Philox random numbers of (seed of the request, tokens it has, token id), whatever the batch
top-k, top-p   first another kernel finds the least logit that is kept, by halving the range of floats, without a sort: among
               the largest logits, which it lists, or if these are too many or not enough, among all
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from async_rl.megatron.engine.sending import sent
from rollout_workers.inference.generation import Generation
from rollout_workers.inference.torch_draws import Drawn

# What a kernel is given is not what pyright sees: numbers become constants of the compiler, and Triton adds parameters.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

BLOCK = 1024
"""Tokens that a program handles at once; four times as many get their noise together."""
PARTS = 8
"""Programs that share a row. Their number is that of every batch, and so is the order in which probabilities are added."""
MOST_NEAR, NEAR = 4096, 12.0
"""Length of the list in which a cut is searched, and how far below the largest logit it reaches, in temperatures."""
EVERYTHING = -(2**31)
"""The cut that keeps all tokens."""
_EMPTY_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""Lowest bits of a float32 that numbers of a dtype do not use."""


class TritonDraws:
    """Draws for the generations of a batch, which stay on the device until one begins or ends."""

    def __init__(self, generations: Sequence[Generation], device: torch.device, seeds: random.Random) -> None:
        """Generations without a seed get one from `seeds`, once."""
        sampling = [generation.sampling for generation in generations]
        for generation in generations:
            if generation.noise_seed is None:
                own = generation.sampling.seed
                generation.noise_seed = own if own is not None else seeds.getrandbits(63)
        self._shares = sent([(each.temperature, each.top_p) for each in sampling], torch.float32, device)
        self._numbers = sent(
            [(each.noise_seed, len(each.token_ids), each.sampling.top_k) for each in generations], torch.int64, device
        )
        cut = [row for row, each in enumerate(sampling) if each.is_truncated]
        self._cut_rows = sent(cut, torch.int32, device) if cut else None
        self._cuts = torch.full((len(generations),), EVERYTHING, dtype=torch.int32, device=device)

        self._on_host = torch.empty((2, len(generations)), dtype=torch.int32, pin_memory=device.type == "cuda")
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def draw(self, logits: Tensor) -> Drawn:
        """As TorchDraws.draw. The host waits for one copy of tokens and log-probabilities, which the next draw overwrites."""
        drawn = self.drawn(logits)
        self._on_host.copy_(drawn, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return Drawn(drawn[0], self._read)

    def _read(self) -> tuple[list[int], list[float]]:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._on_host[0].tolist(), self._on_host[1].view(torch.float32).tolist()

    def drawn(self, logits: Tensor) -> Tensor:
        """Draw a token per row of logits [requests, vocabulary]: int32 [2, requests], tokens and bits of log-probabilities."""
        rows, vocabulary = logits.shape
        assert logits.stride(1) == 1
        if self._cut_rows is not None:
            near = logits.new_empty((len(self._cut_rows), MOST_NEAR))
            _find_cut[(len(self._cut_rows),)](
                logits, logits.stride(0), vocabulary, self._cut_rows, self._shares, self._numbers, near, self._cuts,
                LOWEST=_EMPTY_BITS[logits.dtype], MOST_NEAR=MOST_NEAR, NEAR=NEAR, BLOCK=2 * BLOCK, num_warps=8,
            )  # fmt: skip
        of_parts = torch.empty((rows, 5, PARTS), dtype=torch.float32, device=logits.device)
        drawn = torch.empty((2, rows), dtype=torch.int32, device=logits.device)
        share = -(-vocabulary // (4 * BLOCK * PARTS)) * 4 * BLOCK
        _draw[(rows, PARTS)](
            logits, logits.stride(0), vocabulary, share, self._shares, self._numbers, self._cuts, of_parts,
            HAS_CUTS=self._cut_rows is not None, PARTS=PARTS, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        _merge[(rows,)](of_parts, self._shares, self._numbers, drawn, drawn.stride(0), PARTS=PARTS, num_warps=1)
        return drawn


@triton.jit
def _ordered(logit):
    """An integer that orders as the number does."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit(do_not_specialize=["vocabulary"])
def _find_cut(
    logits, row_stride, vocabulary, rows, shares, numbers, near, cuts,
    LOWEST: tl.constexpr,
    MOST_NEAR: tl.constexpr,
    NEAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """For each of `rows`: the largest integer such that the logits not below it are at least k, or hold the share p of what
    is among the k likeliest. Its bits below LOWEST are 0. `near`: memory for lists of the largest logits.
    """
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    temperature = tl.load(shares + row * 2)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    top_p = tl.load(shares + row * 2 + 1)
    top_k = tl.load(numbers + row * 3 + 2)
    logits += row * row_stride
    near += tl.program_id(0).to(tl.int64) * MOST_NEAR
    lane = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        logit = tl.load(logits + start + lane, mask=start + lane < vocabulary, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, logit)
    top = tl.max(largest, 0)

    listed = tl.full([], 0, tl.int32)
    mass, mass_near = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        is_token = start + lane < vocabulary
        stored = tl.load(logits + start + lane, mask=is_token, other=-float("inf"))
        logit = stored.to(tl.float32)
        is_near = is_token & (logit >= top - NEAR * temperature)
        likely = tl.exp((logit - top) / temperature)
        mass += tl.where(is_token, likely, 0.0)
        mass_near += tl.where(is_near, likely, 0.0)
        place = listed + tl.cumsum(is_near.to(tl.int32), 0) - 1
        tl.store(near + place, stored, mask=is_near & (place < MOST_NEAR))
        listed += tl.sum(is_near.to(tl.int32), 0)
    total = tl.sum(mass, 0)
    # with a margin, because the list is added up in another order
    has_enough = tl.where(top_k > 0, listed >= top_k, 0.999 * tl.sum(mass_near, 0) >= top_p * total)
    tl.debug_barrier()  # the whole program reads the list
    if has_enough & (listed <= MOST_NEAR):
        cut = _search(near, listed, top, total, temperature, top_p, top_k, LOWEST, BLOCK)
    else:
        cut = _search(logits, vocabulary, top, total, temperature, top_p, top_k, LOWEST, BLOCK)
    tl.store(cuts + row, cut)


@triton.jit
def _search(logits, number, top, total, temperature, top_p, top_k, LOWEST: tl.constexpr, BLOCK: tl.constexpr):
    """The cut of `number` logits, which hold all that are kept. `total`: the mass of the whole row."""
    lane = tl.arange(0, BLOCK)
    bottom = -2147483648
    cut = tl.full([], bottom, tl.int32)
    if top_k > 0:
        for bit in range(31, LOWEST - 1, -1):
            tried = cut ^ (tl.full([], 1, tl.int32) << bit)
            count = tl.zeros([BLOCK], tl.int32)
            for start in range(0, number, BLOCK):
                is_token = start + lane < number
                logit = tl.load(logits + start + lane, mask=is_token, other=0.0).to(tl.float32)
                count += (is_token & (_ordered(logit) >= tried)).to(tl.int32)
            cut = tl.where(tl.sum(count, 0) >= top_k, tried, cut)

    if top_p < 1:
        # Of the tokens that tie at the end of top-k, only as many count as complete the k.
        above, ties = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
        mass_above, mass_of_ties = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, number, BLOCK):
            is_token = start + lane < number
            logit = tl.load(logits + start + lane, mask=is_token, other=0.0).to(tl.float32)
            place = _ordered(logit) >> LOWEST
            is_above, is_tie = is_token & (place > cut >> LOWEST), is_token & (place == cut >> LOWEST)
            mass = tl.exp((logit - top) / temperature)
            above += is_above.to(tl.int32)
            ties += is_tie.to(tl.int32)
            mass_above += tl.where(is_above, mass, 0.0)
            mass_of_ties += tl.where(is_tie, mass, 0.0)
        missing = (top_k - tl.sum(above, 0)).to(tl.float32)
        number_of_ties = tl.maximum(tl.sum(ties, 0), 1).to(tl.float32)
        of_k = tl.sum(mass_above, 0) + tl.sum(mass_of_ties, 0) * tl.minimum(missing / number_of_ties, 1.0)
        total = tl.where(top_k > 0, of_k, total)
        least = tl.full([], bottom, tl.int32)
        for bit in range(31, LOWEST - 1, -1):
            tried = least ^ (tl.full([], 1, tl.int32) << bit)
            held = tl.zeros([BLOCK], tl.float32)
            for start in range(0, number, BLOCK):
                is_token = start + lane < number
                logit = tl.load(logits + start + lane, mask=is_token, other=0.0).to(tl.float32)
                held += tl.where(is_token & (_ordered(logit) >= tried), tl.exp((logit - top) / temperature), 0.0)
            least = tl.where(tl.sum(held, 0) >= top_p * total, tried, least)
        cut = tl.maximum(cut, least)
    return cut


@triton.jit(do_not_specialize=["vocabulary", "share"])
def _draw(
    logits, row_stride, vocabulary, share, shares, numbers, cuts, of_parts,
    HAS_CUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row. Every lane keeps its own sum of exponentials and its best token; the lanes are merged at the end."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(shares + row * 2)
    is_random = temperature > 0
    temperature = tl.where(is_random, temperature, 1.0)
    seed, position = tl.load(numbers + row * 3), tl.load(numbers + row * 3 + 1)
    cut = tl.load(cuts + row)
    logits += row * row_stride
    lane = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    token = tl.zeros([BLOCK], tl.int32)
    score = tl.full([BLOCK], -float("inf"), tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, vocabulary), 4 * BLOCK):
        random_bits = tl.philox(seed, (start // 4 + lane).to(tl.uint32), position.to(tl.uint32), 0, 0)
        for quarter in tl.static_range(4):
            column = start + quarter * BLOCK + lane
            is_token = column < vocabulary
            logit = tl.load(logits + column, mask=is_token, other=-float("inf")).to(tl.float32)
            scaled = tl.div_rn(logit, temperature + tl.zeros([BLOCK], tl.float32))
            if HAS_CUTS:
                scaled = tl.where(is_token & (_ordered(logit) >= cut), scaled, -float("inf"))
            # Between 2^-33 and 1 - 2^-24: an exponential variable needs its small values exactly, for those win.
            uniform = tl.minimum(random_bits[quarter].to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
            by_series = uniform * (1.0 + uniform * (0.5 + uniform * (1.0 / 3.0 + uniform * 0.25)))
            exponential = tl.where(uniform < 0.01, by_series, -tl.log(1.0 - uniform))
            noisy = tl.where(is_random, scaled - tl.log(exponential), scaled)

            larger = tl.maximum(largest, scaled)
            base = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(largest - base) + tl.exp(scaled - base)
            largest = larger
            is_better = noisy > best
            best = tl.where(is_better, noisy, best)
            token = tl.where(is_better, column, token)
            score = tl.where(is_better, scaled, score)

    top = tl.max(largest, 0)
    base = tl.where(top == -float("inf"), 0.0, top)  # nothing of this part is kept
    is_winner = lane == tl.argmax(best, 0)
    of_parts += row * 5 * PARTS + part
    tl.store(of_parts, top)
    tl.store(of_parts + PARTS, tl.sum(total * tl.exp(largest - base), 0))
    tl.store(of_parts + 2 * PARTS, tl.max(best, 0))
    tl.store(of_parts + 3 * PARTS, tl.sum(tl.where(is_winner, score, 0.0), 0))
    tl.store(of_parts + 4 * PARTS, tl.sum(tl.where(is_winner, token, 0), 0).to(tl.float32, bitcast=True))


@triton.jit
def _merge(of_parts, shares, numbers, drawn, drawn_stride, PARTS: tl.constexpr):
    """The token of a row and its log-probability, from those of its parts."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    of_parts += row * 5 * PARTS + part
    largest, total = tl.load(of_parts), tl.load(of_parts + PARTS)
    best, score = tl.load(of_parts + 2 * PARTS), tl.load(of_parts + 3 * PARTS)
    token = tl.load(of_parts + 4 * PARTS).to(tl.int32, bitcast=True)
    top = tl.max(largest, 0)
    normalizer = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    is_winner = part == tl.argmax(best, 0)
    chosen = tl.sum(tl.where(is_winner, token, 0), 0)
    logprob = tl.sum(tl.where(is_winner, score, 0.0), 0) - normalizer
    logprob = tl.where(tl.load(shares + row * 2) > 0, logprob, 0.0)
    tl.store(drawn + row, chosen)
    tl.store(drawn + drawn_stride + row, logprob.to(tl.int32, bitcast=True))
    tl.store(numbers + row * 3 + 1, tl.load(numbers + row * 3 + 1) + 1)
