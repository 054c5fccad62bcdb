"""Reads and writes a run's records on its own URI, the only authority on generations and commits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping

from surefoot.core.documents import seal, unseal
from surefoot.core.layout import (
    COMMITS,
    GENERATIONS,
    RUN_KEY,
    STEPS,
    BoundaryId,
    commit_key,
    generation_key,
    parse_ack,
    parse_commit,
    parse_generation,
    parse_shard,
    plan_key,
    quarantine_key,
)
from surefoot.core.manifest import Generation, Manifest, RunRecord, Shard, is_tombstone, tombstone_bytes
from surefoot.core.plan import Plan
from surefoot.errors import CorruptError, ObjectExistsError, ObjectMissingError, TierError
from surefoot.tiers.base import Tier

_READS_AT_ONCE = 16


class Records:
    """Reads and writes the small documents of one run. Caches what can never change."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self._generations: dict[int, Generation] = {}
        self._plans: dict[str, Plan] = {}
        self._reads = asyncio.Semaphore(_READS_AT_ONCE)

    async def find_run(self) -> RunRecord | None:
        """The run's record; None if the tier answered that there is no run here.

        Raises:
            CorruptError: the record is damaged, or it is gone while something of a run is there.
        """
        try:
            return RunRecord.from_bytes(await self.tier.get(RUN_KEY))
        except ObjectMissingError:
            for prefix in (GENERATIONS, COMMITS, STEPS):
                if await self.tier.list(prefix):
                    raise CorruptError(
                        f"{self.tier.uri} has {prefix} but no {RUN_KEY}: put that file back before going on"
                    ) from None
            return None

    async def open_run(self, now: float) -> RunRecord:
        """The run's record, made now if there is none. Of several launches that start at once, one's record stands."""
        found = await self.find_run()
        if found is not None:
            return found
        record = RunRecord(secrets.token_hex(8), now)
        try:
            await self.tier.put_if_absent(RUN_KEY, record.to_bytes())
        except ObjectExistsError:
            return RunRecord.from_bytes(await self.tier.get(RUN_KEY))
        return record

    async def generations(self) -> dict[int, Generation]:
        """Every generation record there is.

        Raises:
            CorruptError: one is damaged, or missing: numbers have no gaps, and none is ever deleted.
        """
        listed = await self.tier.list(GENERATIONS)
        numbers = sorted(number for entry in listed if (number := parse_generation(entry.key)) is not None)
        if lost := sorted({*range(1, max(numbers, default=0))} - {*numbers}):
            raise self._lost_record(lost[0], f"{generation_key(numbers[-1])} is")
        await asyncio.gather(*(self._read_generation(number) for number in numbers if number not in self._generations))
        return {number: self._generations[number] for number in numbers}

    async def generation(self, number: int) -> Generation:
        """One generation's record."""
        if number not in self._generations:
            await self._read_generation(number)
        return self._generations[number]

    async def check_records(self, generations: Mapping[int, Generation], steps: Iterable[BoundaryId]) -> None:
        """Check that every step's generation has its record: a number used again would revive steps given up under it.

        Raises:
            CorruptError: the record of a generation that saved something is missing.
            TierError: the record is there, but was not listed.
        """
        newest = max(generations, default=0)
        lost = next((at for at in steps if at.generation > newest), None)
        if lost is None:
            return
        if await self.newer_generation(newest) is not None:
            raise self.incomplete(generation_key(newest + 1))
        raise self._lost_record(newest + 1, f"step {lost} is")

    def incomplete(self, key: str) -> TierError:
        """The error for a tier that does not list an object that is there: nothing may be decided by its listings."""
        return TierError(
            f"{self.tier.uri} does not list {key}, though it is there: its listings are not complete; check the store, "
            "or the mount, and try again"
        )

    def _lost_record(self, number: int, later: str) -> CorruptError:
        return CorruptError(
            f"{self.tier.uri}: {generation_key(number)} is missing, though {later} there: without it surefoot cannot "
            "know which steps count; put that file back before going on"
        )

    async def newer_generation(self, than: int) -> Generation | None:
        """The generation after `than`, if there is one: numbers have no gaps."""
        try:
            data = await self.tier.get(generation_key(than + 1))
        except ObjectMissingError:
            return None
        return Generation.from_bytes(data, generation_key(than + 1))

    async def put_generation(self, generation: Generation) -> None:
        """Claim a generation's number.

        Raises:
            ObjectExistsError: another launch has it: read again and decide again.
        """
        await self._put_once(generation.key, generation.to_bytes())
        self._generations[generation.number] = generation

    async def commits(self) -> list[BoundaryId]:
        """Steps with a manifest or a tombstone, ascending."""
        listed = await self.tier.list(COMMITS)
        return sorted(at for entry in listed if (at := parse_commit(entry.key)) is not None)

    async def manifest(self, at: BoundaryId) -> Manifest | None:
        """A step's manifest; None for a tombstone.

        Raises:
            CorruptError: it is damaged.
            ObjectMissingError: there is none.
        """
        key = commit_key(at)
        async with self._reads:
            data = await self.tier.get(key)
        return None if is_tombstone(data, key) else Manifest.from_bytes(data, key)

    async def put_manifest(self, manifest: Manifest) -> Manifest | None:
        """Commit. Returns the manifest that stands; None for a tombstone: the step was given up before it was whole.

        Losing to another's manifest of the same step is as good as winning: shards are never overwritten.
        """
        try:
            await self.tier.put_if_absent(manifest.key, manifest.to_bytes())
        except ObjectExistsError:
            return await self.manifest(manifest.at)
        return manifest

    async def rewrite_manifest(self, manifest: Manifest) -> None:
        """Replace a manifest that stands (retention only)."""
        await self.tier.put(manifest.key, manifest.to_bytes())

    async def bury(self, at: BoundaryId, now: float) -> None:
        """Replace a retired manifest, whose shards are gone, by a tombstone: the key stays taken."""
        await self.tier.put(commit_key(at), tombstone_bytes(at, now))

    async def put_tombstone(self, at: BoundaryId, now: float) -> bool:
        """Take the key of a manifest that was never written. False if it was written after all."""
        try:
            await self.tier.put_if_absent(commit_key(at), tombstone_bytes(at, now))
        except ObjectExistsError:
            return await self.manifest(at) is None
        return True

    async def pieces(self) -> dict[BoundaryId, list[str]]:
        """Steps of which a shard or an acknowledgement is there, each with the keys of its acknowledgements."""
        found: dict[BoundaryId, list[str]] = {}
        for entry in await self.tier.list(STEPS):
            piece = parse_ack(entry.key) or parse_shard(entry.key)
            if piece is not None:
                acks = found.setdefault(piece.at, [])
                if parse_ack(entry.key) is not None:
                    acks.append(entry.key)
        return found

    async def acks(self, keys: Iterable[str]) -> list[Shard]:
        """Acknowledgements. Damaged ones do not count."""
        return [ack for ack in await asyncio.gather(*(self._read_ack(key) for key in keys)) if ack is not None]

    async def plan(self, plan_hash: str) -> Plan:
        """A plan object.

        Raises:
            CorruptError: it is damaged, or not the plan of that hash.
        """
        if plan_hash not in self._plans:
            key = plan_key(plan_hash)
            plan = Plan.from_body(unseal(await self.tier.get(key), key), key)
            if plan.hash != plan_hash:
                raise CorruptError(f"{key}: holds the plan {plan.hash}")
            self._plans[plan_hash] = plan
        return self._plans[plan_hash]

    async def put_plan(self, plan: Plan) -> None:
        """Make sure that the plan object is there and whole, BEFORE the first shard that follows it."""
        if plan.hash in self._plans:
            return
        key, data = plan_key(plan.hash), seal(plan.body)
        try:
            await self._put_once(key, data)
        except ObjectExistsError:
            # Its name is its hash, so other bytes there are damaged, and every step under this plan needs good ones.
            await self.tier.put(key, data)
        self._plans[plan.hash] = plan

    async def quarantine(self, key: str, why: str, now: float) -> None:
        """Note that an object must not be used again."""
        await self.tier.put(quarantine_key(key), seal({"object": key, "why": why, "time": now}))

    async def _put_once(self, key: str, data: bytes) -> None:
        try:
            await self.tier.put_if_absent(key, data)
        except ObjectExistsError:
            # An earlier attempt whose answer was lost may have succeeded.
            if await self.tier.get(key) != data:
                raise

    async def _read_generation(self, number: int) -> None:
        key = generation_key(number)
        async with self._reads:
            self._generations[number] = Generation.from_bytes(await self.tier.get(key), key)

    async def _read_ack(self, key: str) -> Shard | None:
        try:
            async with self._reads:
                return Shard.from_ack(await self.tier.get(key), key)
        except (CorruptError, ObjectMissingError):
            return None
