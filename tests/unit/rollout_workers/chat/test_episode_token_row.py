"""A token row is what was given and sampled, to the last bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_rl.types import Completion, StopReason, VersionSpan, spans_of
from rollout_workers.chat.token_row import TokenRow

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=6)
sampled_token = st.tuples(
    st.integers(0, 2**31 - 1), st.floats(-30, 0, width=32).filter(bool), st.integers(0, 3)
)  # id, logprob, version
turn = st.tuples(st.lists(sampled_token, min_size=1, max_size=8), token_ids)


def completion(tokens: list[tuple[int, float, int]]) -> Completion:
    return Completion(
        token_ids=np.array([token for token, _, _ in tokens], np.int32),
        logprobs=np.array([logprob for _, logprob, _ in tokens], np.float32),
        versions=spans_of([version for _, _, version in tokens]),
        stop_reason=StopReason.END,
        text="",
    )


@given(prompt=token_ids, turns=st.lists(turn, min_size=1, max_size=6))
def test_a_row_equals_what_was_given_and_sampled(
    prompt: list[int], turns: list[tuple[list[tuple[int, float, int]], list[int]]]
):
    row = TokenRow(prompt)
    expected: list[tuple[int, int, float, int | None]] = [(token, 0, 0.0, None) for token in prompt]
    last_sampled = 0
    for tokens, observation in turns:
        row.add_sampled(completion(tokens))
        expected += [(token, 1, logprob, version) for token, logprob, version in tokens]
        assert row.token_ids == [token for token, *_ in expected]
        last_sampled = len(expected)
        row.add_given(observation)
        expected += [(token, 0, 0.0, None) for token in observation]

    sample = row.sample()
    versions: list[int | None] = [None] * len(sample)
    for span in sample.versions:
        assert versions[span.start : span.stop] == [None] * (span.stop - span.start)
        versions[span.start : span.stop] = [span.version] * (span.stop - span.start)

    found = zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), sample.logprobs.tolist(), versions, strict=True)
    assert list(found) == expected[:last_sampled]
    for before, after in zip(sample.versions, sample.versions[1:], strict=False):
        assert (before.version, before.stop) != (after.version, after.start), "spans that touch with one version are one span"


def test_a_row_without_sampled_tokens_is_its_prompt():
    sample = TokenRow([5, 6]).sample()
    assert (sample.token_ids.tolist(), sample.num_sampled) == ([5, 6], 0)


@pytest.mark.parametrize(
    ("num_logprobs", "spans"),
    [
        (1, [(0, 2)]),
        (2, [(0, 1)]),
        (2, [(0, 3)]),
        (2, [(1, 2)]),
        (2, [(0, 2), (1, 2)]),
    ],
)
def test_a_completion_that_contradicts_itself_is_refused(num_logprobs: int, spans: list[tuple[int, int]]):
    wrong = Completion(
        token_ids=np.zeros(2, np.int32),
        logprobs=np.zeros(num_logprobs, np.float32),
        versions=tuple(VersionSpan(version=0, start=start, stop=stop) for start, stop in spans),
        stop_reason=StopReason.END,
        text="",
    )
    with pytest.raises(ValueError, match="a completion of 2 tokens"):
        TokenRow([1]).add_sampled(wrong)
