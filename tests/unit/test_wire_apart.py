"""Whom to send to together, once it is known that some cannot meet."""

from async_rl.transport.apart import Apart


def test_members_go_together_until_some_were_served_alone() -> None:
    apart = Apart(for_s=60.0)
    assert apart.cohorts(["a", "b", "c"]) == [["a", "b", "c"]]
    assert apart.cohorts([]) == []
    apart.learn([["a"], ["c"]])
    assert apart.cohorts(["a", "b", "c", "d"]) == [["b", "d"], ["a"], ["c"]]
    assert apart.cohorts(["a"]) == [["a"]]


def test_whoever_was_served_together_stays_together() -> None:
    apart = Apart(for_s=60.0)
    apart.learn([["a", "b"], ["c", "d"]])
    assert apart.cohorts(["a", "b", "c", "d", "e"]) == [["e"], ["a", "b"], ["c", "d"]]
    apart.learn([["a"], ["b"]])
    assert apart.cohorts(["a", "b", "c", "d"]) == [["c", "d"], ["a"], ["b"]]


def test_a_group_that_was_served_says_nothing_of_the_others() -> None:
    apart = Apart(for_s=60.0)
    apart.learn([["a"]])
    assert apart.cohorts(["a", "b"]) == [["a", "b"]]


def test_after_a_while_they_may_try_together_again() -> None:
    apart = Apart(for_s=-1.0)
    apart.learn([["a"], ["b"]])
    assert apart.cohorts(["a", "b"]) == [["a", "b"]]


def test_few_are_divided_at_once_and_many_by_halves() -> None:
    few, many = [f"w{number}" for number in range(8)], [f"w{number}" for number in range(9)]
    assert Apart.divided(few) == [[member] for member in few]
    assert Apart.divided(many) == [many[:4], many[4:]]
