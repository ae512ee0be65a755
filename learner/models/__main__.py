"""`async-rl model import | export | inspect`: models in and out of Hugging Face folders and Megatron-LM's checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from async_rl.cli.grammar import read
from async_rl.cli.model import MEGATRON, VERBS
from async_rl.errors import boundary
from async_rl.launch.package_guard import guard


def main(words: Sequence[str]) -> None:
    guard()
    (verb,) = (verb for verb in VERBS if verb.words == f"model {words[0]}")
    line = read(verb, words[1:])
    match words[0]:  # imported late: inspect needs no torch
        case "import" if line.text("format") == MEGATRON:
            from learner.models.importing_megatron import import_megatron

            import_megatron(line)
        case "import":
            from learner.models.importing import import_folder

            import_folder(line)
        case "export":
            from learner.models.exporting import export

            export(line)
        case _:
            from learner.models.inspecting import inspect

            inspect(line)


if __name__ == "__main__":
    with boundary("async-rl model"):
        main(sys.argv[1:])
