"""The code of an error is found in the texts of all supported servers."""

import pytest
from redis.exceptions import ResponseError

from buffer.server.transient_errors import code_of

CALL = "Error running script (call to f_ddc1ad895c24095015bc2471d8b87671db1897fe): "


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE"),
        # Redis 6.2, where a command in a script fails, and where it may not run
        (f"{CALL}@user_script:1: WRONGTYPE Operation against a key holding the wrong kind of value", "WRONGTYPE"),
        (f"{CALL}@user_script:1: @user_script: 1: -READONLY You can't write against a read only replica.", "READONLY"),
    ],
)
def test_the_code_of_an_error_is_that_of_the_server(text: str, code: str) -> None:
    assert code_of(ResponseError(text)) == code
