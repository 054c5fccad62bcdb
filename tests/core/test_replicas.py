"""Replicas: which images stand in another machine's memory too, and that together with a rank's own they are the
image."""

from __future__ import annotations

import random
from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.core.replicas import MAX_OWN_BYTES, areas, areas_bytes, own_ranges, with_replicas
from surefoot.errors import CorruptError

STRUCTURE = '{"$dict":[],"type":"dict"}'


def replicated(name: str, *shape: int) -> Leaf:
    return Leaf(name, "float32", shape, "replicated", "same")


def own(name: str, *shape: int) -> Leaf:
    return Leaf(name, "float32", shape, "local")


def block(name: str, part: int, parts: int) -> Leaf:
    return Leaf(name, "float32", (4, 3), "sharded", "same" if parts else "", (4 * part, 0), (4 * parts, 3))


def planned(leaves: list[list[Leaf]], machines: list[int]) -> Plan:
    reports = [Report(tuple(of_rank), STRUCTURE) for of_rank in leaves]
    return with_replicas(make_plan(reports), reports, machines)


@pytest.mark.holds("two-machines-hold-it")
def test_replicas_have_a_replica_on_another_machine() -> None:
    """Two machines with two ranks each: every image has a holder on the other one, and every rank keeps one."""
    leaves = [[replicated(f"t{n}", 100 + n) for n in range(12)] for _ in range(4)]
    plan = planned(leaves, [0, 0, 1, 1])
    assert {rank: holder // 2 for rank, holder in plan.holders.items()} == {0: 1, 1: 1, 2: 0, 3: 0}
    assert sorted(plan.holders.values()) == [0, 1, 2, 3]


def test_uneven_machines() -> None:
    """One machine has more ranks than the other: all images of each stand on the other, balanced by bytes."""
    leaves = [[replicated(f"t{n}", 100) for n in range(8)] for _ in range(4)]
    plan = planned(leaves, [0, 0, 0, 1])
    assert plan.holders == {0: 3, 1: 3, 2: 3, 3: 0}
    assert plan.replicas_kept_by(3) == [0, 1, 2]
    assert areas_bytes(plan, 3) == sum(-(-plan.image(rank).size_bytes // 4096) * 4096 for rank in (0, 1, 2))
    assert next(iter(areas(plan, 3).values())) == 0


def test_one_machine_needs_none() -> None:
    """What would be lost together is no second copy."""
    leaves = [[replicated("t", 100)] for _ in range(4)]
    assert planned(leaves, [5, 5, 5, 5]).replicas == ()


def test_shards_that_no_other_machine_has() -> None:
    """Parts that one rank alone has, or that only a rank of the same machine has too, have no replica. An image without
    any part has: it is its record that matters."""
    alone = [[block("w", rank, 4)] for rank in range(4)]
    assert planned(alone, [0, 0, 1, 1]).replicas == ()
    near = [[block("w", rank // 2, 2)] for rank in range(4)]
    assert set(planned(near, [0, 0, 1, 1]).holders) == {1, 3}


def test_shards_that_stand_twice() -> None:
    """Parts within a machine, copies across: each rank's replica is kept by the one that has the same part."""
    leaves = [[block("w", rank % 2, 2), replicated("b", 7)] for rank in range(4)]
    assert planned(leaves, [0, 0, 1, 1]).holders == {0: 2, 1: 3, 2: 0, 3: 1}


@pytest.mark.parametrize(("elements", "replicas"), [(MAX_OWN_BYTES // 4, 2), (MAX_OWN_BYTES // 4 + 1, 1)])
def test_much_of_a_ranks_own(elements: int, replicas: int) -> None:
    """A rank with more of its own than is told at every step has no replica; the other one has."""
    plan = planned([[replicated("t", 9), own("own", elements)], [replicated("t", 9)]], [0, 1])
    assert len(plan.replicas) == replicas
    assert 1 in plan.holders


def test_it_is_part_of_the_plan() -> None:
    """It comes back from the plan's document, and another arrangement is another plan."""
    leaves = [[replicated(f"t{n}", 10) for n in range(3)] for _ in range(3)]
    one, other, none = (planned(leaves, machines) for machines in ([0, 1, 2], [0, 0, 1], [0, 0, 0]))
    assert Plan.from_body(one.body).replicas == one.replicas != ()
    assert len({one.hash, other.hash, none.hash}) == 3
    assert "replicas" not in none.body


@pytest.mark.parametrize("replicas", [[[0, 0]], [[0, 2]], [[0, 1], [0, 1]], [[0]], [["0", 1]], [[-1, 0]], [[True, 0]]])
def test_a_document_with_wrong_replicas(replicas: list[object]) -> None:
    """Ranks that are not there, their own holders, or two for one: refused."""
    plan = planned([[replicated("t", 10)] for _ in range(2)], [0, 1])
    with pytest.raises(CorruptError, match="replica"):
        Plan.from_body({**plan.body, "replicas": replicas})


@pytest.mark.holds("two-machines-hold-it")
@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=7),
    st.integers(0, 9),
    st.integers(1, 3),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_together_they_are_the_image(
    machines: list[int], num_shared: int, parts: int, ranks_own: bool, rng: random.Random
) -> None:
    """Whatever is shared how: what the holder has, put where the replica's own header says, and the rank's own, are
    every byte of the rank's image; and the holder is never on the same machine."""
    shared = {name: rng.randrange(1, 50) for name in (f"t{n}" for n in range(num_shared))}
    leaves = []
    for rank in range(len(machines)):
        of_rank = [replicated(name, size) for name, size in shared.items()]
        of_rank += [block("w", rank % parts, parts)] if len(machines) >= parts else []
        of_rank += [own("own", 5), own("own2", 3)] if ranks_own else []
        leaves.append(of_rank)
    plan = planned(leaves, machines)
    values = [{leaf.name: _value(rng, leaf, rank, leaves) for leaf in of_rank} for rank, of_rank in enumerate(leaves)]
    if len(set(machines)) > 1 and parts == 1:
        assert sorted(plan.holders) == list(range(len(machines)))
    for rank, holder in plan.holders.items():
        assert machines[rank] != machines[holder]
        image, replica = _image(plan, rank, values[rank]), bytearray(plan.image(rank).size_bytes)
        replica[:] = _image(plan, rank, values[holder])
        for start, stop in own_ranges(plan, rank):
            replica[start:stop] = image[start:stop]
        assert replica == image
    assert Counter(holder for _rank, holder in plan.replicas) == {
        holder: len(plan.replicas_kept_by(holder)) for holder in plan.holders.values()
    }


def _value(rng: random.Random, leaf: Leaf, rank: int, leaves: list[list[Leaf]]) -> bytes:
    """Equal wherever the same is claimed."""
    size = ITEM_BYTES[leaf.dtype] * prod(leaf.shape)
    key = (leaf.name, leaf.offset) if leaf.spread != "local" else (leaf.name, rank)
    return random.Random(repr(key)).randbytes(size)


def _image(plan: Plan, rank: int, values: dict[str, bytes]) -> bytes:
    """As a rank with these tensors writes it; what is not shared is that rank's, right or wrong."""
    layout = plan.image(rank)
    image = bytearray(layout.size_bytes)
    image[: len(layout.header)] = layout.header
    leaf_of = {item.box.name: item.leaf for item in plan.kept_by(rank)}
    for box, start in layout.places:
        image[start : start + box.size_bytes] = values[leaf_of[box.name]]
    return bytes(image)
