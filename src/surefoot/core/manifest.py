"""Defines the documents beside the shards: run record, generation records, acknowledgements, manifests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from surefoot.core.block_sums import BlockSums
from surefoot.core.documents import Fields, seal, unseal
from surefoot.core.layout import (
    BoundaryId,
    ShardId,
    ack_key,
    commit_key,
    generation_key,
    parse_plan,
    parse_shard,
    plan_key,
    shard_key,
)
from surefoot.errors import CorruptError

Trigger = Literal["periodic", "emergency", "manual", "final", "agent"]
"""Why a checkpoint was taken. `agent`: the node agent shipped the newest sealed image without a boundary."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """`run.json`: put once, by the first start of the run."""

    run: str
    created: float

    def to_bytes(self) -> bytes:
        return seal({"run": self.run, "created": self.created})

    @classmethod
    def from_bytes(cls, data: bytes) -> RunRecord:
        fields = Fields(unseal(data, "run.json"), "run.json")
        run = fields.text("run")
        if not (run.isascii() and run.isalnum() and 8 <= len(run) <= 64):
            raise CorruptError(f"run.json: run id {run!r} is not 8 to 64 letters and digits")
        return cls(run, fields.number("created"))


@dataclass(frozen=True, slots=True)
class Parent:
    """The image that a generation started from."""

    generation: int
    boundary: int
    committed: bool
    """False: it came from shared memory only."""
    step: int | None = None
    """Label, see `BoundaryId`."""

    @property
    def at(self) -> BoundaryId:
        return BoundaryId(self.boundary, self.generation, self.step)

    def to_json(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            "boundary": self.boundary,
            "committed": self.committed,
            "step": self.step,
        }

    @classmethod
    def from_json(cls, data: Any, what: str) -> Parent:
        fields = Fields(data, what)
        return cls(
            fields.integer("generation", 1),
            fields.integer("boundary"),
            fields.flag("committed"),
            fields.optional_integer("step"),
        )


@dataclass(frozen=True, slots=True)
class Generation:
    """`generations/gNNNN.json`: put if absent BEFORE any trainer of the generation trains."""

    number: int
    launch: str
    """Identity of the `surefoot run` (or plain start) that made it; restarts inside one launch share it."""
    parent: Parent | None
    """None: from scratch; cuts off everything older."""
    world_size: int
    node: str
    created: float
    launches: tuple[str, ...] = ()
    """On several machines each start is a launch of its own: those of all of them, `launch` being that of rank 0's."""

    @property
    def key(self) -> str:
        return generation_key(self.number)

    def is_of(self, launches: Collection[str]) -> bool:
        """True if one of these made it: machines come and go, but a job goes on with some that it had."""
        return not {self.launch, *self.launches}.isdisjoint(launches)

    @property
    def owner(self) -> str:
        """The owner of the generation, for a message to the launch that had the run before."""
        return f"generation {self.number} of launch {self.launch} on {self.node}"

    def same_job(self, other: Generation) -> bool:
        """True if this one and another are of one job."""
        return self.is_of({other.launch, *other.launches})

    def to_bytes(self) -> bytes:
        return seal(
            {
                "generation": self.number,
                "launch": self.launch,
                "parent": self.parent and self.parent.to_json(),
                "world_size": self.world_size,
                "node": self.node,
                "created": self.created,
                **({"launches": list(self.launches)} if self.launches else {}),
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Generation:
        fields = Fields(unseal(data, what), what)
        number = fields.integer("generation", minimum=1)
        if generation_key(number) != what:
            raise CorruptError(f"{what}: holds the record of generation {number}")
        parent = _optional_parent(fields, what)
        if parent is not None and parent.generation >= number:
            raise CorruptError(f"{what}: generation {number} names generation {parent.generation} as its parent")
        launches = fields.items("launches") if "launches" in fields.body else []
        if any(type(launch) is not str for launch in launches):
            raise CorruptError(f"{what}: launches are {launches!r}")
        return cls(
            number,
            fields.text("launch"),
            parent,
            fields.integer("world_size", 1),
            fields.text("node"),
            fields.number("created"),
            tuple(launches),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's image as it lies on a tier, with the rank's record: its typed plain values and their setting."""

    id: ShardId
    plan: str
    size_bytes: int
    xxh3_128: str
    record: Mapping[str, Any]
    blocks: BlockSums | None = None
    """None: nothing of it can be verified without the whole."""

    @property
    def key(self) -> str:
        return shard_key(self.id)

    @property
    def ack(self) -> str:
        return ack_key(self.id)

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.id.rank,
            "attempt": self.id.attempt,
            "path": self.key,
            "size_bytes": self.size_bytes,
            "xxh3_128": self.xxh3_128,
            **({} if self.blocks is None else {"blocks": self.blocks.to_json()}),
            "record": dict(self.record),
        }

    @classmethod
    def from_json(cls, data: Any, at: BoundaryId, plan: str, what: str) -> Shard:
        fields = Fields(data, what)
        shard_id = ShardId(at, fields.integer("rank"), fields.text("attempt"))
        size_bytes, raw = fields.integer("size_bytes"), fields.optional_mapping("blocks")
        blocks = None if raw is None else BlockSums.from_json(raw, size_bytes, what)
        shard = cls(shard_id, plan, size_bytes, fields.text("xxh3_128"), fields.mapping("record"), blocks)
        if fields.text("path") != shard.key or parse_shard(shard.key) != shard_id:
            raise CorruptError(f"{what}: shard path {fields.text('path')!r} is not {shard.key!r}")
        return shard

    def ack_bytes(self) -> bytes:
        at = self.id.at
        return seal({**at.to_json(), "plan": self.plan, "shard": self.to_json()})

    @classmethod
    def from_ack(cls, data: bytes, what: str) -> Shard:
        fields = Fields(unseal(data, what), what)
        at = BoundaryId.of(fields)
        shard = cls.from_json(fields.raw("shard"), at, _plan_hash(fields, what), what)
        if shard.ack != what:
            raise CorruptError(f"{what}: holds the acknowledgement of {shard.key}")
        return shard


@dataclass(frozen=True, slots=True)
class Manifest:
    """`commits/<boundary>-g<generation>.json`: its existence is the checkpoint."""

    at: BoundaryId
    plan: str
    world_size: int
    trigger: Trigger
    tag: str | None
    metrics: Mapping[str, Any]
    launch: str
    parent: Parent | None
    created: float
    shards: tuple[Shard, ...]
    """One per rank, in rank order."""
    retired: float | None = None
    """Time at which retention gave it up; its shards may be gone. The key stays taken for ever."""

    @property
    def key(self) -> str:
        return commit_key(self.at)

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)

    def retire(self, now: float) -> Manifest:
        return replace(self, retired=now)

    def to_bytes(self) -> bytes:
        return seal(
            {
                **self.at.to_json(),
                "plan": self.plan,
                "world_size": self.world_size,
                "trigger": self.trigger,
                "tag": self.tag,
                "metrics": dict(self.metrics),
                "launch": self.launch,
                "parent": self.parent and self.parent.to_json(),
                "created": self.created,
                "retired": self.retired,
                "shards": [shard.to_json() for shard in self.shards],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Manifest:
        fields = Fields(unseal(data, what), what)
        at = BoundaryId.of(fields)
        if commit_key(at) != what:
            raise CorruptError(f"{what}: holds the manifest of {at}")
        plan = _plan_hash(fields, what)
        world_size = fields.integer("world_size", 1)
        shards = tuple(Shard.from_json(data, at, plan, what) for data in fields.items("shards"))
        if len(shards) != world_size or any(shard.id.rank != rank for rank, shard in enumerate(shards)):
            raise CorruptError(f"{what}: does not name one shard for each of {world_size} ranks")
        trigger = fields.text("trigger")
        if trigger not in get_args(Trigger):
            raise CorruptError(f"{what}: trigger {trigger!r} is unknown")
        return cls(
            at,
            plan,
            world_size,
            trigger,  # type: ignore[arg-type]
            fields.optional_text("tag"),
            fields.mapping("metrics"),
            fields.text("launch"),
            _optional_parent(fields, what),
            fields.number("created"),
            shards,
            None if fields.raw("retired") is None else fields.number("retired"),
        )


def tombstone_bytes(at: BoundaryId, now: float) -> bytes:
    """Retention puts this at the key of a manifest that was never written, so that none can be written later."""
    return seal({**at.to_json(), "tombstone": now})


def is_tombstone(data: bytes, what: str) -> bool:
    """True for a tombstone, False for anything else that is whole.

    Raises:
        CorruptError: it is not whole, or it is another boundary's tombstone.
    """
    body = unseal(data, what)
    if "tombstone" not in body:
        return False
    fields = Fields(body, what)
    at = BoundaryId.of(fields)
    if commit_key(at) != what:
        raise CorruptError(f"{what}: holds the tombstone of {at}")
    return True


def _optional_parent(fields: Fields, what: str) -> Parent | None:
    raw = fields.optional_mapping("parent")
    return None if raw is None else Parent.from_json(raw, what)


def _plan_hash(fields: Fields, what: str) -> str:
    # It becomes part of a key.
    plan = fields.text("plan")
    if parse_plan(plan_key(plan)) != plan:
        raise CorruptError(f"{what}: plan {plan!r} is not 32 hex digits")
    return plan
