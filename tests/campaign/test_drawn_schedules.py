"""What the campaign draws, without carrying it out."""

from __future__ import annotations

from schedules import Setting, schedule

from surefoot.scenario.events import Kind

_SEEDS = range(300)


def test_every_kind_is_drawn_and_by_the_seed_alone() -> None:
    """Three hundred seeds draw each kind of fault, and the same seed the same schedule."""
    drawn = [schedule(Setting.of(seed, 3), links=True) for seed in _SEEDS]
    assert {event.kind for events in drawn for event in events} >= set(Kind) - {Kind.KILL_SUPERVISOR, Kind.CLOCK}
    assert drawn == [schedule(Setting.of(seed, 3), links=True) for seed in _SEEDS]


def test_who_is_to_die_while_it_restores_does_so_in_a_recovery_that_comes() -> None:
    """Right after something that makes all trainers start again, and was surely past the step."""
    restoring = 0
    for seed in _SEEDS:
        events = schedule(Setting.of(seed, 3), links=True)
        for number, event in enumerate(events):
            if event.phase == "restoring":
                restoring += 1
                before = events[number - 1] if number else None
                assert before is not None
                assert before.kind.startswith(("evict", "kill", "rot"))
                assert before.kind is not Kind.KILL_AGENT
                assert event.step == max(0, before.step - 10)
    assert restoring


def test_a_node_sleeps_for_minutes_in_some() -> None:
    """At the end of a schedule: so long that the others have given it up, whichever phase it fell asleep in."""
    drawn = [schedule(Setting.of(seed, 3), links=True) for seed in _SEEDS]
    assert all(event.lasts_s <= 20.0 for events in drawn for event in events[:-1])
    pauses = [event for events in drawn for event in events if event.kind is Kind.PAUSE]
    assert {event.lasts_s for event in pauses} == {1.0, 6.0, 20.0, 150.0}
    assert {event.phase for event in pauses} == {"training", "filling", "sealed", "flushing", "committing"}


def test_a_store_hangs_only_where_there_is_a_server() -> None:
    """Its server is stopped, so there must be one; with or without links that can be cut. Long enough for requests to
    be given up only at the end: training goes on meanwhile, and would be over before a next event."""
    for links in (False, True):
        hangs = []
        for seed in _SEEDS:
            setting = Setting.of(seed, 3)
            events = schedule(setting, links=links)
            found = [event for event in events if event.kind is Kind.STORE_HANG]
            assert setting.object_store or not found
            assert all(event.lasts_s <= 20.0 for event in events[:-1])
            hangs += found
        assert {event.lasts_s for event in hangs} == {1.0, 6.0, 20.0, 75.0}
