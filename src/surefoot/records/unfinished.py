"""Finishes commits: steps that are acknowledged in full, but whose committer died before it wrote the manifest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.agent.journal import Journal
from surefoot.core.commit import complete_set, make_manifest
from surefoot.core.layout import BoundaryId
from surefoot.core.lineage import Cuts, counts
from surefoot.core.manifest import Generation
from surefoot.errors import ObjectMissingError
from surefoot.host.clock import wall_s
from surefoot.records.records import Records


class Unfinished:
    """Finishes such commits before the agent chooses which step to restore."""

    def __init__(self, records: Records, journal: Journal) -> None:
        self._records = records
        self._journal = journal

    async def commit(self, generations: Mapping[int, Generation], chain: Cuts) -> list[BoundaryId]:
        """Commit every step that counts and is acknowledged in full.

        Returns every step whose manifest's key is taken, ascending.
        """
        committed = set(await self._records.commits())
        pieces = await self._records.pieces()
        await self._records.check_records(generations, [*committed, *pieces])
        for at in sorted(set(pieces) - committed):
            if counts(at, chain) and await self._commit(at, pieces[at]):
                committed.add(at)
        return sorted(committed)

    async def _commit(self, at: BoundaryId, ack_keys: Sequence[str]) -> bool:
        shards = complete_set(await self._records.acks(ack_keys), at)
        if shards is None:
            return False
        try:
            sizes = [await self._records.tier.size(shard.key) for shard in shards]
        except ObjectMissingError:
            return False
        if sizes != [shard.size_bytes for shard in shards]:
            return False
        manifest = make_manifest(shards, await self._records.generation(at.generation), wall_s())
        if await self._records.put_manifest(manifest) is manifest:
            self._journal.record(
                "committed",
                **manifest.at.names,
                tier=self._records.tier.name,
                bytes=manifest.size_bytes,
                seconds=0.0,
                trigger=manifest.trigger,
                tag=manifest.tag,
            )
        return True
