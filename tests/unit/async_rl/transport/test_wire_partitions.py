"""Push groups, once it is known that some members cannot reach each other."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.transport.sending.partitions import Partitions, PushGroups


def split_groups(members: Collection[str], *served: str) -> PushGroups:
    """A round in which all failed together, and then these were served, each by itself."""
    groups = PushGroups([[*members]])
    for group in groups:
        if len(group) > 1:
            groups.split(group)
        else:
            groups.served([member for member in group if member in served])
    return groups


def test_members_go_together_until_some_were_served_alone() -> None:
    partitions = Partitions(for_s=60.0)
    assert list(partitions.push_groups("abc")) == [["a", "b", "c"]]
    assert list(partitions.push_groups("")) == []
    partitions.remember(split_groups("abc", "a", "c").found)
    assert list(partitions.push_groups("abcd")) == [["b", "d"], ["a"], ["c"]]
    assert list(partitions.push_groups("a")) == [["a"]]


def test_members_served_together_stay_together() -> None:
    partitions = Partitions(for_s=60.0)
    partitions.remember([frozenset("ab"), frozenset("cd")])
    assert list(partitions.push_groups("abcde")) == [["e"], ["a", "b"], ["c", "d"]]
    partitions.remember(split_groups("ab", "a", "b").found)
    assert list(partitions.push_groups("abcd")) == [["c", "d"], ["a"], ["b"]]


def test_one_that_was_served_alone_says_nothing_of_the_others() -> None:
    partitions = Partitions(for_s=60.0)
    partitions.remember(split_groups("ab", "a").found)
    assert list(partitions.push_groups("ab")) == [["a", "b"]]


def test_who_is_served_at_once_or_after_another_was_lost_says_nothing() -> None:
    groups = PushGroups([["a", "b", "c"], ["d"]])
    sent = iter(groups)
    assert next(sent) == ["a", "b", "c"]
    groups.retry(["a", "b"])
    assert next(sent) == ["d"]
    groups.served(["d"])
    assert next(sent) == ["a", "b"]
    groups.served(["a", "b"])
    assert list(sent) == []
    assert groups.found == []


def test_after_a_while_they_may_try_together_again() -> None:
    partitions = Partitions(for_s=-1.0)
    partitions.remember(split_groups("ab", "a", "b").found)
    assert list(partitions.push_groups("ab")) == [["a", "b"]]


def test_few_are_divided_at_once_and_many_by_halves() -> None:
    few, many = [f"w{number}" for number in range(8)], [f"w{number}" for number in range(9)]
    for members, expected in ((few, [[member] for member in few]), (many, [many[:4], many[4:]])):
        groups = PushGroups([members])
        sent = iter(groups)
        groups.split(next(sent))
        assert list(sent) == expected
