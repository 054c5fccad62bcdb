"""The observer: sees every effect at once, knows what really happened, and says when an invariant does not hold.

It keeps its own idea of the lineage, written apart from the core's.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from math import inf

from sim_kernel import Violation
from sim_node import Node, Segment, Slot, history_of, image_bytes
from sim_store import Store

from surefoot.core.layout import (
    COMMITS,
    STEPS,
    BoundaryId,
    commit_key,
    generation_key,
    parse_ack,
    parse_commit,
    parse_generation,
    parse_shard,
)
from surefoot.core.manifest import Generation, Manifest, Shard, is_tombstone
from surefoot.core.recovery import Copy
from surefoot.errors import CorruptError


@lru_cache(maxsize=512)
def read_manifest(data: bytes, key: str) -> Manifest | None:
    """A manifest; None for a tombstone."""
    return None if is_tombstone(data, key) else Manifest.from_bytes(data, key)


@lru_cache(maxsize=512)
def read_generation(data: bytes, key: str) -> Generation:
    return Generation.from_bytes(data, key)


@lru_cache(maxsize=8192)
def read_ack(data: bytes, key: str) -> Shard:
    return Shard.from_ack(data, key)


class Truth:
    """What really happened."""

    def __init__(self, store: Store, nodes: list[Node]) -> None:
        self._store = store
        self._nodes = nodes
        self.generations: dict[int, Generation] = {}
        self._history: dict[BoundaryId, str] = {}
        """What the state of a step really was."""
        self._sealed: dict[tuple[BoundaryId, str], set[int]] = {}
        self._world: dict[int, int] = {}
        self.common: dict[int, int] = {}
        """By generation, the newest step that all its ranks have sealed under one plan."""
        self._floor: dict[Generation, int] = {}
        self._finished: dict[tuple[int, int], set[int]] = {}
        self.finished_on_all: dict[int, int] = {}
        self.lag = 0
        """Greatest number of steps by which memory was behind what any rank had finished."""
        store.watch = self._changed

    # ------------------------------------------------------------------ lineage, once more

    def chain(self) -> dict[int, float]:
        found: dict[int, float] = {}
        number, cut = max(self.generations, default=0), inf
        while number:
            found[number] = cut
            parent = self.generations[number].parent
            if parent is None:
                break
            cut, number = min(cut, parent.boundary), parent.generation
        return found

    def on_lineage(self, at: BoundaryId) -> bool:
        return at.boundary <= self.chain().get(at.generation, -1)

    # ------------------------------------------------------------------ durable checkpoints

    def checkpoints(self, *, right: bool = True) -> dict[BoundaryId, Manifest]:
        """Those on the lineage whose shards are all there (and right)."""
        chain, found = self.chain(), {}
        for key in self._store.keys(COMMITS):
            at = parse_commit(key)
            assert at is not None
            if at.boundary <= chain.get(at.generation, -1):
                manifest = read_manifest(self._store.peek(key) or b"", key)
                good = self._is_good if right else self._is_there
                if manifest is not None and manifest.retired is None and good(manifest):
                    found[at] = manifest
        return found

    def newest_durable(self) -> int:
        return max((at.boundary for at in self.checkpoints()), default=0)

    def _is_good(self, manifest: Manifest) -> bool:
        return all(self._store.peek(shard.key) == self._image(shard) for shard in manifest.shards)

    def _is_there(self, manifest: Manifest) -> bool:
        return all(self._store.peek(shard.key) is not None for shard in manifest.shards)

    def _image(self, shard: Shard) -> bytes:
        return image_bytes(shard.plan, shard.id.rank, shard.id.at, self._history.get(shard.id.at, "?"))

    # ------------------------------------------------------------------ what the store sees

    def _changed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        if parse_generation(key) is not None:
            self._check(before is None and after is not None, f"{key} was changed")
            self._begun(read_generation(after or b"", key))
        elif parse_commit(key) is not None:
            self._committed(key, before, after)
        elif after is None and (parse_shard(key) or parse_ack(key)):
            self._deleted(key)

    def _begun(self, generation: Generation) -> None:
        number = generation.number
        self._check(number == len(self.generations) + 1, f"generation {number} has no predecessor")
        parent = generation.parent
        if parent is not None:
            at = BoundaryId(parent.boundary, parent.generation)
            self._check(self.on_lineage(at), f"generation {number} stands on {at}, which does not count")
            self._check(at in self._history, f"generation {number} stands on {at}, which never was")
        floor = self._floor.get(generation, 0)
        step = 0 if parent is None else parent.boundary
        self._check(step >= floor, f"generation {number} goes back to step {step}, though {floor} could be had")
        self.generations[number] = generation
        self._world[number] = generation.world_size
        self.common[number] = step

    def could_be_had(self, members: Collection[Node]) -> int:
        """The newest step that is durable or whole in the memory of these nodes, now."""
        chain = self.chain()
        held: dict[tuple[BoundaryId, str, int], set[int]] = {}
        for other in members:
            for segment, slot in other.sealed_slots():
                at = slot.at
                if at.boundary <= chain.get(at.generation, -1) and slot.data() == self._of(segment, at):
                    held.setdefault((at, segment.plan, segment.world_size), set()).add(segment.rank)
        whole = [at.boundary for (at, _plan, size), ranks in held.items() if len(ranks) == size]
        return max([self.newest_durable(), *whole])

    def decides(self, generation: Generation, floor: int) -> None:
        """A record is about to be put; its step must not be below what could be had when it was chosen."""
        self._floor[generation] = floor

    def _of(self, segment: Segment, at: BoundaryId) -> bytes:
        return image_bytes(segment.plan, segment.rank, at, self._history.get(at, "?"))

    def _committed(self, key: str, before: bytes | None, after: bytes | None) -> None:
        self._check(after is not None, f"{key} was deleted")
        try:
            manifest = read_manifest(after or b"", key)
        except CorruptError as error:
            raise Violation(f"a manifest that nobody can read: {error}") from error
        if before is None:
            if manifest is not None:
                self._visible(manifest)
            return
        was = read_manifest(before, key)
        if was is not None and manifest is not None and manifest.retired is not None:
            self._retired(was)
        else:
            self._check(manifest is None and (was is None or was.retired is not None), f"{key} was changed")

    def _visible(self, manifest: Manifest) -> None:
        at = manifest.at
        self._check(at.generation in self.generations, f"{at} is of a generation without a record")
        self._check(len({shard.plan for shard in manifest.shards}) == 1, f"{at} is mixed of several plans")
        size = self._world[at.generation]
        ranks = [shard.id.rank for shard in manifest.shards]
        self._check(ranks == list(range(size)), f"{at} has ranks {ranks} of {size}")
        self._check(manifest.launch == self.generations[at.generation].launch, f"{at} names a foreign launch")
        for shard in manifest.shards:
            self._check(self._store.peek(shard.key) == self._image(shard), f"{at} is torn: {shard.key}")

    def _retired(self, was: Manifest) -> None:
        # By what can be known without reading it all: a bit that flipped unseen is nobody's fault here.
        after = set(self.checkpoints(right=False))
        before = after | ({was.at} if self._is_there(was) and self.on_lineage(was.at) else set())
        self._check(max(before, default=None) == max(after, default=None), f"{was.at}, the newest, was given up")
        self._check(len(after) >= min(2, len(before)), f"{was.at} was given up, {len(after)} are left")
        newest = self.generations[max(self.generations)]
        if newest.parent is not None and not any(at.generation == newest.number for at in before):
            stands_on = max((at for at in before if at.boundary <= newest.parent.boundary), default=None)
            self._check(was.at != stands_on, f"{was.at} was given up, and the newest generation stands on it")

    def _deleted(self, key: str) -> None:
        piece = parse_shard(key)
        if piece is None:
            return
        commit = self._store.peek(commit_key(piece.at))
        manifest = read_manifest(commit, commit_key(piece.at)) if commit is not None else None
        named = manifest is not None and manifest.retired is None and any(s.key == key for s in manifest.shards)
        self._check(not named, f"{key} was deleted, and {piece.at} names it")

    # ------------------------------------------------------------------ what memory sees

    def begins_slot(self, segment: Segment, slot: Slot, generation: int) -> None:
        """A slot is about to be overwritten."""
        self._check(not slot.readers, f"the slot of {slot.at}, rank {segment.rank}, is overwritten while it is sent")
        if not slot.sealed:
            return
        at, common = slot.at, self.common[generation]
        parent = self.generations[generation].parent
        if at.generation == generation:
            needed = at.boundary >= common
        else:
            needed = parent is not None and (parent.boundary, parent.generation) == (at.boundary, at.generation)
            needed = needed and common <= at.boundary
        self._check(not needed, f"{at} of rank {segment.rank} is overwritten, and {common} is the newest of all")

    def voids(self, segment: Segment, slot: Slot, generation: int) -> None:
        """A slot is emptied, because a generation does not continue it."""
        self._check(not slot.readers, f"the slot of {slot.at} is emptied while it is sent")
        parent = self.generations[generation].parent
        chosen = parent is not None and slot.at == BoundaryId(parent.boundary, parent.generation)
        self._check(
            not chosen
            or segment.world_size != self._parent_world(generation)
            or self.common[generation] > slot.at.boundary,
            f"{slot.at} of rank {segment.rank} is emptied, and generation {generation} stands on it",
        )

    def _parent_world(self, generation: int) -> int:
        parent = self.generations[generation].parent
        return 0 if parent is None else self._world[parent.generation]

    def seals(self, segment: Segment, slot: Slot) -> None:
        at = slot.at
        self._check(slot.data() == self._of(segment, at), f"{at} of rank {segment.rank} is sealed with other bytes")
        ranks = self._sealed.setdefault((at, segment.plan), set())
        ranks.add(segment.rank)
        if len(ranks) == self._world[at.generation] and segment.world_size == len(ranks):
            self.common[at.generation] = max(self.common[at.generation], at.boundary)

    # ------------------------------------------------------------------ what trainers do

    def loaded(self, generation: int, rank: int, history: str, start: BoundaryId | None) -> None:
        """A trainer is about to train from what it has loaded."""
        record = self.generations.get(generation)
        self._check(record is not None, f"rank {rank} trains in generation {generation}, which has no record")
        assert record is not None
        parent = None if record.parent is None else BoundaryId(record.parent.boundary, record.parent.generation)
        self._check(start == parent, f"rank {rank} starts from {start}, generation {generation} from {parent}")
        expected = "" if parent is None else self._history[parent]
        self._check(history == expected, f"rank {rank} loaded {history!r}, which is not {expected!r} of {parent}")

    def read(self, copy: Copy, data: bytes) -> None:
        """A trainer believes these bytes."""
        right = image_bytes(copy.plan, copy.rank, copy.at, self._history.get(copy.at, "?"))
        self._check(data == right, f"rank {copy.rank} of {copy.at} was loaded from {copy.node} with wrong bytes")

    def trains(self, generation: int, rank: int, step: int, history: str, bound: int | None) -> None:
        """One rank's optimizer has run. With `bound`, memory may be that many steps behind, at most."""
        at = BoundaryId(step, generation)
        self._check(generation in self.generations, f"{at}: rank {rank} trained before its generation was recorded")
        self._check(self._history.setdefault(at, history) == history, f"{at}: ranks differ")
        if generation != max(self.generations):
            self._check(not self.on_lineage(at), f"{at}: an old generation makes progress that counts")
        behind = step - self.common[generation]
        self.lag = max(self.lag, behind)
        self._check(bound is None or behind <= bound, f"{at}: rank {rank} finished it, memory holds {step - behind}")
        self._finished.setdefault((generation, step), set()).add(rank)
        if len(self._finished[(generation, step)]) == self._world[generation]:
            self._finished.pop((generation, step - 1), None)
            self.finished_on_all[generation] = step

    def finished(self) -> int:
        """Newest step that all ranks of the newest generation had finished."""
        number = max(self.generations, default=0)
        return self.finished_on_all.get(number, 0)

    # ------------------------------------------------------------------ the end

    def check_all(self) -> None:
        """Everything visible, once more: whole, of one plan, all bytes right, unless given up or damaged on purpose."""
        for key in self._store.keys(STEPS):
            assert parse_shard(key) or parse_ack(key), key
        for number in range(1, len(self.generations) + 1):
            self._check(self._store.peek(generation_key(number)) is not None, f"generation {number} is gone")

    def _check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)


__all__ = ["Truth", "history_of", "read_ack", "read_generation", "read_manifest"]
