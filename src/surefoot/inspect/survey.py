"""Surveys a run: reads every small document once, tolerant of damage in each."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from surefoot.core.documents import Fields, unseal
from surefoot.core.layout import (
    COMMITS,
    FROZEN,
    GENERATIONS,
    PLANS,
    QUARANTINE,
    RUN_KEY,
    STEPS,
    BoundaryId,
    commit_key,
    generation_key,
    parse_ack,
    parse_commit,
    parse_generation,
    parse_plan,
    parse_shard,
    plan_key,
)
from surefoot.core.lineage import Cuts, counts, cuts
from surefoot.core.manifest import Generation, Manifest, RunRecord
from surefoot.errors import ConfigError, CorruptError, FormatError, ObjectMissingError, TierError
from surefoot.inspect.frozen import needed_files
from surefoot.inspect.problems import Findings, Problem
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

_TOMBSTONE_BYTES = 256
"""A tombstone is smaller than this, a manifest never is (a shard's path and hash alone need 150)."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a run's URI holds, as far as it could be read."""

    uri: str
    tier: str
    run: RunRecord | None
    generations: Mapping[int, Generation]
    listed_generations: frozenset[int]
    """Numbers that have a record, damaged ones too."""
    chain: Cuts | None
    """The lineage; None if a record that it needs is damaged or missing."""
    commits: frozenset[BoundaryId]
    """Steps whose manifest key is taken: manifests, retired ones, tombstones and damaged ones."""
    manifests: Mapping[BoundaryId, Manifest]
    damaged: frozenset[BoundaryId]
    """Steps whose manifest is there, but not whole."""
    sizes: Mapping[str, int]
    """Size of every object under steps/, by key."""
    frozen: Mapping[str, int]
    """Size of every object under frozen/, by key."""
    plans: frozenset[str]
    quarantined: Mapping[str, str]
    """Objects that must not be used again, with the reason."""
    problems: tuple[Problem, ...]

    @property
    def empty(self) -> bool:
        """The tier answered, and there is nothing of a run."""
        return not (self.problems or self.run or self.listed_generations or self.commits or self.sizes)

    def on_lineage(self, at: BoundaryId) -> bool | None:
        """True if the step is part of the history that goes on; None if the lineage is not known."""
        return None if self.chain is None else counts(at, self.chain)

    def attempts(self) -> dict[BoundaryId, int]:
        """Steps that have shards, with the bytes of all of them."""
        found: dict[BoundaryId, int] = {}
        for key, size_bytes in self.sizes.items():
            shard = parse_shard(key) or parse_ack(key)
            if shard is not None:
                counted = size_bytes if parse_shard(key) else 0
                found[shard.at] = found.get(shard.at, 0) + counted
        return found

    def demand(self) -> Survey:
        """This survey, if the tier answered everything and a run is there.

        Raises:
            TierError: the tier failed to answer something.
            ConfigError: there is no run.
        """
        for problem in self.problems:
            if problem.fault:
                raise TierError(f"{self.uri}: {problem.object} {problem.what}")
        if self.empty:
            raise ConfigError(f"there is no run at {self.uri}: give the URI or directory that `surefoot run --to` had")
        return self


async def survey(records: Records, *, all_commits: bool = False) -> Survey:
    """Read a run's documents. What cannot be read is among the survey's problems.

    Args:
        records: the run's.
        all_commits: also read what, by its size and the absence of shards, can only be a tombstone. A long run has
            hundreds of thousands of them.

    Raises:
        ConfigError: it is a run of another format.
    """
    return await _Surveyor(records).survey(all_commits)


class _Surveyor:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._tier: Tier = records.tier
        self._findings = Findings()

    async def survey(self, all_commits: bool) -> Survey:
        run = await self._findings.attempt(RUN_KEY, self._run())
        generations, listed = await self._generations()
        # Commits BEFORE shards: a commit found here has its shards already.
        commits = await self._commits()
        sizes = {e.key: e.size_bytes for e in await self._findings.listing(self._tier, STEPS)}
        frozen = {e.key: e.size_bytes for e in await self._findings.listing(self._tier, FROZEN)}
        manifests, damaged = await self._manifests(commits, sizes, all_commits)
        plans = [parse_plan(entry.key) for entry in await self._findings.listing(self._tier, PLANS)]
        quarantined = await self._quarantined()
        if run is False and (listed or commits or sizes):
            self._findings.add(RUN_KEY, "is missing")
        return Survey(
            uri=self._tier.uri,
            tier=self._tier.name,
            run=run if isinstance(run, RunRecord) else None,
            generations=generations,
            listed_generations=listed,
            chain=_chain(generations, listed),
            commits=frozenset(commits),
            manifests=manifests,
            damaged=damaged,
            sizes=sizes,
            frozen=frozen,
            plans=frozenset(plan for plan in plans if plan is not None),
            quarantined=quarantined,
            problems=self._findings.problems,
        )

    async def _run(self) -> RunRecord | bool:
        """The run's record; False if the tier reports that there is none."""
        try:
            return RunRecord.from_bytes(await self._tier.get(RUN_KEY))
        except ObjectMissingError:
            return False
        except FormatError as error:
            raise ConfigError(f"{self._tier.uri}: {error}") from error

    async def _generations(self) -> tuple[dict[int, Generation], frozenset[int]]:
        listed = await self._findings.listing(self._tier, GENERATIONS)
        numbers = [number for entry in listed if (number := parse_generation(entry.key)) is not None]
        read = await asyncio.gather(
            *(self._findings.attempt(generation_key(n), self._records.generation(n)) for n in numbers)
        )
        return {g.number: g for g in read if g is not None}, frozenset(numbers)

    async def _commits(self) -> dict[BoundaryId, int]:
        listed = await self._findings.listing(self._tier, COMMITS)
        return {at: e.size_bytes for e in listed if (at := parse_commit(e.key)) is not None}

    async def _manifests(
        self, commits: Mapping[BoundaryId, int], sizes: Mapping[str, int], all_commits: bool
    ) -> tuple[dict[BoundaryId, Manifest], frozenset[BoundaryId]]:
        with_objects = {shard.at for key in sizes if (shard := parse_shard(key) or parse_ack(key)) is not None}
        wanted = [
            at for at, size in sorted(commits.items()) if all_commits or size >= _TOMBSTONE_BYTES or at in with_objects
        ]
        read = await asyncio.gather(*(self._manifest(at) for at in wanted))
        manifests = {m.at: m for m in read if isinstance(m, Manifest)}
        return manifests, frozenset(at for at, m in zip(wanted, read, strict=True) if m is False)

    async def _manifest(self, at: BoundaryId) -> Manifest | bool:
        """The manifest, True for a tombstone, False for one that cannot be read."""

        async def read() -> Manifest | bool:
            return await self._records.manifest(at) or True

        found = await self._findings.attempt(commit_key(at), read())
        return False if found is None else found

    async def _quarantined(self) -> dict[str, str]:
        keys = [entry.key for entry in await self._findings.listing(self._tier, QUARANTINE)]
        notes = await asyncio.gather(*(self._findings.attempt(key, self._note(key)) for key in keys))
        return dict(note for note in notes if note is not None)

    async def _note(self, key: str) -> tuple[str, str]:
        fields = Fields(unseal(await self._tier.get(key), key), key)
        return fields.text("object"), fields.text("why")


def quarantine_reason(found: Survey, manifest: Manifest) -> str | None:
    """Why a checkpoint must not be used again; None if nothing is known against it."""
    suspects = [manifest.key, *(shard.key for shard in manifest.shards), plan_key(manifest.plan)]
    suspects += [file.key for file in needed_files(manifest)]
    return next((f"{key}: {found.quarantined[key]}" for key in suspects if key in found.quarantined), None)


def _chain(generations: Mapping[int, Generation], listed: frozenset[int]) -> Cuts | None:
    if listed and max(listed) not in generations:
        return None
    try:
        return cuts(generations)
    except CorruptError:
        return None
