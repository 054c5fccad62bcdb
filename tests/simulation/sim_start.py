"""The start of a generation: one choice, recorded before anybody trains, obeyed by all, and taken back by all."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from sim_kernel import Local, Sleep, Steps, Until
from sim_trainer import Turn

from surefoot.core.copies import Copy, Whole, copies_of
from surefoot.core.layout import STEPS, StepId, parse_ack, parse_shard
from surefoot.core.manifest import Generation, Parent
from surefoot.errors import SupersededError

if TYPE_CHECKING:
    from sim_agent import Brain
    from sim_world import Round

_INVENTORIES_WITHIN_S = 4.0


class Starting:
    """What the leader of a round does, once."""

    def __init__(self, brain: Brain, round_: Round) -> None:
        self._brain = brain
        self._world = brain.world
        self._books = brain.books
        self._round = round_
        self._bad: list[Copy] = []
        self._missed = False
        """A copy that was there could not be read."""

    def begin(self) -> Steps:
        """Read the records, hear every member, choose, claim the next number, lead.

        The order is what keeps a leader that slept from spoiling its successor's work: members that were put together
        anew do not answer it, and a record that was put after it read takes the number that it would claim.
        """
        while self._is_current():
            generations = yield from self._books.generations()
            if self._world.policy.superseding(generations, [self._brain.node.launch]) is not None:
                self._brain.supersede()
                return
            floor = yield from self._inventories()
            copies = [copy for of_node in self._brain.answers.values() for copy in of_node]
            try:
                options = yield from self._options(generations, copies)
            except SupersededError:
                # Another launch took over while it read.
                self._brain.supersede()
                return
            yield from self._until_the_notice_is_over()
            if not self._is_current():
                return
            generation = self._record(generations, options[0] if options else None)
            self._world.truth.decides(generation, 0 if self._missed else floor)
            if not self._world.policy.record_before_training:
                yield from self._lead(generation.number, options)
                yield Sleep(2.0)
                yield from self._books.put_once(generation.key, generation.to_bytes())
                return
            if (yield from self._books.put_once(generation.key, generation.to_bytes())):
                if (yield from self._lead(generation.number, options)):
                    return
            elif (yield from self._books.generation(generation.number)).launch == generation.launch:
                # Another leader of this launch: this one was replaced, whatever it believes.
                return

    def best_of(self, copies: Sequence[Copy]) -> Steps:
        """What a node would choose by itself."""
        generations = yield from self._books.generations()
        found = yield from self._options(generations, copies)
        return found[0] if found else None

    def _is_current(self) -> bool:
        return self._brain.round is self._round and not self._brain.gone

    # ------------------------------------------------------------------ choosing

    def _inventories(self) -> Steps:
        """What every member's memory holds. All must answer: who does not could not load either."""
        brain, all_of = self._brain, len(self._round.members)
        brain.answers = {}
        asked = self._world.fresh()
        brain.asked = asked
        end_s = self._world.kernel.now + _INVENTORIES_WITHIN_S
        while self._is_current() and len(brain.answers) < all_of:
            missing = [member for member in self._round.members if member.name not in brain.answers]
            brain.broadcast(missing, op="inventory_wanted", round=self._round, sender=brain.node, asked=asked)
            yield Until(brain.node.index, lambda: len(brain.answers) == all_of, 0.7)
            if not self._world.policy.hears_every_member and self._world.kernel.now > end_s:
                break
        members = self._round.members
        return (yield Local("choose", lambda: self._world.truth.could_be_had(members)))

    def _options(self, generations: dict[int, Generation], copies: Sequence[Copy]) -> Steps:
        """The whole steps to go on from, best first."""
        policy = self._world.policy
        chain = policy.cuts(generations)
        yield from self._finish_commits(generations, chain)
        ats = [at for at in (yield from self._books.commits()) if policy.counts(at, chain)]
        manifests = yield from self._books.manifests(ats)
        live = [manifest for manifest in manifests if manifest.retired is None]
        stored = [copy for manifest in live for copy in copies_of(manifest, "object")]
        options = policy.wholes([*copies, *stored], live, chain, self._bad)
        if options:
            return options
        # The bytes of what was given up may still be there.
        given_up = sorted((m for m in manifests if m.retired is not None), key=lambda m: m.at, reverse=True)
        stored = [copy for manifest in given_up for copy in copies_of(manifest, "object")]
        return policy.wholes(stored, given_up, chain, self._bad)

    def _finish_commits(self, generations: dict[int, Generation], chain: object) -> Steps:
        """Whoever was to commit what is acknowledged in full may have died in between."""
        policy = self._world.policy
        listed = yield from self._books.ask(self._world.store.list(STEPS))
        pieces = {piece.at for key in listed if (piece := parse_ack(key) or parse_shard(key)) is not None}
        committed = set((yield from self._books.commits()))
        for at in sorted(pieces - committed):
            if policy.counts(at, chain) and at.generation in generations:  # type: ignore[arg-type]
                yield from self._books.commit(at)

    def _until_the_notice_is_over(self) -> Steps:
        """No new record before what an eviction saves is committed, or its deadline has passed."""
        board = self._brain.node.board
        if board.leaving_until_s is not None:
            left_s = board.leaving_until_s - self._world.kernel.now
            if left_s > 0 and self._brain.pending:
                yield Until(self._brain.node.index, lambda: not self._brain.pending, left_s)

    def _record(self, generations: dict[int, Generation], whole: Whole | None) -> Generation:
        node = self._brain.node
        parent = None if whole is None else Parent(whole.at.generation, whole.at.step, whole.committed)
        number = max(generations, default=0) + 1
        wall_s = node.wall_s(self._world.kernel.now)
        return Generation(number, node.launch, parent, self._round.size, node.name, wall_s)

    # ------------------------------------------------------------------ leading

    def _lead(self, generation: int, options: Sequence[Whole]) -> Steps:
        """Have everybody load, and train once all have. False: this step cannot be had after all."""
        whole = options[0] if options else None
        turn = (generation, 1)
        while self._is_current():
            bad = yield from self._loaded_by_all(whole, turn)
            if not self._is_current():
                return True
            if not bad:
                yield from self._let_train(turn)
                return True
            # One rank's failure is everybody's: all drop the same copies, and read everything again.
            self._bad.extend(copy for copy in bad if copy not in self._bad)
            self._missed = True
            assert whole is not None
            whole = self._without_bad(options, whole.at)
            if whole is None:
                return False
            turn = (generation, turn[1] + 1)
        return True

    def _without_bad(self, options: Sequence[Whole], at: StepId) -> Whole | None:
        """The same step by other copies: another step would be another generation."""
        bad: Collection[Copy] = set(self._bad)
        for option in options:
            left = tuple(tuple(copy for copy in of if copy not in bad) for of in option.copies)
            if option.at == at and all(left):
                return Whole(option.at, option.plan, option.committed, left)
        return None

    def _loaded_by_all(self, whole: Whole | None, turn: Turn) -> Steps:
        brain, node = self._brain, self._brain.node
        members = self._round.members
        while self._is_current():
            reports = brain.reports.setdefault(turn, {})
            missing = [member for member in members if member.name not in reports]
            if not missing:
                return [copy for bad in reports.values() for copy in bad]
            brain.broadcast(missing, op="load", round=self._round, sender=node, whole=whole, turn=turn)
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
