"""Compare messages after an agent's SDK has rewritten them.

SDKs drop unknown fields, turn "" into null and back, format JSON in their own way and trim answers.
"""

from __future__ import annotations

import json
from dataclasses import replace

from async_rl.types import Message, ToolCall


def canonical(message: Message) -> Message:
    """Return a form that is equal for equivalent messages. Only white space around answers is ignored.

    Of an answer with calls only the calls count: their ids are ours, and many agents drop the text beside them.
    """
    if message.role != "assistant":
        return message
    calls = tuple(map(_canonical_call, message.tool_calls))
    return replace(message, content="" if calls else message.content.strip(), tool_calls=calls)


def _canonical_call(call: ToolCall) -> ToolCall:
    try:
        arguments = json.dumps(json.loads(call.arguments), sort_keys=True)
    except (ValueError, RecursionError):
        arguments = call.arguments.strip()
    return replace(call, arguments=arguments)
