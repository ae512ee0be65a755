"""When two messages are the same, although an agent's SDK wrote one of them anew.

SDKs drop fields that they do not know, turn "" into null and back, print JSON in their own way and trim answers.
"""

from __future__ import annotations

import json
from dataclasses import replace

from async_rl.types import Message, ToolCall


def canonical(message: Message) -> Message:
    """Equal for messages that say the same. White space around an answer says nothing; elsewhere it does.

    The ids of calls are ours, so they tell an answer by themselves: many agents drop the text beside its calls.
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
