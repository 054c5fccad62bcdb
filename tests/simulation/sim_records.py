"""The agent's dealings with the store: records, commits, retention; in the order in which the real ones write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from sim_kernel import Batch, Request, Sleep, Steps
from sim_node import Node
from sim_truth import read_ack, read_generation, read_manifest

from surefoot.core.commit import make_manifest
from surefoot.core.documents import seal
from surefoot.core.layout import (
    COMMITS,
    GENERATIONS,
    STEPS,
    BoundaryId,
    boundary_prefix,
    commit_key,
    generation_key,
    parse_ack,
    parse_commit,
    parse_generation,
    parse_shard,
    plan_key,
)
from surefoot.core.manifest import Generation, Manifest, Shard, tombstone_bytes
from surefoot.errors import ObjectExistsError, ObjectMissingError, SupersededError, TierError

if TYPE_CHECKING:
    from sim_world import World

_TRUST_S = 5.0


class Records:
    """One agent's view of the store. Caches what can never change."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._store = world.store
        self._plans: set[str] = set()
        self._acks: dict[str, Shard] = {}
        self._verified: set[BoundaryId] = set()
        self._read_s = -_TRUST_S
        self._kept_s = -1e9

    # ------------------------------------------------------------------ requests, tried again

    def ask(self, request: Request) -> Steps:
        while True:
            try:
                return (yield request)
            except (ObjectMissingError, ObjectExistsError):
                raise
            except TierError:
                yield Sleep(0.5)

    def ask_all(self, requests: Sequence[Request]) -> Steps:
        """Answers of several; None where the object is not there."""
        answers: list[Any] = [TierError()] * len(requests)
        while failed := [n for n, a in enumerate(answers) if isinstance(a, TierError)]:
            got = yield Batch([requests[n] for n in failed])
            for number, answer in zip(failed, got, strict=True):
                answers[number] = None if isinstance(answer, ObjectMissingError) else answer
        return answers

    def put(self, key: str, data: bytes) -> Steps:
        yield from self.ask(self._store.put(key, data))

    def delete(self, key: str) -> Steps:
        yield from self.ask(self._store.delete(key))

    def put_once(self, key: str, data: bytes) -> Steps:
        """True if `data` stands at the key: an earlier try whose answer was lost may have gone through."""
        try:
            yield from self.ask(self._store.put_if_absent(key, data))
        except ObjectExistsError:
            standing = yield from self.ask(self._store.get(key))
            return standing == data
        return True

    def put_plan(self, plan: str) -> Steps:
        if plan not in self._plans:
            yield from self.put_once(plan_key(plan), seal({"plan": plan}))
            self._plans.add(plan)

    # ------------------------------------------------------------------ records

    def generation(self, number: int) -> Steps:
        key = generation_key(number)
        try:
            data = yield from self.ask(self._store.get(key))
        except ObjectMissingError:
            return None
        return read_generation(data, key)

    def generations(self) -> Steps:
        listed = yield from self.ask(self._store.list(GENERATIONS))
        numbers = sorted(number for key in listed if (number := parse_generation(key)) is not None)
        data = yield from self.ask_all([self._store.get(generation_key(number)) for number in numbers])
        return {n: read_generation(d, generation_key(n)) for n, d in zip(numbers, data, strict=True)}

    def manifests(self, ats: Sequence[BoundaryId]) -> Steps:
        """Those that stand at the keys of these steps: no tombstones; given-up ones are among them."""
        data = yield from self.ask_all([self._store.get(commit_key(at)) for at in ats])
        return [m for at, d in zip(ats, data, strict=True) if d and (m := read_manifest(d, commit_key(at))) is not None]

    def commits(self) -> Steps:
        listed = yield from self.ask(self._store.list(COMMITS))
        return sorted(at for key in listed if (at := parse_commit(key)) is not None)

    # ------------------------------------------------------------------ committing

    def complete(self, at: BoundaryId) -> Steps:
        """The complete set of a step's acknowledgements, its shards being there; None if there is none."""
        listed = yield from self.ask(self._store.list(boundary_prefix(at)))
        acks = yield from self.read_acks([key for key in listed if parse_ack(key) is not None])
        shards = self._world.policy.complete_set(acks, at)
        if shards is None:
            return None
        sizes = yield from self.ask_all([self._store.size(shard.key) for shard in shards])
        return shards if sizes == [shard.size_bytes for shard in shards] else None

    def read_acks(self, keys: Sequence[str]) -> Steps:
        new = [key for key in keys if key not in self._acks]
        data = yield from self.ask_all([self._store.get(key) for key in new])
        self._acks.update({k: read_ack(d, k) for k, d in zip(new, data, strict=True) if d is not None})
        return [self._acks[key] for key in keys if key in self._acks]

    def commit(self, at: BoundaryId) -> Steps:
        """Commit a step if it is complete. Returns the manifest that stands, or None if there is none.

        Raises:
            SupersededError: a newer launch owns the run.
        """
        shards = yield from self.complete(at)
        if shards is None:
            # It may never be: whoever took the run over may have deleted what is missing.
            yield from self.refuse_if_superseded()
            return (yield from self._standing(at))
        yield from self.refuse_if_superseded()
        record = yield from self.generation(at.generation)
        manifest = make_manifest(shards, record, self._node.wall_s(self._world.kernel.now))
        yield from self.put_once(manifest.key, manifest.to_bytes())
        standing = yield from self._standing(at)
        yield from self.refuse_if_superseded()
        return standing

    def _standing(self, at: BoundaryId) -> Steps:
        found = yield from self.manifests([at])
        return found[0] if found else None

    def refuse_if_superseded(self) -> Steps:
        generations = yield from self.generations()
        if (newer := self._world.policy.superseding(generations, [self._node.launch])) is not None:
            raise SupersededError(f"generation {newer.number}")

    # ------------------------------------------------------------------ retention

    def keep(self, manifest: Manifest) -> Steps:
        """A round of retention, now and then."""
        del manifest
        now_s = self._node.boot_s(self._world.kernel.now)
        if now_s - self._kept_s < self._world.setting.keep_every_s:
            return
        self._kept_s = now_s
        commits = yield from self.commits()
        known = yield from self.manifests(commits)
        generations = yield from self.generations()
        if not (yield from self._still_newest(generations)):
            return
        policy = self._world.policy
        chain = policy.cuts(generations)
        live = sorted((m for m in known if m.retired is None), key=lambda m: m.at, reverse=True)
        for of in live[: 2 + len(chain)]:
            yield from self._verify(of)
        yield from self._sweep(known, generations)
        for at in policy.to_retire(known, chain, generations, self._verified):
            if not (yield from self._still_newest(generations)):
                return
            standing = next(m for m in known if m.at == at)
            retired = standing.retire(self._node.wall_s(self._world.kernel.now))
            yield from self.put(commit_key(at), retired.to_bytes())
        yield from self._sweep_abandoned(commits, generations, known)

    def _verify(self, manifest: Manifest) -> Steps:
        if manifest.at not in self._verified:
            sizes = yield from self.ask_all([self._store.size(shard.key) for shard in manifest.shards])
            if sizes == [shard.size_bytes for shard in manifest.shards]:
                self._verified.add(manifest.at)

    def _sweep(self, known: Sequence[Manifest], generations: dict[int, Generation]) -> Steps:
        now_s = self._node.wall_s(self._world.kernel.now)
        for manifest in self._world.policy.to_sweep(known, now_s, self._world.setting.sweep_s):
            if not (yield from self._still_newest(generations)):
                return
            yield from self._delete_under(manifest.at)
            yield from self.put(commit_key(manifest.at), tombstone_bytes(manifest.at, now_s))

    def _sweep_abandoned(
        self, commits: Collection[BoundaryId], generations: dict[int, Generation], known: Sequence[Manifest]
    ) -> Steps:
        listed = yield from self.ask(self._store.list(STEPS))
        steps = {piece.at for key in listed if (piece := parse_shard(key) or parse_ack(key)) is not None}
        good = sorted(self._verified & {m.at for m in known if m.retired is None})
        chain = self._world.policy.cuts(generations)
        bound = good[0] if good else None
        for at in self._world.policy.abandoned_steps(steps, commits, chain, max(generations), bound):
            if not (yield from self._still_newest(generations)):
                return
            if self._world.policy.tombstone_first:
                stone = tombstone_bytes(at, self._node.wall_s(self._world.kernel.now))
                mine = yield from self.put_once(commit_key(at), stone)
                if not mine and (yield from self._standing(at)) is not None:
                    continue
            yield from self._delete_under(at)

    def _delete_under(self, at: BoundaryId) -> Steps:
        for key in (yield from self.ask(self._store.list(boundary_prefix(at)))):
            yield from self.delete(key)

    def _still_newest(self, generations: dict[int, Generation]) -> Steps:
        """False if there is a newer generation than those known; raises if it is another launch's."""
        now_s = self._node.boot_s(self._world.kernel.now)
        if now_s - self._read_s < _TRUST_S:
            return True
        newer = yield from self.generation(max(generations) + 1)
        if newer is not None and newer.launch != self._node.launch:
            raise SupersededError(f"generation {newer.number}")
        self._read_s = now_s
        return newer is None
