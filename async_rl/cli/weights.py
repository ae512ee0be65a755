"""What people can type after `async-rl weights`; what each does is found in `buffer/tools/weights.py`."""

from __future__ import annotations

from async_rl.cli.grammar import Option, Tool

_JSON = Option(name="json", help="one JSON document instead of sentences")

STATUS = Tool(
    words="weights status",
    help="Which version is live, who serves what, how the last push went, what is pinned.",
    options=(_JSON,),
)
PUSH = Tool(words="weights push", help="Push what the learner holds after the present step, whatever wire.push_every_* say.")
PIN = Tool(
    words="weights pin",
    operands="[VERSION|off]",
    help="Keep the live version live (VERSION: only if it is that one), until `weights pin off`.",
)
ROLLBACK = Tool(
    words="weights rollback",
    operands="[VERSION]",
    help="Serve the weights of a checkpoint again, as a version of their own, until `weights pin off`.",
    options=(Option(name="step", value="STEP", read=int, help="the checkpoint after this step, instead of a version"),),
)

TOOLS = (STATUS, PUSH, PIN, ROLLBACK)
