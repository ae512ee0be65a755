"""`buffer audit`: checks that every ticket ever issued is in exactly one place; exit code 1 if not."""

from __future__ import annotations

from dataclasses import asdict

from async_rl.cli.grammar import CommandLine
from buffer.tools.open_run import OpenRun
from buffer.tools.output import console, print_json, visible
from buffer.tools.stats import print_stats


async def audit(run: OpenRun, line: CommandLine) -> int:
    found = await run.buffer.audit()
    refused = await run.buffer.quarantined()
    code = 0 if found.is_clean else 1
    if line.has("json"):
        result = {"clean": found.is_clean, "problems": found.problems}
        print_json({**result, "quarantine": refused, "stats": asdict(found.stats)})
        return code
    page = console()
    print_stats(page, found.stats, ages={})
    for report in refused:
        page.print(visible(f"quarantined: {report['ticket']} of worker {report['worker']}: {report['reason']}"))
    for problem in found.problems:
        page.print(visible(f"PROBLEM: {problem}"), style="red")
    page.print("clean: every ticket is in exactly one place" if found.is_clean else f"{len(found.problems)} problems")
    return code
