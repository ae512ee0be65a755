"""When an environment is left alone, as a table of what happens to its breaker."""

import pytest

from rollout_workers.limits.circuit_breaker import CircuitBreaker


def after(events: str, *, may_open: bool = True) -> tuple[CircuitBreaker, float]:
    """The breaker, and how late it is.

    f: a group fails, s: one succeeds, a: one asks whether it may begin, g: one gives up, 1 to 9: so many seconds pass.
    """
    breaker, now = CircuitBreaker(after=3, pause_s=5.0), 0.0
    for event in events:
        match event:
            case "f":
                breaker.failed(now, may_open=may_open)
            case "s":
                breaker.succeeded()
            case "a":
                breaker.admits(now)
            case "g":
                breaker.trial_ended_without_result()
            case _:
                now += int(event)
    return breaker, now


@pytest.mark.parametrize(
    ("events", "is_closed", "admits"),
    [
        ("", True, True),
        ("ff", True, True),
        ("fff", False, False),
        ("ffsff", True, True),
        ("fff4", False, False),
        ("fff5", False, True),
        ("fff5a", False, False),  # one tries it, the others wait for how that goes
        ("fff5as", True, True),
        ("fff5af", False, False),
        ("fff5af4", False, False),
        ("fff5af5", False, True),
        ("fff5ag", False, True),  # it was cut short: the next one tries
        ("fff4f1", False, True),  # stragglers do not prolong the pause
        ("fff2s", True, True),  # a straggler that succeeds says that it works
        ("fff5asff", True, True),  # and then it counts from the beginning
    ],
)
def test_what_happens_to_a_breaker(events: str, is_closed: bool, admits: bool):
    breaker, now = after(events)
    assert (breaker.is_closed, breaker.admits(now)) == (is_closed, admits)


def test_it_stays_closed_where_there_is_nothing_else_to_do():
    breaker, _ = after("ffffffff", may_open=False)
    assert breaker.is_closed


def test_it_says_how_long_to_wait():
    breaker, now = after("fff2")
    assert breaker.wait_s(now) == 3.0
    assert breaker.admits(5.0)
    assert breaker.wait_s(5.0) is None
