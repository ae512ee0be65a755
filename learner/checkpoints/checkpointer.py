"""Save and load one rank's part of a checkpoint. Collective: every rank makes the same calls in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import structlog
import torch
import torch.distributed as dist

from async_rl.checkpoints.draft import Draft
from async_rl.checkpoints.manifest import (
    FORMAT,
    POLICY,
    DamagedCheckpoint,
    FileFacts,
    Manifest,
    check_files,
    check_is_latest,
    read_manifest,
    remove_superseded,
    set_aside,
)
from async_rl.errors import CheckpointError
from async_rl.megatron.parameters.pieces import check_model, lacks_head, open_pieces
from learner.checkpoints import training_state
from learner.checkpoints.writing import CheckpointWriter, Written
from learner.collectives import true_on_all
from learner.model import TrainingModel, current_layout
from learner.versions.pin_file import PinFile

log = structlog.get_logger()


class Checkpointer:
    def __init__(self, models: Mapping[str, TrainingModel], device: torch.device) -> None:
        """`models` by their names in checkpoints."""
        self._models, self._device = models, device
        self._writer = CheckpointWriter()

    def begin(
        self,
        folder: Path,
        *,
        step: int,
        extra: Mapping[str, Any],
        keep: int,
        life: int = 0,
        confirm: Callable[[], None] = lambda: None,
    ) -> Future[Written]:
        """Begin a checkpoint. Training may continue when this returns; the checkpoint is durable when the future is done.

        Then all but the newest `keep`, and the one that is served after a rollback, are removed; a checkpoint of a later `life`
        is newer, whatever its step. `extra` must be JSON; only rank 0's `extra` and `confirm` are used. `confirm` is called on
        the checkpoint thread after all files are written and before the manifest: if it raises, there is no checkpoint.
        """
        draft, layout = Draft.of(folder, step, life), current_layout()
        facts = {name: training_state.facts_of(model) for name, model in self._models.items()}

        def complete(files: dict[str, FileFacts]) -> None:
            confirm()
            check_is_latest(folder, life)
            draft.commit(Manifest(format=FORMAT, step=step, layout=layout, models=facts, files=files, extra=dict(extra)))
            pin = PinFile(folder.parent).read()
            remove_superseded(folder, keep, newest=step, life=life, spared=pin.checkpoint if pin is not None else "")

        given = training_state.capture_random(dist.get_rank(), self._device)
        for name, model in self._models.items():
            given |= training_state.capture(model, name)
        return self._writer.begin(draft, given, complete)

    def load(self, folder: Path, found: Sequence[str]) -> dict[str, Any] | None:
        """Restore the first of the checkpoints `found` that is undamaged and return its `extra`; None if there are none.

        Damaged ones before it are set aside. Raises CheckpointError if all are damaged.
        """
        damaged: list[Path] = []
        for path in (folder / name for name in found):
            manifest, problem = None, None
            try:
                manifest = read_manifest(path)
                # each file is verified by one rank, and then read by every rank that needs a part of it
                check_files(path, manifest, sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()])
            except DamagedCheckpoint as error:
                problem = error
            if true_on_all(problem is None):
                assert manifest is not None
                self._restore(path, manifest)
                if dist.get_rank() == 0:
                    for each in damaged:
                        set_aside(each)
                return dict(manifest.extra)
            damaged.append(path)
            log.warning(
                f"checkpoint {path.name} is damaged, trying the one before it", reason=str(problem or "another rank's part")
            )
        if found:
            raise CheckpointError(f"every checkpoint in {folder} is damaged; move the folder away to start from the beginning")
        return None

    def close(self) -> None:
        """Wait for a checkpoint that is being written; it needs the process group."""
        self._writer.close()

    def _restore(self, path: Path, manifest: Manifest) -> None:
        """Restore models written under any layout. Random states belong to ranks, and need the same layout."""
        found = {name: model for name, model in self._models.items() if name == POLICY or name in manifest.models}
        for name in self._models.keys() - found.keys():
            log.warning(f"checkpoint {path.name} has no {name}, which starts from its initial weights")
        for name, model in found.items():
            check_model(path, manifest, name, model.shape, adapters=model.adapters, head_may_lack=True)
            if lacks_head(manifest.models[name], model.shape):
                log.warning(f"checkpoint {path.name} has no value head of the {name}, which starts from its initial weights")
        with open_pieces(path, manifest) as pieces:
            for name, model in found.items():
                training_state.restore(model, pieces, manifest.models[name], name)
            if manifest.layout == current_layout():
                training_state.restore_random(pieces, dist.get_rank(), self._device)
