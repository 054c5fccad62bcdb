"""The simulated world: what holds in all of it, that planted mistakes show, and that a failure can be repeated."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sim_families import SEEDS, WHERE_IT_MATTERS, anything
from sim_faults import ANY, DAMAGE, KINDS, Fault, as_test, make_schedule, shrink
from sim_kernel import Violation
from sim_policy import MUTATIONS, REAL, Policy
from sim_world import Setting, World

_CHUNK = 10


def _why(setting: Setting, seed: int, schedule: list[Fault], policy: Policy = REAL) -> str | None:
    """What goes wrong in a world; None if nothing does."""
    try:
        World(setting, seed, schedule, policy).run()
    except Violation as violation:
        return str(violation)
    return None


def _must_hold(setting: Setting, seed: int, schedule: list[Fault]) -> None:
    why = _why(setting, seed, schedule)
    if why is not None:
        smaller = shrink(schedule, lambda fewer: _why(setting, seed, fewer) is not None)
        pytest.fail(as_test(setting, seed, smaller, _why(setting, seed, smaller) or why))


@pytest.mark.holds("rules-under-faults")
@pytest.mark.parametrize("chunk", range(10))
def test_no_schedule_of_faults_breaks_an_invariant(chunk: int) -> None:
    """Worlds of every kind, five faults at most each: nothing torn, nothing lost, one truth, and never stuck."""
    for seed in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
        _must_hold(*_in_order(seed))


def _in_order(seed: int) -> tuple[Setting, int, list[Fault]]:
    setting, schedule = anything(seed)
    return setting, seed, schedule


@pytest.mark.holds("rules-under-faults", "generation-before-training", "one-choice")
@pytest.mark.parametrize("mistake", MUTATIONS)
def test_every_planted_mistake_is_found(mistake: str) -> None:
    """The worlds in which a mistake matters show it; with the real decisions the very same ones are in order."""
    found: list[str] = []
    for seed in SEEDS:
        setting, schedule = WHERE_IT_MATTERS[mistake](seed)
        _must_hold(setting, seed, schedule)
        if not found and (why := _why(setting, seed, schedule, MUTATIONS[mistake])) is not None:
            found.append(why)
    assert found, "no seed shows it"


_SMALL = Setting(nodes=2, steps=5, save_gap_s=0.5, keep_every_s=0.5, ship_s=0.2)


def _effects_of_the_small_world() -> int:
    world = World(_SMALL, 1, [])
    world.run()
    return world.kernel.effects


@pytest.mark.holds("pointer-moves-first")
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_crash_at_an_effect_does_no_harm(side: str) -> None:
    """Whoever is about to have, or has just had, every ninth of all effects of a run dies there."""
    for number in range(1 if side == "before" else 5, _effects_of_the_small_world(), 9):
        _must_hold(_SMALL, 1, [Fault(kind="kill", effect=ANY, count=number, side=side)])


def test_many_nodes_are_as_safe_as_few() -> None:
    """Three hundred nodes, one of which dies and one of which sleeps: the others go on without them."""
    faults = [
        Fault(kind="kill_node", node=150, at_s=7.0),
        Fault(kind="stop_node", node=7, at_s=7.5, seconds=60.0),
    ]
    world = World(Setting(nodes=300, steps=3, step_s=2.0, loss=0.001), 1, faults)
    world.run()
    assert len(world.truth.generations) == 2
    assert world.truth.newest_durable() == 3


@pytest.mark.parametrize("seed", range(12))
def test_an_announced_eviction_loses_no_finished_step(seed: int) -> None:
    """Notices only, with time enough: each generation goes on exactly where all ranks of the one before had ended."""
    nodes, every = 2 + seed % 3, 1 + seed % 2
    faults = [Fault(kind="notice", node=seed % nodes, at_s=5.0 + 0.37 * seed, seconds=20.0)]
    if nodes > 2:
        faults.append(Fault(kind="notice", node=(seed + 1) % nodes, at_s=5.2 + 0.37 * seed, seconds=20.0))
    world = World(Setting(nodes=nodes, every=every, steps=14, replace_after_s=3.0), seed, faults)
    world.run()
    generations = world.truth.generations
    assert len(generations) >= 2
    for number in range(2, len(generations) + 1):
        parent = generations[number].parent
        assert parent is not None
        assert (parent.generation, parent.boundary) == (number - 1, world.truth.finished_on_all[number - 1])


def _evicted_while_evaluating(seed: int, policy: Policy) -> World:
    """Every third step is staged; rank 0 evaluates after one that is not, and a notice comes meanwhile."""
    setting = Setting(nodes=2 + seed % 2, every=3, steps=14, evaluates_after=7 + seed % 2, replace_after_s=3.0)
    notice = Fault(kind="notice", node=seed % 2, at_s=12.0 + 0.3 * seed, seconds=15.0)
    world = World(setting, seed, [notice], policy)
    world.run()
    return world


@pytest.mark.parametrize("seed", range(6))
def test_a_step_that_was_not_due_is_staged_late_when_no_boundary_comes(seed: int) -> None:
    """The next generation goes on at the newest finished step; without a late target, at an older one."""
    finished = 7 + seed % 2
    for policy, holds in ((REAL, True), (replace(REAL, late_target=lambda *_told: None), False)):
        world = _evicted_while_evaluating(seed, policy)
        assert world.truth.finished_on_all[1] == finished
        parent = world.truth.generations[2].parent
        assert parent is not None
        assert (parent.boundary == finished) == holds


def test_of_two_launches_exactly_one_trains_to_the_end() -> None:
    """The later one takes over, the earlier one stops for good, and the records show one change of hands."""
    world = World(Setting(nodes=2, launches=2, second_launch_s=8.0, steps=20), 3, [])
    world.run()
    assert [launch.over for launch in world.launches] == ["superseded", "finished"]
    assert [g.launch for g in world.truth.generations.values()] == ["launch0", "launch1"]


def test_the_same_seed_is_the_same_world() -> None:
    """Two runs of one world have the same effects, records and times; another seed has others."""
    setting, schedule = anything(3)
    runs = []
    for seed in (3, 3, 4):
        world = World(setting, seed, schedule)
        world.run()
        runs.append((world.statistics(), list(world.truth.generations.values())))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_failing_schedule_shrinks_to_lines_that_fail_again() -> None:
    """Of seven faults the one that matters is left, and the printed world fails with the same words."""
    setting = Setting(nodes=2, ship_s=3.0)
    policy = MUTATIONS["hashes are not checked"]
    noise = make_schedule(5, setting, ("clock",), 5)
    needed = [Fault(kind="damage_memory", node=1, at_s=8.0), Fault(kind="kill_trainer", node=0, at_s=8.05)]

    def fails(schedule: list[Fault]) -> bool:
        return _why(setting, 1, schedule, policy) is not None

    assert fails([*noise, *needed])
    smaller = shrink([*noise, *needed], fails)
    assert set(smaller) <= set(needed)
    assert all(not fails([f for f in smaller if f is not left_out]) for left_out in smaller)
    why = _why(setting, 1, smaller, policy)
    text = as_test(setting, 1, smaller, why or "")

    def mutated(*world: object) -> World:
        return World(*world, policy)  # type: ignore[arg-type,call-arg]

    with pytest.raises(Violation) as caught:
        exec(text, {"World": mutated, "Setting": Setting, "Fault": Fault})
    assert str(caught.value) == why


_KEPT = [
    # A launch that was taken over must hear of it although the acknowledgements that it waits for were deleted.
    (Setting(nodes=3, ranks_per_node=2, launches=2, ship_s=3.0), 371, [
        Fault(kind="cut", node=0, effect="trainer vector", count=5, seconds=2.0),
        Fault(kind="stop_agent", node=1, effect="agent unpin", count=2, seconds=1.0),
    ]),
    # A leader that was replaced while it chose must not put the record of a choice that only it knows.
    (Setting(nodes=3, ranks_per_node=2, launches=2, outage=0.05), 1252, [
        Fault(kind="cut", node=0, at_s=7.41, seconds=60.0),
        Fault(kind="kill_trainer", node=0, at_s=0.7),
    ]),
    # The last step must be whole although one rank's structure changes at it.
    (Setting(nodes=3), 1355, [
        Fault(kind="kill_node", node=1, effect="trainer vector", count=1),
        Fault(kind="drift", node=0, at_s=17.89),
    ]),
    # A last step that turns out bad while it is sent is a failure of the script, not a wait for ever.
    (Setting(nodes=2, ship_s=3.0), 41, [Fault(kind="damage_memory", node=1, effect="agent put commits/")]),
    # Two ranks whose structures change one after the other: all come to one plan again.
    (Setting(nodes=4, ranks_per_node=2, ship_s=3.0, outage=0.05), 1684, [
        Fault(kind="drift", node=3, at_s=4.35), Fault(kind="drift", node=0, at_s=5.33),
    ]),
    # A word about one attempt to load says nothing of the attempts of another generation.
    (Setting(nodes=2, step_s=2.0), 4, [
        Fault(kind="damage_memory", node=1, at_s=9.0), Fault(kind="kill_trainer", node=0, at_s=9.05),
    ]),
    # An agent that replaces another knows from the records what its generation continues.
    (Setting(nodes=1, launches=2, second_launch_s=15.0, steps=12, step_s=1.0, copy_s=0.5, ship_s=3.0, every=2), 2354, [
        Fault(kind="stop_node", node=1, at_s=20.28, seconds=200.0),
        Fault(kind="kill_agent", node=1, effect="agent get generations/", count=3),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("kept", _KEPT)
def test_schedules_that_once_failed(kept: tuple[Setting, int, list[Fault]]) -> None:
    """Each showed a mistake of the protocol or of the world."""
    setting, seed, schedule = kept
    for shifted in range(seed, seed + 4):
        _must_hold(setting, shifted, schedule)


# ---------------------------------------------------------------------- the long form


@pytest.mark.campaign
@pytest.mark.parametrize("chunk", range(100, 300))
def test_campaign_of_random_schedules(chunk: int) -> None:
    """Two thousand more worlds, with up to nine faults."""
    for seed in range(chunk * _CHUNK, (chunk + 1) * _CHUNK):
        setting, _few = anything(seed)
        _must_hold(setting, seed, make_schedule(seed, setting, KINDS + DAMAGE, 9))


@pytest.mark.campaign
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_campaign_of_crashes_at_every_effect(nodes: int, side: str) -> None:
    """Whoever has an effect dies before it, or after it, for every effect of a run."""
    setting = replace(_SMALL, nodes=nodes)
    world = World(setting, 2, [])
    world.run()
    for number in range(1, world.kernel.effects + 1):
        _must_hold(setting, 2, [Fault(kind="kill", effect=ANY, count=number, side=side)])


@pytest.mark.campaign
@pytest.mark.parametrize("nodes", [1000, 3000])
def test_campaign_of_thousands_of_nodes(nodes: int) -> None:
    """Thousands of nodes with losses, a death, a sleep and a cut."""
    faults = [
        Fault(kind="kill_node", node=nodes // 2, at_s=7.0),
        Fault(kind="stop_node", node=7, at_s=7.5, seconds=60.0),
        Fault(kind="cut", node=11, at_s=9.0, seconds=60.0),
    ]
    world = World(Setting(nodes=nodes, steps=4, step_s=2.0, loss=0.001), 1, faults)
    world.run()
    assert world.truth.newest_durable() == 4
