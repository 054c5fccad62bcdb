"""Verify: every byte of every checkpoint against manifest, plan and hashes, and the documents against each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from surefoot.core.frozen import FrozenFile
from surefoot.core.layout import EVENTS, BoundaryId, commit_key, generation_key, plan_key
from surefoot.core.manifest import Manifest, Shard
from surefoot.core.plan import Plan
from surefoot.errors import ConfigError, CorruptError, ObjectMissingError
from surefoot.inspect.checkpoints import resolve
from surefoot.inspect.frozen import check_frozen, image_of, needed_files
from surefoot.inspect.ledger import committed_steps, missing_commits
from surefoot.inspect.problems import Findings, Problem
from surefoot.inspect.progress import Progress, Silent
from surefoot.inspect.shards import check_ack, check_record, check_shard
from surefoot.inspect.survey import Survey, survey
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

_SHARDS_AT_ONCE = 4
_GAPS_NAMED = 10


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verification found."""

    problems: tuple[Problem, ...]
    checkpoints: int
    """Checkpoints read through."""
    size_bytes: int
    """Bytes of their shards, and of the frozen files that they name, each once."""

    @property
    def ok(self) -> bool:
        return not self.problems


async def verify(tier: Tier, wanted: BoundaryId | int | None = None, progress: Progress | None = None) -> Verdict:
    """Read a run through, or one checkpoint of it and what it stands on. Memory: 64 MiB beside the documents.

    What the tier fails to read is a problem named as that, never as absence. A checkpoint that retention gives up
    meanwhile is none any more.

    Args:
        tier: the run's URI.
        wanted: a checkpoint; None for all that are not given up, on the lineage or off it.
        progress: hears of the bytes as they are read.
    """
    return await _Verification(Records(tier), progress or Silent()).run(wanted)


class _Verification:
    def __init__(self, records: Records, progress: Progress) -> None:
        self._records = records
        self._tier = records.tier
        self._progress = progress
        self._findings = Findings()
        self._reads = asyncio.Semaphore(_SHARDS_AT_ONCE)

    async def run(self, wanted: BoundaryId | int | None) -> Verdict:
        found = await survey(self._records, all_commits=True)
        if found.empty:
            return Verdict((Problem(found.uri, "no run here"),), 0, 0)
        for problem in found.problems:
            self._findings.add(problem.object, problem.what, fault=problem.fault)
        self._check_generations(found)
        await self._check_commits(found, ledger=wanted is None)
        chosen = self._chosen(found, wanted)
        plans = await self._plans({m.plan for m in chosen} | (found.plans if wanted is None else set()))
        frozen = _named_frozen(chosen)
        size_bytes = sum(m.size_bytes for m in chosen) + sum(file.size_bytes for file in frozen)
        self._progress.start(size_bytes)
        for manifest in chosen:
            await self._check_checkpoint(manifest, plans.get(manifest.plan))
        for file, naming in frozen.items():
            await self._check_frozen(file, naming, plans)
        return Verdict(self._findings.problems, len(chosen), size_bytes)

    # ------------------------------------------------------------------ documents

    def _check_generations(self, found: Survey) -> None:
        """No number is missing below the newest, and none that anything names."""
        listed = found.listed_generations
        named = {at.generation for at in (*found.commits, *found.attempts())}
        named |= {g.parent.generation for g in found.generations.values() if g.parent is not None}
        for low, high in pairwise(sorted({0} | listed | named)):
            named |= set(range(low + 1, min(high, low + _GAPS_NAMED)))
        if not self._unlisted(found, "generations/"):
            for number in sorted(named - listed):
                self._findings.add(generation_key(number), "is missing")

    async def _check_commits(self, found: Survey, *, ledger: bool) -> None:
        """The key of a committed step stays taken for ever: generations and events show which were committed."""
        parents = _committed_parents(found)
        told = await self._told_by_events() if ledger else set()
        if self._unlisted(found, "commits/"):
            return
        for at, number in parents.items():
            if at not in found.commits:
                self._findings.add(commit_key(at), f"is missing, but generation {number} started from it")
        for at in missing_commits(told, found.commits, found.attempts()):
            # It may have been committed after the survey looked.
            there = await self._findings.attempt(commit_key(at), self._exists(commit_key(at)))
            if there is False and at not in parents:
                self._findings.add(commit_key(at), "is missing, but the events report that it was committed")

    async def _told_by_events(self) -> set[BoundaryId]:
        told: set[BoundaryId] = set()
        for entry in await self._findings.listing(self._tier, EVENTS):
            told |= await self._findings.attempt(entry.key, self._told(entry.key)) or set()
        return told

    async def _told(self, key: str) -> set[BoundaryId]:
        return committed_steps(await self._tier.get(key))

    async def _exists(self, key: str) -> bool:
        try:
            await self._tier.size(key)
        except ObjectMissingError:
            return False
        return True

    @staticmethod
    def _unlisted(found: Survey, prefix: str) -> bool:
        return any(problem.fault and problem.object == prefix for problem in found.problems)

    async def _plans(self, hashes: set[str] | frozenset[str]) -> dict[str, Plan]:
        """Whole plans by hash. Reading one checks its hash and its exact cover."""
        plans = {}
        for plan_hash in sorted(hashes):
            plan = await self._findings.attempt(plan_key(plan_hash), self._records.plan(plan_hash))
            if plan is not None:
                plans[plan_hash] = plan
        return plans

    # ------------------------------------------------------------------ checkpoints

    def _chosen(self, found: Survey, wanted: BoundaryId | int | None) -> list[Manifest]:
        if wanted is None:
            return [m for _at, m in sorted(found.manifests.items()) if m.retired is None]
        try:
            at = resolve(found, wanted)
        except ConfigError as error:
            self._findings.add(commit_key(wanted) if isinstance(wanted, BoundaryId) else f"step {wanted}", str(error))
            return []
        manifest = found.manifests.get(at)
        if manifest is not None and manifest.retired is None:
            return [manifest]
        if at not in found.damaged:
            self._findings.add(commit_key(at), "was given up: it is not a checkpoint any more")
        return []

    async def _check_checkpoint(self, manifest: Manifest, plan: Plan | None) -> None:
        findings = Findings()
        if plan is not None and plan.world_size != manifest.world_size:
            findings.add(
                manifest.key, f"has {manifest.world_size} ranks, its plan {plan.hash} is for {plan.world_size}"
            )
            plan = None
        async with asyncio.TaskGroup() as group:
            for shard in manifest.shards:
                group.create_task(self._check_rank(manifest, shard, plan, findings))
        if findings.problems and await self._still_stands(manifest):
            for problem in findings.problems:
                self._findings.add(problem.object, problem.what, fault=problem.fault)

    async def _check_rank(self, manifest: Manifest, shard: Shard, plan: Plan | None, findings: Findings) -> None:
        async with self._reads:
            try:
                check_record(shard, manifest.world_size)
            except CorruptError as error:
                findings.add(manifest.key, str(error))
            await findings.attempt(shard.key, check_shard(self._tier, shard, plan, self._progress))
            await findings.attempt(shard.ack, check_ack(self._tier, shard))

    async def _check_frozen(self, file: FrozenFile, naming: list[Manifest], plans: Mapping[str, Plan]) -> None:
        """A frozen file, once for all checkpoints that name it."""
        findings = Findings()
        images = (image_of(file, manifest, plans.get(manifest.plan)) for manifest in naming)
        image = next((image for image in images if image is not None), None)
        await findings.attempt(file.key, check_frozen(self._tier, file, image, self._progress))
        if findings.problems and any([await self._still_stands(manifest) for manifest in naming]):
            for problem in findings.problems:
                self._findings.add(problem.object, problem.what, fault=problem.fault)

    async def _still_stands(self, manifest: Manifest) -> bool:
        """False if retention gave the checkpoint up while it was read."""
        unread = Findings()
        now = await unread.attempt(manifest.key, self._records.manifest(manifest.at))
        return bool(unread.problems) or (now is not None and now.retired is None)


def _named_frozen(manifests: Sequence[Manifest]) -> dict[FrozenFile, list[Manifest]]:
    """Frozen files, each with the checkpoints that name it."""
    named: dict[FrozenFile, list[Manifest]] = {}
    for manifest in manifests:
        for file in needed_files(manifest):
            named.setdefault(file, []).append(manifest)
    return named


def _committed_parents(found: Survey) -> dict[BoundaryId, int]:
    """Checkpoints that generations started from, each with the number of one of them."""
    parents = {number: found.generations[number].parent for number in sorted(found.generations)}
    return {p.at: number for number, p in parents.items() if p is not None and p.committed}
