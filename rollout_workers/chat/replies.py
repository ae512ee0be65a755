"""Token ids between a sampled answer and the next one in a conversation."""

from __future__ import annotations

from async_rl.protocols import Tokenizer
from async_rl.types import Completion, Message, StopReason


def reply_ids(tokenizer: Tokenizer, answer: Completion, *messages: Message) -> list[int]:
    """Render the ids that follow `answer` when `messages` reply to it. The answer itself is never rendered again."""
    token_ids = tokenizer.render_reply(*messages, after_end=answer.stop_reason is StopReason.END)
    if answer.stop_reason is StopReason.STOP and token_ids[:1] == answer.token_ids[-1:].tolist():
        return token_ids[1:]  # the sampled stop token already closes the turn: the template would repeat it
    return token_ids
