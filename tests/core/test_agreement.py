"""Agreement: however the ranks are scheduled, all of them do the same at every boundary."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.agreement import (
    FIELDS,
    LARGEST_PACKED,
    BoundaryPlan,
    Vector,
    at_boundary,
    merge,
    pack,
    tag,
    unpack,
)

_vectors = st.builds(
    Vector,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
    st.integers(1, 99),
)


@given(_vectors)
def test_a_vector_survives_the_wire(vector: Vector) -> None:
    """What one rank alone sends is what it gets."""
    assert Vector.decode(vector.encode()) == vector
    assert len(vector.encode()) == FIELDS
    assert all(type(word) is int for word in vector.encode())


@given(_vectors, st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_vector_survives_its_word(vector: Vector, generation: int, number: int) -> None:
    """Tag and vector share a word of 64 bits, and neither changes the other."""
    word = tag(generation, number) | pack(vector)
    assert 0 <= word < 2**64
    assert word ^ tag(generation, number) == pack(vector) <= LARGEST_PACKED
    assert unpack(word) == unpack(pack(vector)) == vector


@given(_vectors, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(-9, 9), st.integers(-9, 9))
def test_a_word_of_another_boundary_or_generation_is_known(
    vector: Vector, generation: int, number: int, later: int, newer: int
) -> None:
    """What is left of its tag is more than any vector."""
    word = tag(generation + newer, number + later) | pack(vector)
    assert (word ^ tag(generation, number) <= LARGEST_PACKED) == (later == newer == 0)


def test_a_word_that_was_never_written_is_nobody_s() -> None:
    """Up to the number of boundaries after which a place in the word begins anew, by when it was written."""
    assert all(0 ^ tag(generation, number) > LARGEST_PACKED for generation in (0, 1, 4096) for number in range(5000))


def test_what_a_word_has_no_room_for_is_bounded() -> None:
    """More free slots than anybody asks for, a slower cadence than anybody waits for; the rest stays what it is."""
    much = Vector(notice=True, free_slots=10**9, stage_every=10**9)
    assert unpack(pack(much)) == Vector(notice=True, free_slots=255, stage_every=2**20 - 1)


@given(st.lists(_vectors, min_size=1, max_size=5))
def test_the_maximum_of_the_words_means_any_fewest_and_largest(vectors: list[Vector]) -> None:
    """Flags are set if any rank set them, free slots are the fewest, the cadence is the largest."""
    agreed = merge(vectors)
    assert agreed.notice == any(vector.notice for vector in vectors)
    assert agreed.replan == any(vector.replan for vector in vectors)
    assert agreed.leaving == any(vector.leaving for vector in vectors)
    assert agreed.durable == any(vector.durable for vector in vectors)
    assert agreed.free_slots == min(vector.free_slots for vector in vectors)
    assert agreed.stage_every == max(vector.stage_every for vector in vectors)


def test_a_cadence_below_one_is_one() -> None:
    """A rank that has no cadence yet does not divide by zero."""
    assert Vector.decode(Vector(stage_every=0).encode()).stage_every == 1


_PLAIN = {"planned": True, "wanted": False, "last": False}


@pytest.mark.parametrize(
    ("agreed", "step", "told", "expected"),
    [
        (Vector(free_slots=1), 7, {}, {"stage": True}),
        (Vector(free_slots=0), 7, {}, {"skipped": True}),
        (Vector(free_slots=1, stage_every=3), 7, {}, {}),
        (Vector(free_slots=1, stage_every=3), 9, {}, {"stage": True}),
        (Vector(free_slots=1, stage_every=3, durable=True), 7, {}, {"stage": True, "durable": True}),
        (Vector(free_slots=0, stage_every=3, durable=True), 7, {}, {"skipped": True}),
        (Vector(free_slots=0, notice=True), 7, {}, {"stage": True, "stop": True}),
        (Vector(free_slots=0, stage_every=3), 7, {"wanted": True}, {"stage": True}),
        (Vector(free_slots=0, stage_every=3), 7, {"last": True}, {"stage": True}),
        (Vector(free_slots=0, stage_every=3), 7, {}, {}),
        (Vector(free_slots=1, replan=True), 7, {}, {"stage": True, "replan": True}),
        (Vector(free_slots=0), 7, {"planned": False}, {"stage": True, "replan": True}),
        (Vector(free_slots=0, durable=True, notice=True), 7, {}, {"stage": True, "durable": True, "stop": True}),
        (Vector(free_slots=1, leaving=True), 7, {}, {"stage": True}),
    ],
)
def test_what_is_done_at_a_boundary(
    agreed: Vector, step: int, told: dict[str, bool], expected: dict[str, bool]
) -> None:
    """The decision for each combination that means something; all that is not named is false."""
    nothing = {"stage": False, "replan": False, "durable": False, "stop": False, "skipped": False}
    assert at_boundary(agreed, step, **{**_PLAIN, **told}) == BoundaryPlan(**{**nothing, **expected})


@pytest.mark.holds("skips-are-agreed")
@given(_vectors, st.integers(0, 1000), st.booleans(), st.booleans(), st.booleans())
def test_a_decision_never_contradicts_itself(
    agreed: Vector, step: int, planned: bool, wanted: bool, last: bool
) -> None:
    """Never staged and skipped, never durable without staging, never stopped without an image, never left unplanned."""
    plan = at_boundary(agreed, step, planned=planned, wanted=wanted, last=last)
    assert not (plan.stage and plan.skipped)
    assert plan.stage or not plan.durable
    assert plan.stage or not (plan.stop or wanted or last)
    assert plan.replan or planned
    assert not plan.skipped or (agreed.free_slots == 0 and not agreed.notice)


class _Ranks:
    """Ranks that post a vector at each boundary and read the one before; the network delivers when it likes."""

    def __init__(self, rng: random.Random, num_ranks: int, *, polled: bool) -> None:
        self._rng = rng
        self._num_ranks = num_ranks
        self._polled = polled
        self._posted: list[dict[int, Vector]] = []
        self._delivered = 0
        self.done: list[list[BoundaryPlan]] = [[] for _ in range(num_ranks)]

    def run(self) -> bool:
        """Let a random rank take its next boundary, or the network deliver. False if some rank waits for ever."""
        alive = {rank: self._trainer(rank) for rank in range(self._num_ranks)}
        for _ in range(5000):
            if not alive:
                break
            if self._rng.random() < 0.4:
                self._upload()
            else:
                rank = self._rng.choice(sorted(alive))
                if next(alive[rank], None) is None:
                    del alive[rank]
        return not alive

    def _upload(self) -> None:
        complete = self._delivered < len(self._posted) and len(self._posted[self._delivered]) == self._num_ranks
        self._delivered += complete

    def _trainer(self, rank: int) -> Iterator[bool]:
        last, planned = 12, False
        agreed = Vector()
        for step in range(1, last + 1):
            # The collectives of the step itself: nobody is more than one step ahead of anybody.
            while any(len(others) < step - 1 for others in self.done):
                yield True
            while not self._polled and self._delivered < step - 1:
                yield True
            if min(self._delivered, step - 1) > 0:
                agreed = merge(list(self._posted[min(self._delivered, step - 1) - 1].values()))
            plan = at_boundary(agreed, step, planned=planned, wanted=step % 5 == 0, last=step == last)
            planned = planned or plan.replan
            self.done[rank].append(plan)
            self._post(step, rank)
            yield True
            if plan.stop:
                return

    def _post(self, step: int, rank: int) -> None:
        while len(self._posted) < step:
            self._posted.append({})
        rng = self._rng
        self._posted[step - 1][rank] = Vector(
            notice=rng.random() < 0.03,
            replan=rng.random() < 0.1,
            durable=rng.random() < 0.2,
            free_slots=rng.randint(0, 2),
            stage_every=rng.choice([1, 1, 2, 3]),
        )


def _all_alike(ranks: _Ranks) -> bool:
    return all(done == ranks.done[0] for done in ranks.done)


@pytest.mark.holds("vector-is-waited-for")
@given(st.integers(0, 2**64), st.integers(1, 4))
@settings(max_examples=200)
def test_all_ranks_take_the_same_plan_at_every_boundary(seed: int, num_ranks: int) -> None:
    """Random local inputs, random scheduling and random upload: every rank's list of decisions is the same."""
    ranks = _Ranks(random.Random(seed), num_ranks, polled=False)
    assert ranks.run()
    assert _all_alike(ranks)
    assert 1 <= len(ranks.done[0]) <= 12


@pytest.mark.holds("vector-is-waited-for")
def test_polling_instead_of_waiting_tears_the_ranks_apart() -> None:
    """The same ranks, but each goes on with the newest result that has arrived: soon they decide differently."""

    def differ(seed: int) -> bool:
        ranks = _Ranks(random.Random(seed), 3, polled=True)
        return not ranks.run() or not _all_alike(ranks)

    assert sum(differ(seed) for seed in range(20)) > 10
