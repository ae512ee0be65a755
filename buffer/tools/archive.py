"""`buffer archive`: lists and exports the archived groups of a run; needs no server."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from async_rl.cli.grammar import CommandLine
from async_rl.config import Config
from async_rl.errors import ConfigError
from buffer.archive.reading import Exported, archive_stats, export_jsonl
from buffer.tools.output import console, format_size, moment, print_json, print_table, visible


def ls(config: Config, line: CommandLine) -> None:
    found = archive_stats(config.archive_folder)
    if line.has("json"):
        print_json(asdict(found))
        return
    steps = "-" if found.first_step is None else f"{found.first_step} to {found.last_step}"
    page = console()
    page.print(f"{found.groups} groups of steps {steps} in {found.files} files, {format_size(found.bytes)}")
    if found.since is not None and found.until is not None:
        page.print(f"archived from {moment(found.since)} to {moment(found.until)}")
    if found.damaged:
        page.print(f"{found.damaged} ranges are damaged and are skipped", style="red")
    if found.environments:
        page.print()
        rows = [(name, part.groups, part.tokens, part.reward) for name, part in found.environments.items()]
        print_table(page, ("environment", "groups", "tokens", "mean reward"), rows)


def export(config: Config, line: CommandLine) -> None:
    """Export JSON lines; what cannot be read is skipped and reported on standard error."""
    folder, out, tokens = config.archive_folder, line.text("out"), line.has("tokens")
    done = export_jsonl(folder, sys.stdout, tokens=tokens) if out is None else _export_to(Path(out), folder, tokens=tokens)
    for damage in done.damage:
        print(f"{damage.file}: {damage.length} bytes at {damage.offset} are skipped: {damage.reason}", file=sys.stderr)


def _export_to(path: Path, folder: Path, *, tokens: bool) -> Exported:
    draft = path.with_name(f"{path.name}.part")  # the file appears only when it is complete
    try:
        with draft.open("w") as stream:
            done = export_jsonl(folder, stream, tokens=tokens)
        draft.replace(path)
    except OSError as error:
        raise ConfigError(f"--out {path}: {error.strerror}") from error
    console().print(f"{done.rollouts} rollouts of {done.groups} groups are in {visible(str(path))}")
    return done
