"""The evidence of a round for the auditor: what each process was told, and which steps survived."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.chaos.journals import Line, read


def newest(checkpoints: Path) -> dict[str, Any]:
    """The checkpoint of the learner with the highest fence; empty before the first."""
    found = sorted(checkpoints.glob("*.json"))
    return json.loads(found[-1].read_text()) if found else {}


@dataclass(frozen=True)
class Evidence:
    settings: dict[str, Any]
    seen: dict[str, Any]
    """The supervisor's outcome."""
    final: dict[str, Any]
    """Content of the server at the end."""
    checkpoint: dict[str, Any]
    lines: list[Line]

    @classmethod
    def of(cls, folder: Path) -> Evidence:
        def load(name: str) -> dict[str, Any]:
            path = folder / name
            return json.loads(path.read_text()) if path.exists() else {}

        return cls(
            settings=load("plan.json")["settings"],
            seen=load("outcome.json"),
            final=load("final.json"),
            checkpoint=newest(folder / "checkpoints"),
            lines=read(folder / "journals"),
        )

    @property
    def is_set_back(self) -> bool:
        """Whether the server has lost confirmed changes, so that some replies no longer hold."""
        return bool(self.did("set_back"))

    def did(self, what: str) -> list[Line]:
        return [line for line in self.lines if line["did"] == what]

    # -- groups -----------------------------------------------------------------------------------------------------
    @cached_property
    def stored(self) -> set[str]:
        """Groups whose commit returned `stored` or `already`."""
        return {line["ticket"] for line in self.did("ended") if {"stored", "already"} & set(line["answers"])}

    @cached_property
    def perhaps_stored(self) -> set[str]:
        """Groups whose writer died before it got the reply to its commit."""
        answered = {line["ticket"] for line in self.did("ended")}
        tried = {line["ticket"] for line in self.did("ends") if line["how"] in ("commit", "twice")}
        return tried - answered

    @cached_property
    def records(self) -> dict[str, tuple[str, int]]:
        """Ticket -> state and task, for tickets that the server still has."""
        return {ticket: _state_and_task(text, ticket, self.final) for ticket, text in self.final["records"].items()}

    # -- steps ------------------------------------------------------------------------------------------------------
    @cached_property
    def survived(self) -> list[Line]:
        """The steps behind the last checkpoint, in order: each timeline up to the step that the next one resumed from."""
        resumed = {line["timeline"]: line for line in self.did("resumed")}
        by_timeline: dict[str, list[Line]] = defaultdict(list)
        for line in self.did("trained"):
            by_timeline[line["timeline"]].append(line)
        steps: list[Line] = []
        timeline, until = self.checkpoint.get("timeline", ""), self.checkpoint.get("step", 0)
        while timeline:
            life = resumed[timeline]
            steps += [line for line in by_timeline[timeline] if life["after"] < line["step"] <= until]
            timeline, until = life["parent"], life["after"]
        return sorted(steps, key=lambda line: line["step"])

    @cached_property
    def uses(self) -> dict[str, list[int]]:
        """Group -> the surviving steps that trained it."""
        found: dict[str, list[int]] = defaultdict(list)
        for line in self.survived:
            for group in line["groups"]:
                found[group["id"]].append(line["step"])
        return found


def _state_and_task(text: str, ticket: str, final: dict[str, Any]) -> tuple[str, int]:
    first, second, *_ = text.split()
    if first.isalpha():
        return first, int(second)
    return next((name for name in ("reserved", "ready", "taken") if ticket in final[name]), "nowhere"), int(first)
