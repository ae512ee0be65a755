"""Handles the requests of `async-rl weights ...`. Each is answered at once; the loop carries it out between two steps."""

from __future__ import annotations

from pathlib import Path

import structlog

from async_rl.board.inbox import Inbox, post
from async_rl.board.weight_requests import (
    ANSWERS,
    REQUESTS,
    LastPush,
    WeightAnswer,
    WeightRequest,
    WeightsState,
)
from async_rl.checkpoints.manifest import DamagedCheckpoint, candidates, read_manifest
from async_rl.errors import CheckpointError
from async_rl.protocols import Board
from learner.versions.pin_file import PinFile, PinRecord
from learner.versions.publish import Publisher, Rollback

log = structlog.get_logger("learner")


class RequestRefused(Exception):
    """The reason, as a sentence for the operator."""


class WeightRequests:
    def __init__(self, board: Board, publisher: Publisher, run_folder: Path) -> None:
        self._board, self._publisher = board, publisher
        self._checkpoints, self._pin_file = run_folder / "checkpoints", PinFile(run_folder)

    async def resume(self) -> None:
        """Restore the pin that the previous learner left. Call it before anything is offered."""
        if (pin := self._pin_file.read()) is None:
            return
        checkpoint = self._checkpoints / pin.checkpoint
        if pin.checkpoint and checkpoint.is_dir():
            log.warning(f"the weights are still rolled back to step {pin.step}; `async-rl weights pin off` ends it")
            await self._publisher.request_rollback(Rollback(checkpoint=checkpoint, step=pin.step))
            return
        log.warning(
            f"the weights of step {pin.step}, which were pinned, are gone with the learner before this one: it serves its own"
        )
        self._pin_file.remove()

    async def run(self) -> None:
        """
        consumes: requests (the board)      waits for:    a request
        produces: answers, pending pushes   unblocked by: an operator
        """
        inbox = await Inbox.open(self._board, REQUESTS, WeightRequest)
        while True:
            for request in await inbox.read():
                try:
                    text, is_refusal = await self._handle(request), False
                except RequestRefused as refusal:
                    text, is_refusal = str(refusal), True
                if request.action != "status":
                    log.info(f"asked to {request.action} weights: {text}")
                answer = WeightAnswer(id=request.id, text=text, is_refusal=is_refusal, state=self._state())
                await post(self._board, ANSWERS, answer)

    async def _handle(self, request: WeightRequest) -> str:
        publisher = self._publisher
        match request.action:
            case "status":
                return ""
            case "push":
                return self._push()
            case "pin":
                return await self._pin(request.version)
            case "unpin":
                if not publisher.pinned:
                    raise RequestRefused("nothing is pinned")
                self._pin_file.remove()
                publisher.unpin()
                return "the newest weights go out after the step that is being trained"
            case "roll back":
                wanted = self._checkpoint(request)
                self._write(PinRecord(step=wanted.step, checkpoint=wanted.checkpoint.name))
                await publisher.request_rollback(wanted)
                return (
                    f"the weights of step {wanted.step} go out as a version of their own after the step that is being trained, "
                    "and stay until `async-rl weights pin off`; what the learner holds is not touched"
                )

    async def _pin(self, version: int | None) -> str:
        live = self._publisher.live_version
        if version not in (None, live):
            raise RequestRefused(
                f"version {version} is not live, {live} is; `async-rl weights rollback` serves a checkpoint again"
            )
        if self._publisher.pinned:
            raise RequestRefused(f"the weights are pinned already ({self._publisher.pinned})")
        if live < 0 or (pinned := await self._publisher.pin("by hand")) is None:
            raise RequestRefused("no version is live yet, so there is nothing to pin")
        try:
            self._write(PinRecord(step=pinned.step))
        except RequestRefused:
            self._publisher.unpin()
            raise
        return f"version {pinned.version} stays live; the learner trains on for as long as max_age lets it"

    def _write(self, pin: PinRecord) -> None:
        try:
            self._pin_file.write(pin)
        except OSError as error:
            raise RequestRefused(f"nothing is pinned, because it cannot be written down: {error.strerror}") from error

    def _push(self) -> str:
        if self._publisher.pinned:
            raise RequestRefused(
                f"the weights are pinned ({self._publisher.pinned}); `async-rl weights pin off` pushes the newest"
            )
        if not self._publisher.may_offer:
            raise RequestRefused("the newest version is live, or on its way")
        self._publisher.request_push()
        return "the newest weights go out after the step that is being trained"

    def _checkpoint(self, request: WeightRequest) -> Rollback:
        """The checkpoint of the requested step or version. Of a step that was trained twice, the later one is meant."""
        kept: dict[str, Rollback] = {}
        for path in candidates(self._checkpoints):
            try:
                manifest = read_manifest(path)
            except (DamagedCheckpoint, CheckpointError):
                continue
            version, found = manifest.extra.get("version"), Rollback(checkpoint=path, step=manifest.step)
            if manifest.step == request.step or (request.version is not None and version == request.version):
                return found
            kept[f"{version} (step {manifest.step})"] = found
        meant = f"version {request.version}" if request.version is not None else f"step {request.step}"
        listed = f"; there are versions {', '.join(kept)}" if kept else "; there is none yet (learner.checkpoint_every)"
        raise RequestRefused(f"no checkpoint holds {meant}{listed}")

    def _state(self) -> WeightsState:
        pushed, held = self._publisher.last_push, self._publisher.progress
        return WeightsState(
            version=held.version if held is not None else -1,
            step=held.step if held is not None else 0,
            pinned=self._publisher.pinned,
            last_push=None
            if pushed is None
            else LastPush(
                record=pushed.record,
                at=pushed.at,
                seconds=pushed.report.seconds,
                bytes=pushed.report.num_bytes,
                staged=pushed.report.staged,
                dropped=dict(pushed.report.dropped),
            ),
        )
