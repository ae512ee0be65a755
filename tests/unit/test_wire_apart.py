"""Whom to send to together, once it is known that some cannot meet."""

from __future__ import annotations

from collections.abc import Collection

from async_rl.transport.sending.partitions import Partitions, PushGroups


def divided(members: Collection[str], *served: str) -> PushGroups:
    """A round in which all failed together, and then these were served, each by itself."""
    cohorts = PushGroups([[*members]])
    for cohort in cohorts:
        if len(cohort) > 1:
            cohorts.divide(cohort)
        else:
            cohorts.served([member for member in cohort if member in served])
    return cohorts


def test_members_go_together_until_some_were_served_alone() -> None:
    apart = Partitions(for_s=60.0)
    assert list(apart.round("abc")) == [["a", "b", "c"]]
    assert list(apart.round("")) == []
    apart.learn(divided("abc", "a", "c").found)
    assert list(apart.round("abcd")) == [["b", "d"], ["a"], ["c"]]
    assert list(apart.round("a")) == [["a"]]


def test_whoever_was_served_together_stays_together() -> None:
    apart = Partitions(for_s=60.0)
    apart.learn([frozenset("ab"), frozenset("cd")])
    assert list(apart.round("abcde")) == [["e"], ["a", "b"], ["c", "d"]]
    apart.learn(divided("ab", "a", "b").found)
    assert list(apart.round("abcd")) == [["c", "d"], ["a"], ["b"]]


def test_one_that_was_served_alone_says_nothing_of_the_others() -> None:
    apart = Partitions(for_s=60.0)
    apart.learn(divided("ab", "a").found)
    assert list(apart.round("ab")) == [["a", "b"]]


def test_who_is_served_at_once_or_after_another_was_lost_says_nothing() -> None:
    cohorts = PushGroups([["a", "b", "c"], ["d"]])
    sent = iter(cohorts)
    assert next(sent) == ["a", "b", "c"]
    cohorts.again(["a", "b"])
    assert next(sent) == ["d"]
    cohorts.served(["d"])
    assert next(sent) == ["a", "b"]
    cohorts.served(["a", "b"])
    assert list(sent) == []
    assert cohorts.found == []


def test_after_a_while_they_may_try_together_again() -> None:
    apart = Partitions(for_s=-1.0)
    apart.learn(divided("ab", "a", "b").found)
    assert list(apart.round("ab")) == [["a", "b"]]


def test_few_are_divided_at_once_and_many_by_halves() -> None:
    few, many = [f"w{number}" for number in range(8)], [f"w{number}" for number in range(9)]
    for members, expected in ((few, [[member] for member in few]), (many, [many[:4], many[4:]])):
        cohorts = PushGroups([members])
        sent = iter(cohorts)
        cohorts.divide(next(sent))
        assert list(sent) == expected
