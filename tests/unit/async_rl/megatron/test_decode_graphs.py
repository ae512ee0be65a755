"""Steps replayed on tensors that stay in place, without a GPU: which graph runs, its padding, which weights it reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from async_rl.megatron.engine.decode_graphs import MOST_PROMPT_KEYS, DecodeGraphs, batch_sizes, reaches, run_again
from async_rl.megatron.engine.decode_step import DecodeInputs

COLUMNS = 3


class TableStep:
    """A step whose logits are rows of a table, weighted by lengths and blocks; those of the requests' last tokens."""

    def __init__(self) -> None:
        self.table = torch.arange(40.0).reshape(8, 5)
        self.seen: list[tuple[int, int, list[int]]] = []
        """Rows, bound of lengths and lengths of every run."""

    def __call__(self, inputs: DecodeInputs, longest: int) -> Tensor:
        self.seen.append((len(inputs.tokens), longest, inputs.lengths.tolist()))
        rows = self.table[inputs.tokens] * inputs.lengths[:, None] + inputs.blocks.sum(1, keepdim=True)
        return rows[inputs.last]

    def addresses(self) -> tuple[int, ...]:
        return (self.table.data_ptr(),)


def graphs_of(step: TableStep, requests: int = 4, prompt_tokens: int = 2) -> DecodeGraphs:
    return DecodeGraphs(
        step,
        requests=requests,
        prompt_tokens=prompt_tokens,
        columns=COLUMNS,
        context_tokens=10_000,
        device=torch.device("cpu"),
        capture=run_again,
    )


def some_inputs(count: int, last: Sequence[int] | None = None) -> DecodeInputs:
    """So many rows; `last`: those of the requests' last tokens, by default a request for each row."""
    generator = torch.Generator().manual_seed(count)
    return DecodeInputs(
        tokens=torch.randint(8, (count,), generator=generator),
        lengths=torch.randint(1, 100, (count,), generator=generator, dtype=torch.int32),
        blocks=torch.randint(50, (count, COLUMNS), generator=generator, dtype=torch.int32),
        last=torch.tensor(range(count) if last is None else last, dtype=torch.int32),
    )


def run(graphs: DecodeGraphs, inputs: DecodeInputs, longest: int = 100) -> Tensor:
    return graphs.run(inputs, longest=longest)


def test_sizes_and_reaches_end_with_what_is_asked_for() -> None:
    assert batch_sizes(1) == [1]
    assert batch_sizes(6) == [1, 2, 4, 6]
    assert batch_sizes(256) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256]
    assert batch_sizes(300)[-2:] == [256, 300]
    assert reaches(512) == [512]
    assert reaches(4096) == [4096]
    assert reaches(40_960) == [4096, 32_768, 40_960]


def test_a_step_takes_the_smallest_graph_that_holds_it_and_pads_with_rows_without_keys() -> None:
    step = TableStep()
    graphs = graphs_of(step)
    for count, last, size in (
        (1, [0], 1), (2, [0, 1], 2), (5, [1, 4], 6), (3, [0, 1, 2], 4), (6, [0, 1, 2, 5], 6), (6, [5], 6), (3, [2], 4)
    ):  # fmt: skip
        for longest, reach in ((100, 4096), (4096, 4096), (4097, 10_000)):
            inputs = some_inputs(count, last)
            found = run(graphs, inputs, longest)
            assert step.seen[-1] == (size, reach, inputs.lengths.tolist() + [0] * (size - count))
            assert torch.equal(found, step(inputs, longest))


def test_a_step_with_prompts_has_room_up_to_some_tokens_and_keys() -> None:
    graphs = graphs_of(TableStep(), requests=4, prompt_tokens=2)
    assert graphs.fits(6, MOST_PROMPT_KEYS)
    assert not graphs.fits(7, 7)
    assert not graphs.fits(6, MOST_PROMPT_KEYS + 1)
    graphs = graphs_of(TableStep(), requests=4, prompt_tokens=4096)
    assert graphs.fits(4 + 512, 0)
    assert not graphs.fits(4 + 513, 0)


def test_each_token_of_a_prompt_is_a_row_that_sees_the_tokens_before_it() -> None:
    tokens, blocks = torch.arange(7), torch.tensor([[3, -1], [5, 6], [8, 9]], dtype=torch.int32)
    # one decodes its 12th token; a prompt of 4; the last 2 tokens of one whose first 8 are in the cache
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 1, 5, 7], [12, 4, 10]))
    found = DecodeInputs.of_step(tokens, starts, lengths, blocks)
    assert found.tokens is tokens
    assert found.lengths.tolist() == [12, 1, 2, 3, 4, 9, 10]
    assert found.blocks.tolist() == [[3, -1], *[[5, 6]] * 4, *[[8, 9]] * 2]
    assert found.last.tolist() == [0, 4, 6]
    decoding = DecodeInputs.of_step(tokens[:3], torch.arange(4, dtype=torch.int32), lengths, blocks)
    assert decoding.lengths is lengths
    assert decoding.last.tolist() == [0, 1, 2]


def test_every_graph_is_captured_before_the_first_step_without_a_request() -> None:
    step = TableStep()
    graphs = graphs_of(step)
    captured = {(rows, longest) for rows, longest, lengths in step.seen if not any(lengths)}
    assert captured == {(rows, longest) for rows in (1, 2, 4, 6) for longest in (4096, 10_000)}
    assert len(step.seen) == len(captured) + 1  # the first finds out how large logits are
    before = len(step.seen)
    run(graphs, some_inputs(2))
    assert len(step.seen) == before + 1
    assert graphs.replays == 1


def test_weights_that_change_in_place_need_no_capture_and_weights_that_move_do() -> None:
    step, inputs = TableStep(), some_inputs(3)
    graphs = graphs_of(step)
    before = run(graphs, inputs).clone()
    step.table.mul_(2)
    count = len(step.seen)
    graphs.refresh()
    assert len(step.seen) == count
    assert not torch.equal(run(graphs, inputs), before)

    step.table = step.table * 2
    graphs.refresh()
    assert len(step.seen) == count + 1 + 8
    assert torch.equal(run(graphs, inputs), step(inputs, 100))
