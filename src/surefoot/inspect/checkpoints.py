"""Lists the checkpoints of a run, the places where they are, and the one that a user means by a step."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.core.layout import STEPS, BoundaryId
from surefoot.core.manifest import Manifest
from surefoot.errors import ConfigError
from surefoot.inspect.frozen import needed_files
from surefoot.inspect.survey import Survey, quarantine_reason
from surefoot.tiers.base import Tier

State = Literal["live", "damaged", "quarantined", "retired", "deleted", "uncommitted"]
"""`damaged`: the manifest is not whole. `retired`: given up, its shards may still be there. `deleted`: they are gone.
`uncommitted`: shards without a manifest, which nothing will ever load."""

_SELECTOR = re.compile(r"([0-9]{1,19})(?:-g([0-9]{1,19}))?")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One line of `surefoot ls`. Fields that a damaged or missing manifest would give are None."""

    at: BoundaryId
    state: State
    trigger: str | None = None
    tag: str | None = None
    metrics: Mapping[str, Any] | None = None
    tiers: tuple[str, ...] = ()
    """Where every shard is, with the right size."""
    size_bytes: int | None = None
    world_size: int | None = None
    created: float | None = None
    """Seconds since the epoch."""
    verified: bool = False
    """Manifest whole, plan and frozen files there, and every shard there with the right size on some tier."""
    on_lineage: bool | None = None
    """None: the lineage is not known, because a generation's record is damaged."""
    frozen_bytes: int = 0
    """Of the frozen files that it names. Others may name them too: they are not part of its size."""

    def to_json(self) -> dict[str, Any]:
        return {
            **self.at.to_json(),
            "trigger": self.trigger,
            "tiers": list(self.tiers),
            "bytes": self.size_bytes,
            "frozen_bytes": self.frozen_bytes,
            "world_size": self.world_size,
            "time": self.created,
            "verified": self.verified,
            "tag": self.tag,
            "metrics": None if self.metrics is None else dict(self.metrics),
            "on_lineage": self.on_lineage,
            "state": self.state,
        }


async def copies_on(disks: Tier | None) -> dict[str, int]:
    """Sizes of the shards that lie on local drives, by key.

    Raises:
        TierError: a drive does not answer.
    """
    return {} if disks is None else {entry.key: entry.size_bytes for entry in await disks.list(STEPS)}


def checkpoints(found: Survey, copies: Mapping[str, int]) -> list[Checkpoint]:
    """Everything that is, was or might have become a checkpoint, newest first."""
    rows = [_row(found, copies, at) for at in found.commits]
    rows += [
        Checkpoint(at, "uncommitted", size_bytes=size_bytes, on_lineage=found.on_lineage(at))
        for at, size_bytes in found.attempts().items()
        if at not in found.commits
    ]
    return sorted(rows, key=lambda row: row.at, reverse=True)


def usable(rows: list[Checkpoint]) -> list[Checkpoint]:
    """Those that count: on the lineage (or it is not known), not given up, not quarantined."""
    return [row for row in rows if row.state in ("live", "damaged") and row.on_lineage is not False]


def parse_selector(text: str) -> BoundaryId | int:
    """What a person means by `1200` or `00001200-g0007`.

    Raises:
        ConfigError: neither of them.
    """
    match = _SELECTOR.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a step: write 1200, or 00001200-g0007, its full name")
    number = int(match[1])
    return number if match[2] is None else BoundaryId(number, int(match[2]))


def resolve(found: Survey, wanted: BoundaryId | int) -> BoundaryId:
    """The checkpoint that is meant, among those with a manifest: of several of one step the newest on the lineage.

    Raises:
        ConfigError: there is none, or several and none of them is on the lineage.
    """
    if isinstance(wanted, BoundaryId):
        if wanted not in found.commits:
            raise ConfigError(f"{found.uri} has no checkpoint {wanted}: `surefoot ls` shows those there are")
        return wanted
    # Without a manifest a step is not known: there the boundary's number, mostly the same, is all there is.
    unread = found.commits - found.manifests.keys()
    there = sorted(at for at in {*found.manifests, *unread} if wanted == (at.boundary if at.step is None else at.step))
    if not there:
        raise ConfigError(f"{found.uri} has no checkpoint of step {wanted}: `surefoot ls` shows those there are")
    counting = [at for at in there if found.on_lineage(at)]
    if len(there) > 1 and not counting:
        names = " and ".join(str(at) for at in there)
        raise ConfigError(f"step {wanted} is there as {names}, none of them on the lineage: name the one you mean")
    return max(counting, default=there[0])


def _row(found: Survey, copies: Mapping[str, int], at: BoundaryId) -> Checkpoint:
    on_lineage = found.on_lineage(at)
    manifest = found.manifests.get(at)
    if manifest is None:
        return Checkpoint(at, "damaged" if at in found.damaged else "deleted", on_lineage=on_lineage)
    frozen = needed_files(manifest)
    there = all(found.frozen.get(file.key) == file.size_bytes for file in frozen)
    places = [("disk", copies), (found.tier, found.sizes)]
    tiers = tuple(dict.fromkeys(name for name, sizes in places if _whole(manifest, sizes)))
    return Checkpoint(
        manifest.at,
        _state(found, manifest),
        manifest.trigger,
        manifest.tag,
        manifest.metrics,
        tiers,
        manifest.size_bytes,
        manifest.world_size,
        manifest.created,
        bool(tiers) and manifest.plan in found.plans and there,
        on_lineage,
        sum(file.size_bytes for file in frozen),
    )


def _state(found: Survey, manifest: Manifest) -> State:
    if manifest.retired is not None:
        return "retired"
    return "live" if quarantine_reason(found, manifest) is None else "quarantined"


def _whole(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(shard.key) == shard.size_bytes for shard in manifest.shards)
