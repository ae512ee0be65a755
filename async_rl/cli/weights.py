"""`async-rl weights ...`; buffer/tools/weights.py does the work."""

from __future__ import annotations

from async_rl.cli.grammar import Option, Verb
from async_rl.cli.role_process import in_buffer

VERBS = (
    Verb(
        words="weights status",
        help="Show the live version, what every worker serves, the last push and what is pinned.",
        run=in_buffer,
        options=(Option(name="json", help="print one JSON document instead of sentences"),),
    ),
    Verb(
        words="weights push",
        help="Push the learner's weights after the current step, regardless of wire.push_every_*.",
        run=in_buffer,
    ),
    Verb(
        words="weights pin",
        operands="[VERSION|off]",
        help="Keep the live version live (VERSION: only if it is that one) until `weights pin off`.",
        run=in_buffer,
    ),
    Verb(
        words="weights rollback",
        operands="[VERSION]",
        help="Serve the weights of a checkpoint again, as a new version, until `weights pin off`.",
        run=in_buffer,
        options=(Option(name="step", value="STEP", read=int, help="the checkpoint of this step, instead of a version"),),
    ),
)
