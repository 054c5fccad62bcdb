"""Keeps track of the frozen files on tiers: which are there, and which must not be trusted."""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.agent.journal import Journal
from surefoot.core.frozen import FrozenFile, unnamed
from surefoot.core.layout import FROZEN, frozen_key, parse_frozen, quarantine_key
from surefoot.core.manifest import Manifest
from surefoot.errors import ObjectMissingError, TierError
from surefoot.host.clock import boot_s, wall_s
from surefoot.records.records import Records
from surefoot.tiers.base import Tier


class FrozenFiles:
    """The run's frozen files, on its own URI and as copies on local drives."""

    def __init__(self, records: Records, disks: Tier | None, journal: Journal) -> None:
        self._records = records
        self._disks = disks
        self._journal = journal
        self._durable: set[FrozenFile] = set()
        """Found on the run's URI; only this agent deletes them."""
        self._held: set[str] = set()
        """Hashes that trainers of this launch announced."""
        self._unnamed_since_s: dict[str, float] = {}

    @property
    def tiers(self) -> list[Tier]:
        """The tiers that should have every frozen file, the authority first."""
        return [self._records.tier, *([self._disks] if self._disks is not None else [])]

    @property
    def near(self) -> list[Tier]:
        """The tiers from which a frozen file is read, the nearest first."""
        return self.tiers[::-1]

    def is_authority(self, tier: Tier) -> bool:
        return tier is self._records.tier

    def hold(self, file: FrozenFile) -> None:
        """Keep a file that a trainer works with: it must not be deleted, whether a checkpoint names it yet or not."""
        self._held.add(file.xxh3_128)

    async def is_durable(self, file: FrozenFile) -> bool:
        """True if the run's URI has it, and nothing is known against it.

        Raises:
            TierError: the tier does not answer.
        """
        if file not in self._durable and await self.is_on(self._records.tier, file):
            self._durable.add(file)
        return file in self._durable

    async def is_on(self, tier: Tier, file: FrozenFile) -> bool:
        """True if a tier has it with the right size, and nothing is known against it."""
        try:
            if await tier.size(file.key) != file.size_bytes:
                return False
        except ObjectMissingError:
            return False
        return not (self.is_authority(tier) and await self._is_quarantined(file))

    async def saved(self, tier: Tier, file: FrozenFile) -> None:
        """Note that a file was written anew to a tier: an earlier quarantine is lifted."""
        if self.is_authority(tier):
            if await self._is_quarantined(file):
                await tier.delete([quarantine_key(file.key)])
            self._durable.add(file)

    async def refuse(self, tier: Tier, file: FrozenFile, why: str) -> None:
        """Report a bad copy, and make sure that it is not trusted again."""
        kind = tier.name if self.is_authority(tier) else "disk copy"
        self._journal.record("quarantined", object=file.key, tier=kind, why=why)
        if self.is_authority(tier):
            self._durable.discard(file)
            await self._records.quarantine(file.key, why, wall_s())
            return
        try:
            await tier.delete([file.key])
        except TierError as error:
            self._journal.record("warning", what=f"a bad copy could not be removed: {error}")

    async def _is_quarantined(self, file: FrozenFile) -> bool:
        try:
            await self._records.tier.size(quarantine_key(file.key))
        except ObjectMissingError:
            return False
        return True

    # ------------------------------------------------------------------ retention

    async def sweep(self, manifests: Iterable[Manifest], delay_s: float) -> int:
        """Delete files that no checkpoint has named and no trainer has held for a while; returns the bytes.

        Args:
            manifests: all that may still be restored, and those that were given up and are not deleted yet.
            delay_s: how long an object must have been unnamed.

        Raises:
            TierError: a tier failed.
        """
        listed = await self._records.tier.list(FROZEN)
        present = {entry.key: found for entry in listed if (found := parse_frozen(entry.key)) is not None}
        going = unnamed(present.values(), manifests, self._held)
        now_s = boot_s()
        self._unnamed_since_s = {each: self._unnamed_since_s.get(each, now_s) for each in going}
        due = {each for each, since_s in self._unnamed_since_s.items() if now_s - since_s >= delay_s}
        if not due:
            return 0
        self._durable = {file for file in self._durable if file.xxh3_128 not in due}
        if self._disks is not None:
            await self._disks.delete([frozen_key(each) for each in sorted(due)])
        await self._records.tier.delete([key for key, found in present.items() if found in due])
        return sum(entry.size_bytes for entry in listed if present.get(entry.key) in due)
