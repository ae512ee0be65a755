"""`async-rl audit`; buffer/run_audit does the work."""

from __future__ import annotations

from async_rl.cli.grammar import Option, Verb
from async_rl.cli.role_process import in_role

AUDIT = Verb(
    words="audit",
    help="Prove from Redis, journal, checkpoints and archive that a run lost and repeated nothing; exits 1 if not.",
    run=in_role("buffer.run_audit"),
    options=(
        Option(name="bytes", help="read every byte of the checkpoints, not only file sizes"),
        Option(name="files-only", help="do not read Redis; for a copy of a run's folder"),
        Option(name="json", help="print one JSON document instead of tables"),
    ),
)
VERBS = (AUDIT,)
