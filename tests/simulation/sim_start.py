"""The start of a generation: one choice, recorded before anybody trains, obeyed by all, and taken back by all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sim_kernel import Local, Sleep, Steps, Until
from sim_store import Stored
from sim_trainer import Turn

from surefoot.core.layout import STEPS, BoundaryId, parse_ack, parse_shard
from surefoot.core.lineage import Cuts
from surefoot.core.manifest import Generation, Manifest, Parent
from surefoot.core.recovery import Copy, Facts, Look, Refuse, Restore, Scratch, Source
from surefoot.errors import AgentError, SupersededError

if TYPE_CHECKING:
    from sim_agent import Brain
    from sim_world import Round

_INVENTORIES_WITHIN_S = 4.0


class Starting:
    """What the leader of a round does, once."""

    def __init__(self, brain: Brain, round_: Round) -> None:
        self._brain = brain
        self._world = brain.world
        self._records = brain.records
        self._round = round_
        self._bad: list[Copy] = []
        self._failed: list[Source] = []
        self._missed = False
        """A copy that was there could not be read."""

    def begin(self) -> Steps:
        """Read the records, hear every member, choose, claim the next number, lead.

        The order is what keeps a leader that slept from spoiling its successor's work: members that were put together
        anew do not answer it, and a record that was put after it read takes the number that it would claim.
        """
        while self._is_current():
            generations = yield from self._records.generations()
            if self._world.policy.superseding(generations, [self._brain.node.launch]) is not None:
                self._brain.supersede()
                return
            floor = yield from self._inventories()
            try:
                decision, source = yield from self._decide(generations, self._brain.answers)
            except SupersededError:
                # Another launch took over while it read.
                self._brain.supersede()
                return
            if isinstance(decision, Refuse) and decision.error is AgentError:
                # Somebody did not answer: nothing may be decided yet.
                continue
            yield from self._until_the_notice_is_over()
            if not self._is_current():
                return
            generation = self._record(generations, source)
            self._world.truth.decides(generation, 0 if self._missed else floor)
            if not self._world.policy.record_before_training:
                yield from self._lead(generation.number, decision, source)
                yield Sleep(2.0)
                yield from self._records.put_once(generation.key, generation.to_bytes())
                return
            if (yield from self._records.put_once(generation.key, generation.to_bytes())):
                if (yield from self._lead(generation.number, decision, source)):
                    return
            elif (yield from self._records.generation(generation.number)).launch == generation.launch:
                # Another leader of this launch: this one was replaced, whatever it believes.
                return

    def best_of(self, copies: Sequence[Copy]) -> Steps:
        """What a node would choose by itself."""
        generations = yield from self._records.generations()
        nobody_else = {member.name: [] for member in self._round.members}
        _decision, source = yield from self._decide(generations, {**nobody_else, self._brain.node.name: copies})
        return source

    def _is_current(self) -> bool:
        return self._brain.round is self._round and not self._brain.gone

    # ------------------------------------------------------------------ choosing

    def _inventories(self) -> Steps:
        """What every member's memory holds, of those that answer in time."""
        brain, all_of = self._brain, len(self._round.members)
        brain.answers = {}
        asked = self._world.fresh()
        brain.asked = asked
        end_s = self._world.kernel.now + _INVENTORIES_WITHIN_S
        while self._is_current() and len(brain.answers) < all_of and self._world.kernel.now < end_s:
            missing = [member for member in self._round.members if member.name not in brain.answers]
            brain.broadcast(missing, op="inventory_wanted", round=self._round, sender=brain.node, asked=asked)
            yield Until(brain.node.index, lambda: len(brain.answers) == all_of, 0.7)
        members = self._round.members
        return (yield Local("choose", lambda: self._world.truth.could_be_had(members)))

    def _decide(self, generations: dict[int, Generation], answers: Mapping[str, Sequence[Copy]]) -> Steps:
        """The decision, and what is loaded by it: a source with every copy that a node may read."""
        policy = self._world.policy
        chain = policy.cuts(generations)
        yield from self._finish_commits(generations, chain)
        commits = yield from self._records.commits()
        copies = [copy for of_node in answers.values() for copy in of_node if copy not in self._bad]
        manifests: dict[BoundaryId, Manifest | None] = {}
        while True:
            facts = self._facts(generations, chain, copies, commits, manifests, answers)
            match policy.decide(facts):
                case Look(at):
                    read = yield from self._records.manifests([at])
                    manifests[at] = read[0] if read else None
                case Restore(source) as chosen if source.copies:
                    return chosen, source
                case Restore(source) as chosen:
                    manifest = manifests[source.at]
                    assert manifest is not None
                    return chosen, replace(source, copies=_of_all_places(manifest, copies))
                case Scratch() | Refuse() as end:
                    # A run of which nothing is left is refused; here somebody starts it over on purpose.
                    return end, None

    def _facts(
        self,
        generations: dict[int, Generation],
        chain: Cuts,
        copies: Sequence[Copy],
        commits: Sequence[BoundaryId],
        manifests: Mapping[BoundaryId, Manifest | None],
        answers: Mapping[str, Sequence[Copy]],
    ) -> Facts:
        return Facts(
            generations=generations,
            chain=chain,
            launches=[self._brain.node.launch],
            resume="auto",
            uri="the store",
            place="object",
            copies=copies,
            silent=[member.name for member in self._round.members if member.name not in answers],
            commits=commits,
            manifests=manifests,
            failed=self._failed,
            refused={},
        )

    def _finish_commits(self, generations: dict[int, Generation], chain: Cuts) -> Steps:
        """Whoever was to commit what is acknowledged in full may have died in between."""
        policy = self._world.policy
        listed = yield from self._records.ask(self._world.store.list(STEPS))
        pieces = {piece.at for key in listed if (piece := parse_ack(key) or parse_shard(key)) is not None}
        committed = set((yield from self._records.commits()))
        for at in sorted(pieces - committed):
            if policy.counts(at, chain) and at.generation in generations:
                yield from self._records.commit(at)

    def _until_the_notice_is_over(self) -> Steps:
        """No new record before what an eviction saves is committed, or its deadline has passed."""
        board = self._brain.node.board
        if board.leaving_until_s is not None:
            left_s = board.leaving_until_s - self._world.kernel.now
            if left_s > 0 and self._brain.pending:
                yield Until(self._brain.node.index, lambda: not self._brain.pending, left_s)

    def _record(self, generations: dict[int, Generation], source: Source | None) -> Generation:
        node = self._brain.node
        parent = None if source is None else Parent(source.at.generation, source.at.boundary, source.committed)
        number = max(generations, default=0) + 1
        wall_s = node.wall_s(self._world.kernel.now)
        return Generation(number, node.launch, parent, self._round.size, node.name, wall_s)

    # ------------------------------------------------------------------ leading

    def _lead(self, generation: int, decision: object, source: Source | None) -> Steps:
        """Have everybody load, and train once all have. False: this step cannot be had after all."""
        turn = (generation, 1)
        while self._is_current():
            bad = yield from self._loaded_by_all(source, turn)
            if not self._is_current():
                return True
            if not bad:
                yield from self._let_train(turn)
                return True
            # One rank's failure is everybody's: all drop the same copies, and read everything again.
            self._bad.extend(copy for copy in bad if copy not in self._bad)
            self._missed = True
            assert source is not None
            source = self._without_bad(source)
            if source is None:
                assert isinstance(decision, Restore)
                self._failed.append(decision.source)
                return False
            turn = (generation, turn[1] + 1)
        return True

    def _without_bad(self, source: Source) -> Source | None:
        """The same step by other copies: another step would be another generation."""
        left = tuple(tuple(copy for copy in of_rank if copy not in self._bad) for of_rank in source.copies)
        return replace(source, copies=left) if all(left) else None

    def _loaded_by_all(self, source: Source | None, turn: Turn) -> Steps:
        brain, node = self._brain, self._brain.node
        members = self._round.members
        while self._is_current():
            reports = brain.reports.setdefault(turn, {})
            missing = [member for member in members if member.name not in reports]
            if not missing:
                return [copy for bad in reports.values() for copy in bad]
            brain.broadcast(missing, op="load", round=self._round, sender=node, source=source, turn=turn)
            yield Until(node.index, lambda: len(brain.reports.get(turn, {})) == len(members), 1.0)
        return []

    def _let_train(self, turn: Turn) -> Steps:
        brain, node = self._brain, self._brain.node
        while self._is_current():
            told = brain.training.setdefault(turn, set())
            missing = [member for member in self._round.members if member.name not in told]
            if not missing:
                return
            brain.broadcast(missing, op="train", round=self._round, sender=node, turn=turn)
            yield Until(node.index, lambda: len(brain.training.get(turn, ())) == len(self._round.members), 0.7)
        yield Sleep(0.0)


def _of_all_places(manifest: Manifest, copies: Sequence[Copy]) -> tuple[tuple[Copy, ...], ...]:
    """By rank, where a checkpoint's image is: in memory, if the hash is the shard's, and in the store."""
    size = len(manifest.shards)
    return tuple(
        (
            *(copy for copy in copies if (copy.at, copy.rank, copy.xxh3_128) == (manifest.at, rank, shard.xxh3_128)),
            Stored(manifest.at, manifest.plan, size, rank, shard.xxh3_128, shard.size_bytes, shard.key),
        )
        for rank, shard in enumerate(manifest.shards)
    )
