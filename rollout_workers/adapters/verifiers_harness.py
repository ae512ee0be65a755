"""A harness for verifiers that runs in this process, with one call of the model per episode.

The harnesses of verifiers start a program per episode, which takes seconds; a task without tools needs none.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]

__all__ = ["DirectHarness"]


class DirectHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        prompts = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages = [*([{"role": "system", "content": system}] if system else []), *prompts]
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {secret}"}) as http,
            http.post(f"{endpoint}/chat/completions", json={"model": ctx.model, "messages": messages}) as answer,
        ):
            text = await answer.text()
        # verifiers records the conversation for its rewards: nothing has to be returned
        return vf.ProgramResult(exit_code=0 if answer.ok else 1, stdout="", stderr="" if answer.ok else text)
