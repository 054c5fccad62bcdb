"""Ships steps: decides which become durable and when, and reports the result."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

from surefoot.agent.clients.pins import Pins
from surefoot.agent.evict.precedence import goes_first
from surefoot.agent.frozen.transfer import FrozenSaver
from surefoot.agent.memory.memory import Held, ImageSet
from surefoot.agent.node import Node
from surefoot.agent.save.clock import SaveClock
from surefoot.agent.save.commits import Commits
from surefoot.agent.save.pipeline import Pipeline
from surefoot.agent.save.queue import Outcomes, Part, Upload, UploadQueue
from surefoot.agent.save.retention import Retention
from surefoot.core.eviction import Link, UploadReport
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Manifest
from surefoot.errors import (
    AgentError,
    CorruptError,
    SupersededError,
    TierError,
    TierFullError,
)
from surefoot.host.clock import boot_ns, boot_s
from surefoot.ipc.board import NodeWord
from surefoot.ipc.segment import Segment

_ATTEMPTS = {"periodic": 3, "manual": 8, "final": 8}
"""Tries before a save is given up. Emergency ones are tried until the deadline ends everything."""
_LONGEST_PAUSE_S = 20.0
_FIRST_PAUSE_S = 0.5
_RETENTION_EVERY_S = 5.0


class Shipper:
    """A queue of uploads and the one task that works it off, the most urgent first."""

    def __init__(
        self,
        node: Node,
        pipeline: Pipeline,
        commits: Commits,
        pins: Pins,
        retention: Retention,
        frozen: FrozenSaver,
        clock: SaveClock,
    ) -> None:
        self._membership = node.membership
        self._memory = node.memory
        self._journal = node.journal
        self._status = node.status
        self._tasks = node.tasks
        self._pipeline = pipeline
        self._commits = commits
        self._pins = pins
        self._retention = retention
        self._frozen = frozen
        self._clock = clock
        self._uploads = UploadQueue()
        self._task: asyncio.Task[None] | None = None
        """At work on the running upload."""
        self._wake = asyncio.Event()
        self._outcomes = Outcomes()
        self._retained_s = 0.0
        self._changed = asyncio.Event()
        self._dropped: dict[int, tuple[BoundaryId, str]] = {}
        """By rank, what it gave up last: others may seal that step only later."""
        self._spare: list[tuple[int, Part]] = []
        """Pins that nobody needs."""
        self.rate_bytes_per_s = 0.0
        """At which the last upload went, from hashing to the commit, pauses included; 0 before there is one."""
        self._link = Link()
        self._upload_until_s: float | None = None
        """When an eviction's uploads must be done."""

    # ------------------------------------------------------------------ what comes in

    def sealed(
        self, segment: Segment, slot: int, seq: int, at: BoundaryId, trigger: str, tag: str | None, num_parts: int
    ) -> None:
        """A rank sealed an image that is to be shipped; its slot is pinned."""
        if at == self._status.committed and trigger == "periodic":
            # Sent again to an agent whose predecessor died between the commit and the release.
            self._spare.append((segment.rank, (segment, slot, seq)))
            self._wake.set()
            return
        upload = self._uploads.incomplete(at, trigger)
        if upload is None:
            upload = Upload(at, trigger, tag, num_parts, f"{trigger} {at.boundary} {at.generation}")
            self._uploads.add(upload)
        upload.parts[segment.rank] = (segment, slot, seq)
        if upload.complete:
            self._whole(upload)
            for older in self._uploads.overtaken(upload):
                self._uploads.remove(older)
                self._tasks.create_task(self._let_go(older, f"{at.label} overtook it"))

    async def passed(self, rank: int, at: BoundaryId) -> None:
        """A rank went past `at` without taking part in what others asked to be saved there: that cannot complete."""
        for upload in self._uploads.waiting:
            if upload.at <= at and rank not in upload.parts and upload.at.generation == at.generation:
                await self._give_up(upload, self._why_missing(rank, upload))

    def _why_missing(self, rank: int, upload: Upload) -> str:
        at, why = self._dropped.get(rank, (None, ""))
        if at == upload.at:
            return f"rank {rank}: {why}"
        return (
            f"save() at {upload.at.label} was called on rank(s) {sorted(upload.parts)}, but not on rank "
            f"{rank}: call it on every rank"
        )

    async def dropped(self, rank: int, at: BoundaryId, why: str) -> None:
        """A rank gave its image of `at` up: nothing that needs it can complete."""
        self._dropped[rank] = (at, why)
        for upload in [upload for upload in self._uploads.waiting if upload.at == at]:
            await self._give_up(upload, f"rank {rank}: {why}")

    async def left(self, rank: int) -> None:
        """A rank will seal nothing more: what still lacks its part cannot become whole."""
        for upload in self._uploads.waiting:
            if not upload.complete and rank not in upload.parts:
                await self._give_up(upload, f"rank {rank} left before it took part")

    def ship(self, images: ImageSet, trigger: str, name: str) -> None:
        """Deliver images that this node has kept, under a name that all nodes know."""
        upload = Upload.of(images, trigger, name)
        self._uploads.add(upload)
        self._whole(upload)

    def _whole(self, upload: Upload) -> None:
        """All of this node's parts of it are here."""
        if upload.preempts:
            self._tasks.create_task(self._take_precedence(upload))
        self._wake.set()

    async def wait(self, at: BoundaryId) -> str | None:
        """Wait until that step is committed (None) or given up (why)."""
        if self._status.committed == at:
            return None
        # A step that no upload works on any more would never get an answer.
        return await self._outcomes.wait(at) if self._uploads.uploading(at) else self._outcomes.of(at)

    async def something(self, within_s: float) -> None:
        """Wait until an upload ended, well or not, or the time is up."""
        self._changed.clear()
        try:
            async with asyncio.timeout(within_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def hurry(self, until_s: float) -> None:
        """An eviction needs every byte per second there is; what is not uploaded until `until_s` is lost."""
        self._upload_until_s = until_s
        self._pipeline.hurry()

    def pinned(self) -> list[tuple[Segment, int]]:
        """Slots that an upload still reads."""
        return [(segment, slot) for upload in self._uploads.all() for segment, slot, _seq in upload.parts.values()]

    def busy(self) -> bool:
        return bool(self._uploads.all())

    def uploading(self, at: BoundaryId) -> bool:
        return self._uploads.uploading(at)

    def newest(self) -> BoundaryId | None:
        """The newest step that is being delivered."""
        return max((upload.at for upload in self._uploads.all()), default=None)

    async def drop_incomplete(self) -> None:
        """Forget what can no longer complete, because the trainers that were to complete it are gone."""
        for upload in [d for d in self._uploads.waiting if not d.complete]:
            await self._give_up(upload, "a rank ended before it was whole")

    def names(self) -> list[str]:
        """Of what this node has a part of, and has not done with it yet."""
        return [upload.name for upload in self._uploads.all()]

    async def will_lack(self, node: str, names: Collection[str]) -> None:
        """Another node's trainers are gone, and of the saves that trainers asked for it has only these under way."""
        for upload in self._uploads.all():
            known = upload.name in names or self._membership.has_brought(node, upload.name)
            # A step that agents chose to ship is sent to all, and may have been sent since.
            if not known and not upload.committed and upload.trigger != "agent":
                await self._abandon(upload, f"node {node} has no part of it, and no trainers any more")

    async def make_room(self) -> None:
        """A trainer has no slot for an image that must be taken: the least urgent upload gives way."""
        periodic = [upload for upload in self._uploads.all() if upload.trigger == "periodic"]
        for upload in periodic:
            await self._abandon(upload, "an image that must be taken needed its slot")

    # ------------------------------------------------------------------ the work

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._release_spare()
            while (upload := self._uploads.next()) is not None:
                await self._work_on(upload)
                await self._release_spare()

    async def _release_spare(self) -> None:
        while self._spare:
            rank, part = self._spare.pop()
            await self._pins.unpin(rank, *part)

    async def _work_on(self, upload: Upload) -> None:
        self._uploads.remove(upload)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._upload(upload))
            self._uploads.running, self._task = upload, task
            try:
                await asyncio.wait([task])
            finally:
                self._uploads.running = self._task = None
        self._changed.set()

    async def _upload(self, upload: Upload) -> None:
        await asyncio.sleep(max(0.0, upload.not_before_s - boot_s()))
        committed = self._status.committed
        if upload.trigger == "periodic" and committed is not None and committed > upload.at:
            await self._give_up(upload, "a newer step is durable already")
            return
        upload.attempt += 1
        started_s, started_ns = boot_s(), boot_ns()
        try:
            images = await self._hashed(upload)
            why = await self._frozen.hold_back(images, upload.trigger)
            if why is not None:
                self._journal.record("skipped", **upload.at.names, why=why)
                await self._give_up(upload, why)
                return
            plan = images.parts[0].segment.plan()
            override = {"trigger": "agent"} if upload.trigger == "agent" else {}
            size_bytes, begun_s, held_s = upload.unshipped_bytes(), boot_s(), self._pipeline.held_s
            upload.sending = (begun_s, size_bytes)
            await self._pipeline.ship(images, plan, override, upload.shipped)
            self._link.uploaded(size_bytes, boot_s() - begun_s, self._pipeline.held_s - held_s)
            current = self._status.generation
            manifest = await self._commits.commit(upload.name, upload.at, upload.shipped, current)
        except CorruptError as error:
            self._journal.record("quarantined", object=upload.at.label, tier="ram", why=str(error))
            await self._give_up(upload, str(error))
        except SupersededError as error:
            self._status.supersede(str(error))
            await self._give_up(upload, str(error))
        except AgentError as error:
            self._journal.record("skipped", **upload.at.names, why=str(error))
            await self._give_up(upload, str(error))
        except TierError as error:
            await self._retry(upload, error)
        else:
            await self._committed(upload, images, manifest, boot_s() - started_s, started_ns)

    async def _committed(
        self, upload: Upload, images: ImageSet, manifest: Manifest, took_s: float, started_ns: int
    ) -> None:
        self.rate_bytes_per_s = images.size_bytes / max(took_s, 1e-6)
        staged_ns = min(part.sealed.staged_ns for part in images.parts)
        upload.committed = True
        self._status.note_commit(manifest.at, self._pipeline.tier_name, staged_ns)
        self._journal.record(
            "committed",
            **manifest.at.names,
            tier=self._pipeline.tier_name,
            bytes=manifest.size_bytes,
            seconds=round(took_s, 4),
            trigger=manifest.trigger,
            tag=manifest.tag,
        )
        self._outcomes.resolve(upload.at, None)
        if self._pipeline.copies and not upload.preempts and not self._uploads.urgent():
            await self._copy(images, manifest)
        await self._unpin(upload)
        self._clock.saved(started_ns / 1e9, manifest.size_bytes, again=upload.trigger == "periodic")
        await self._retain(manifest)

    async def _retain(self, manifest: Manifest) -> None:
        noticed = bool(self._status.board.node(NodeWord.NOTICE))
        if boot_s() - self._retained_s < _RETENTION_EVERY_S or noticed or not self._membership.leads:
            return
        self._retained_s = boot_s()
        try:
            await self._retention.note(manifest, self._status.generation, self._under_way())
        except (TierError, CorruptError) as error:
            self._journal.record("warning", what=f"old checkpoints could not be given up: {error}")
        except SupersededError as error:
            self._status.supersede(str(error))

    async def _copy(self, images: ImageSet, manifest: Manifest) -> None:
        started_s = boot_s()
        try:
            await self._pipeline.copy_to_disks(images, manifest)
        except TierError as error:
            self._journal.record("save_failed", **manifest.at.names, tier="disk", why=str(error), attempt=1)
        else:
            took_s = round(boot_s() - started_s, 4)
            self._journal.record("copied", **manifest.at.names, tier="disk", bytes=manifest.size_bytes, seconds=took_s)

    async def _hashed(self, upload: Upload) -> ImageSet:
        parts: list[Held] = []
        for rank in sorted(upload.parts):
            segment, slot, seq = upload.parts[rank]
            held = await self._memory.hash_slot(segment, slot)
            if held is None or held.sealed.seq != seq:
                raise CorruptError(f"the image of rank {rank} at {upload.at.label} is gone")
            parts.append(held)
        return ImageSet(upload.at, parts[0].segment.plan_hash, tuple(parts))

    async def _retry(self, upload: Upload, error: TierError) -> None:
        self._journal.record(
            "save_failed",
            **upload.at.names,
            tier=self._pipeline.tier_name,
            why=str(error),
            attempt=upload.attempt,
        )
        if isinstance(error, TierFullError):
            await self._make_space()
        if upload.attempt >= _ATTEMPTS.get(upload.trigger, 1 << 30):
            await self._give_up(upload, str(error))
            return
        upload.not_before_s = boot_s() + min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**upload.attempt)
        upload.sending = None
        self._uploads.failed(upload)
        self._wake.set()

    async def _make_space(self) -> None:
        """A tier is full: what was given up goes now instead of an hour later."""
        try:
            freed = await self._retention.run(self._status.generation, self._under_way(), sweep_delay_s=0.0)
        except (TierError, CorruptError, SupersededError) as error:
            self._journal.record("warning", what=f"no space could be made: {error}")
            return
        if not freed:
            self._journal.record(
                "warning", what=f"{self._pipeline.uri} is full and holds nothing to delete: free some space there"
            )

    async def _give_up(self, upload: Upload, why: str) -> None:
        await self._let_go(upload, why)
        if upload.trigger == "periodic":
            # Training goes on; a fresher step is taken instead.
            self._clock.wish_in(_FIRST_PAUSE_S * 2**upload.attempt)

    async def _let_go(self, upload: Upload, why: str) -> None:
        self._uploads.remove(upload)
        self._commits.give_up(upload.name, why)
        self._outcomes.resolve(upload.at, why)
        await self._unpin(upload)
        self._changed.set()

    async def _abandon(self, upload: Upload, why: str) -> None:
        if self._task is not None and self._uploads.running is upload:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._journal.record("skipped", **upload.at.names, why=why)
        await self._give_up(upload, why)

    # ------------------------------------------------------------------ what is under way when an eviction comes

    async def _take_precedence(self, upload: Upload) -> None:
        """An older upload is interrupted, unless it fits into the time left and this one does not."""
        first = await goes_first(self._membership, self._journal, upload.name, upload.at, self._report(upload))
        if first is not None:
            self._uploads.favour(first)
        running, task = self._uploads.running, self._task
        if running is None or task is None or upload not in self._uploads.waiting:
            return
        # A committed step is only being copied to local drives.
        goes_on = running.preempts or running.at >= upload.at or (running.at == first and not running.committed)
        # A task that was cancelled takes a moment to end: what the tier has begun is taken back.
        if not goes_on and not task.cancelling():
            task.cancel()
            task.add_done_callback(lambda done: self._preempted(done, running))

    def _report(self, newest: Upload) -> UploadReport:
        now_s, speed = boot_s(), self._link.bytes_per_s
        left_s = None if self._upload_until_s is None else self._upload_until_s - now_s
        if speed is None:
            return UploadReport(None, left_s)
        older = [d for d in self._uploads.all() if d.complete and not d.preempts and d.at < newest.at]
        older_s = {d.at: d.left_s(speed, now_s) for d in older if not d.committed}
        if self._status.committed is not None:
            older_s[self._status.committed] = 0.0
        return UploadReport(newest.left_s(speed, now_s), left_s, older_s)

    def _preempted(self, task: asyncio.Task[None], upload: Upload) -> None:
        if not task.cancelled():
            return
        if not upload.committed and upload.trigger != "periodic":
            # A waiting save() is not forgotten: it is shipped again, should there be time left.
            upload.sending = None
            self._uploads.add(upload)
            self._wake.set()
            return
        if not upload.committed:
            why = "an eviction's newer step took its place"
            if not upload.whole_here:
                # Else the others have all they need from here, and may still commit it.
                self._commits.give_up(upload.name, why)
            self._outcomes.resolve(upload.at, why)
        self._spare.extend(upload.parts.items())
        self._wake.set()

    def _under_way(self) -> set[BoundaryId]:
        return {upload.at for upload in self._uploads.all()}

    async def _unpin(self, upload: Upload) -> None:
        for rank, part in upload.parts.items():
            await self._pins.unpin(rank, *part)

    def status(self) -> dict[str, Any]:
        """For `surefoot status`."""
        return {
            "under_way": [[d.at.step, d.trigger, d.attempt] for d in self._uploads.all()],
            "bytes_per_s": round(self.rate_bytes_per_s),
        }
