"""The tree of turns, without a network: rows hold what was sampled, each sampled token trained once."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from async_rl.types import Completion, Message, StopReason, ToolCall, spans_of
from rollout_workers.gateway.canonical import canonical
from rollout_workers.gateway.turn_tree import SampledTurn, TurnPlace, TurnTree


def completion(*token_ids: int, version: int = 0) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([-token / 1000 for token in token_ids], np.float32),
        versions=spans_of([version] * len(token_ids)),
        stop_reason=StopReason.END,
        text="",
    )


def grow(tree: TurnTree, place: TurnPlace, *token_ids: int, history: str = "") -> SampledTurn:
    return tree.add(place, completion(*token_ids), conversation=(), history=history)


def rows(tree: TurnTree) -> list[list[tuple[int, int]]]:
    """Each row as (token, whether it is trained)."""
    return [list(zip(row.token_ids.tolist(), row.loss_mask.tolist(), strict=True)) for row in tree.samples()]


def test_a_conversation_is_one_row():
    tree = TurnTree()
    first = grow(tree, TurnPlace(parent=None, given=(1, 2)), 3, 4)
    grow(tree, TurnPlace(parent=first, given=(5,)), 6)
    assert rows(tree) == [[(1, 0), (2, 0), (3, 1), (4, 1), (5, 0), (6, 1)]]
    assert tree.forks == 0


def test_what_branches_share_is_trained_in_the_first_and_read_in_the_others():
    tree = TurnTree()
    first = grow(tree, TurnPlace(parent=None, given=(1,)), 2)
    grow(tree, TurnPlace(parent=first, given=(3,)), 4)
    grow(tree, TurnPlace(parent=first, given=(5,)), 6)
    assert rows(tree) == [[(1, 0), (2, 1), (3, 0), (4, 1)], [(1, 0), (2, 0), (5, 0), (6, 1)]]
    [left, right] = tree.samples()
    assert left.logprobs[1] != 0
    assert right.logprobs[1] == 0
    assert tree.forks == 0


def test_siblings_of_one_prompt_are_no_forks_and_other_prompts_are():
    tree = TurnTree()
    place = TurnPlace(parent=None, given=(1,))
    grow(tree, place, 2)
    grow(tree, place, 3)
    grow(tree, TurnPlace(parent=None, given=(1,)), 4)
    assert tree.forks == 0
    grow(tree, TurnPlace(parent=None, given=(9,)), 2)
    assert tree.forks == 1
    assert len(rows(tree)) == 4


def test_a_history_goes_on_from_the_longest_and_newest_turn_that_it_repeats():
    tree = TurnTree()
    place = TurnPlace(parent=None, given=(1,))
    grow(tree, place, 2, history="ab")
    same = grow(tree, place, 3, history="ab")
    longer = grow(tree, TurnPlace(parent=same, given=(4,)), 5, history="abcd")
    grow(tree, TurnPlace(parent=None, given=(1,)), 6)  # speaks in tokens: no text repeats it
    assert tree.find_history("abc") is same
    assert tree.find_history("abcde") is longer
    assert tree.find_history("b") is None


def test_tokens_go_on_from_the_longest_row_they_begin_with():
    tree = TurnTree()
    place = TurnPlace(parent=None, given=(1,))
    short = grow(tree, place, 2)
    long = grow(tree, place, 2, 3)
    below = grow(tree, TurnPlace(parent=short, given=(3, 4)), 5)
    assert tree.find_tokens([1, 2]) is short
    assert tree.find_tokens([1, 2, 3, 9]) is long
    assert tree.place_tokens([1, 2, 3, 4, 5, 6]) == TurnPlace(parent=below, given=(6,))
    assert tree.place_tokens([2, 1]) == TurnPlace(parent=None, given=(2, 1))


@dataclass(frozen=True)
class Step:
    """Go on from a turn (or from nothing) with some given tokens, `count` siblings at once."""

    parent: int
    given: tuple[int, ...]
    sampled: tuple[int, ...]
    count: int


steps = st.builds(
    Step,
    parent=st.integers(-1, 8),
    given=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    sampled=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    count=st.integers(1, 2),
)


@given(plan=st.lists(steps, min_size=1, max_size=10))
def test_rows_are_paths_and_cover_every_sampled_token_once(plan: list[Step]):
    tree, version = TurnTree(), 0
    sampled: dict[int, tuple[int, ...]] = {}
    """By version: each turn gets one of its own, so that its tokens can be told from others."""
    for step in plan:
        turns = tree.turns
        parent = turns[step.parent] if 0 <= step.parent < len(turns) else None
        place = TurnPlace(parent=parent, given=step.given)
        for _ in range(step.count):
            tree.add(place, completion(*step.sampled, version=version), conversation=(), history="")
            sampled[version] = step.sampled
            version += 1
    found: list[int] = []
    for row in tree.samples():
        for span in row.versions:
            assert tuple(row.token_ids[span.start : span.stop].tolist()) == sampled[span.version]
            assert row.loss_mask[span.start : span.stop].all()
            found.append(span.version)
        assert row.num_sampled == sum(span.stop - span.start for span in row.versions) > 0
        assert tree.find_tokens(row.token_ids.tolist()) is not None
    assert sorted(found) == sorted(sampled)


def test_messages_that_sdks_wrote_anew_are_the_same():
    assert canonical(Message(role="assistant", content=" ok\n")) == canonical(Message(role="assistant", content="ok"))
    said = Message(role="assistant", content=" ok\n", tool_calls=(ToolCall(name="f", arguments='{"b": 1, "a": [2]}', id="c"),))
    again = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments='{"a":[2],"b":1}', id="c"),))
    assert canonical(said) == canonical(again)
    assert canonical(said) != canonical(Message(role="assistant", content="ok"))
    other = ToolCall(name="f", arguments='{"b": 1, "a": [2]}', id="d")
    assert canonical(said) != canonical(Message(role="assistant", content="ok", tool_calls=(other,)))
    assert canonical(Message(role="user", content=" a")) != canonical(Message(role="user", content="a"))
    broken = Message(role="assistant", content="", tool_calls=(ToolCall(name="f", arguments="{"),))
    assert canonical(broken) == broken
