"""One cause, one line; then at 10, 100, 1000 times."""

from structlog.testing import capture_logs

from async_rl.types import Failure
from rollout_workers.episodes.failure_log import MOST, FailureLog


def failure(message: str, kind: str = "LookupError") -> Failure:
    return Failure(boundary="reward", kind=kind, message=message)


def test_a_cause_is_told_once_and_then_counted():
    log = FailureLog()
    with capture_logs() as lines:
        for number in range(250):
            log.note(failure(f"no answer {number} (judge.py:7)"), environment="math", task=f"math/{number}")
    assert [(line["times"], line["message"]) for line in lines] == [
        (1, "no answer 0 (judge.py:7)"),
        (10, "no answer 9 (judge.py:7)"),
        (100, "no answer 99 (judge.py:7)"),
    ]


def test_another_line_kind_or_environment_is_another_cause():
    log = FailureLog()
    with capture_logs() as lines:
        for _ in range(5):
            log.note(failure("no answer (judge.py:7)"), environment="math", task="math/0")
            log.note(failure("no answer (judge.py:8)"), environment="math", task="math/0")
            log.note(failure("no answer (judge.py:7)", kind="KeyError"), environment="math", task="math/0")
            log.note(failure("no answer (judge.py:7)"), environment="games", task="games/0")
            log.note(failure("no place is named"), environment="math", task="math/0")
    assert [line["times"] for line in lines] == [1] * 5


def test_what_came_long_ago_is_forgotten():
    log = FailureLog()
    with capture_logs() as lines:
        for number in (*range(MOST + 1), 0):
            log.note(failure(f"cause {number}"), environment="math", task="math/0")
    assert len(lines) == MOST + 2
