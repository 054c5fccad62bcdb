"""Gives up and deletes checkpoints that are no longer needed, on the run's URI and on local drives."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from surefoot.agent.frozen.files import FrozenFiles
from surefoot.agent.journal import Journal
from surefoot.core.frozen import files_of
from surefoot.core.layout import STEPS, BoundaryId, boundary_prefix, parse_ack, parse_shard
from surefoot.core.lineage import cuts
from surefoot.core.manifest import Generation, Manifest
from surefoot.core.retention import SWEEP_DELAY_S, abandoned_steps, to_retire, to_sweep
from surefoot.errors import CorruptError, ObjectMissingError, SupersededError, TierFullError
from surefoot.host.clock import boot_s, wall_s
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

_TRUST_S = 5.0
"""A reading of the newest generation is trusted this long, on a clock that runs while the process is stopped."""


class Retention:
    """Runs after commits. Knows the manifests that it has seen; a manifest changes only by retention's own hand."""

    def __init__(self, records: Records, disks: Tier | None, frozen: FrozenFiles, journal: Journal) -> None:
        self._records = records
        self._disks = disks
        self._frozen = frozen
        self._journal = journal
        self._manifests: dict[BoundaryId, Manifest] = {}
        self._buried: set[BoundaryId] = set()
        """Tombstones and damaged manifests: nothing to keep, key taken."""
        self._verified: set[BoundaryId] = set()
        self._read_s = 0.0

    async def note(self, manifest: Manifest, current: Generation, under_way: Collection[BoundaryId]) -> None:
        """A checkpoint was committed: check that its shards are there, then give up what is no longer needed.

        Raises: as `run`.
        """
        self._manifests[manifest.at] = manifest
        await self.verify(manifest)
        await self.run(current, under_way)

    async def verify(self, manifest: Manifest) -> bool:
        """True if every shard of a checkpoint is there with its size, and every frozen file that it names. Found good
        once, it is not asked again."""
        if manifest.at not in self._verified:
            try:
                sizes = [await self._records.tier.size(shard.key) for shard in manifest.shards]
            except ObjectMissingError:
                return False
            if sizes != [shard.size_bytes for shard in manifest.shards]:
                return False
            if not all([await self._frozen.is_durable(file) for file in files_of(manifest)]):
                return False
            self._verified.add(manifest.at)
        return True

    async def run(
        self, current: Generation, under_way: Collection[BoundaryId], sweep_delay_s: float | None = None
    ) -> int:
        """One round of retention. Returns the bytes deleted.

        Args:
            current: the generation that this agent works in.
            under_way: steps that this agent is shipping.
            sweep_delay_s: how long a given-up checkpoint's bytes stay; by default an hour.

        Raises:
            SupersededError: a newer launch owns the run; nothing more is deleted.
            CorruptError: a generation's record is damaged or missing: it is unknown what counts, so nothing is deleted.
            TierError: the tier failed; tried again after the next commit.
        """
        commits = await self._records.commits()
        for at in commits:
            await self._learn(at)
        generations = await self._records.generations()
        await self._still_newest(generations, current)
        delay_s = SWEEP_DELAY_S if sweep_delay_s is None else sweep_delay_s
        # Before anything is given up: on a full disk only a deletion makes the room which that needs.
        freed = await self._sweep(generations, current, delay_s)
        chain = cuts(generations)
        live = [self._manifests[at] for at in commits if at in self._manifests]
        for manifest in sorted(live, key=lambda m: m.at, reverse=True)[: 2 + len(chain)]:
            await self.verify(manifest)
        for at in to_retire(live, chain, generations, self._verified):
            await self._still_newest(generations, current)
            await self._retire(at)
        if delay_s <= 0:
            freed += await self._sweep(generations, current, delay_s)
        await self._sweep_abandoned(commits, generations, current, under_way)
        await self._still_newest(generations, current)
        return freed + await self._frozen.sweep(self._manifests.values(), delay_s)

    async def _learn(self, at: BoundaryId) -> None:
        if at in self._manifests or at in self._buried:
            return
        try:
            manifest = await self._records.manifest(at)
        except (CorruptError, ObjectMissingError):
            manifest = None
        if manifest is None:
            self._buried.add(at)
        else:
            self._manifests[at] = manifest

    async def _retire(self, at: BoundaryId) -> None:
        retired = self._manifests[at].retire(wall_s())
        try:
            await self._records.rewrite_manifest(retired)
        except TierFullError:
            # No room for even that: a manifest that exists no longer needs its acknowledgements.
            await self._records.tier.delete([shard.ack for shard in retired.shards])
            await self._records.rewrite_manifest(retired)
        self._manifests[at] = retired
        if self._disks is not None:
            # Copies need no grace: a reader of one falls back to the run's own.
            await self._disks.delete([shard.key for shard in retired.shards])

    async def _sweep(self, generations: dict[int, Generation], current: Generation, delay_s: float) -> int:
        freed = 0
        swept = []
        for manifest in to_sweep(list(self._manifests.values()), wall_s(), delay_s):
            await self._still_newest(generations, current)
            freed += manifest.size_bytes
            await self._records.tier.delete(await self._objects_of(manifest.at))
            await self._records.bury(manifest.at, wall_s())
            del self._manifests[manifest.at]
            self._buried.add(manifest.at)
            swept.append(manifest.at.step)
        if swept:
            self._journal.record("swept", steps=swept, bytes=freed)
        return freed

    async def _sweep_abandoned(
        self,
        commits: list[BoundaryId],
        generations: dict[int, Generation],
        current: Generation,
        under_way: Collection[BoundaryId],
    ) -> None:
        listed = await self._records.tier.list(STEPS)
        steps = {shard.at for entry in listed if (shard := parse_shard(entry.key) or parse_ack(entry.key)) is not None}
        good = sorted(self._verified & set(self._manifests))
        chain = cuts(generations)
        abandoned = abandoned_steps(steps, commits, chain, max(generations), good[0] if good else None)
        # In the generation that trains, what this agent gave up, once a later step is safe.
        own = [at for at in steps if at.generation == current.number and at not in commits and at not in under_way]
        safe = max((at for at in good if at.generation == current.number), default=None)
        abandoned += sorted(at for at in own if safe is not None and at < safe)
        for at in abandoned:
            await self._still_newest(generations, current)
            if await self._records.put_tombstone(at, wall_s()):
                self._buried.add(at)
                await self._records.tier.delete([e.key for e in listed if e.key.startswith(boundary_prefix(at))])

    async def _objects_of(self, at: BoundaryId) -> list[str]:
        return [entry.key for entry in await self._records.tier.list(boundary_prefix(at))]

    async def _still_newest(self, generations: Mapping[int, Generation], current: Generation) -> None:
        """Deletes carry no condition: a retention that was stopped must not delete by an old view of the run."""
        newest = generations.get(max(generations, default=0))
        if newest is not None and not newest.same_job(current):
            raise SupersededError(newest.owner)
        if newest is not None and boot_s() - self._read_s < _TRUST_S:
            return
        newer = await self._records.newer_generation(newest.number) if newest is not None else current
        if newer is not None and not newer.same_job(current):
            raise SupersededError(newer.owner)
        if newer is not None:
            raise self._records.incomplete(newer.key)
        self._read_s = boot_s()
