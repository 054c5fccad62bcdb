"""For each planted mistake, worlds in which it matters: a setting and faults, varied by the seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from sim_faults import DAMAGE, KINDS, Fault, make_schedule
from sim_world import Setting

Family = Callable[[int], tuple[Setting, list[Fault]]]


def anything(seed: int) -> tuple[Setting, list[Fault]]:
    """Any world with any faults."""
    dice = random.Random(f"{seed}/setting")
    setting = Setting(
        nodes=dice.choice([1, 2, 3, 4]),
        ranks_per_node=dice.choice([1, 1, 2]),
        launches=dice.choice([1, 1, 1, 2]),
        ship_s=dice.choice([0.4, 3.0]),
        copy_s=dice.choice([0.1, 0.1, 0.5]),
        every=dice.choice([1, 1, 1, 2, 3]),
        strict=dice.random() < 0.7,
        outage=dice.choice([0.0, 0.0, 0.05]),
        saves=dice.choice([(), (), (5,)]),
    )
    return setting, make_schedule(seed, setting, KINDS + DAMAGE, 5)


def _run_ahead(seed: int) -> tuple[Setting, list[Fault]]:
    """No strict fence, slots held for long, copies that take unlike times."""
    dice = random.Random(seed)
    setting = Setting(nodes=3, strict=False, copy_s=0.6, step_s=0.5, loss=0.2, slots=2, save_gap_s=30.0)
    return setting, [Fault(kind="kill_trainer", node=1, at_s=round(dice.uniform(6.0, 9.0), 2))]


def _one_rank_drifts(seed: int) -> tuple[Setting, list[Fault]]:
    """One rank's structure changes alone, while the others save."""
    dice = random.Random(seed)
    faults = [Fault(kind="drift", node=1, at_s=round(dice.uniform(2.0, 12.0), 2)) for _ in range(3)]
    return Setting(nodes=2, save_gap_s=0.0, step_s=0.6), faults


def _bad_memory(seed: int) -> tuple[Setting, list[Fault]]:
    """A bit flips in an image that is restored right afterwards."""
    dice = random.Random(seed)
    at_s = round(dice.uniform(5.0, 10.0), 2)
    first = Fault(kind="damage_memory", node=dice.randrange(2), at_s=at_s)
    return Setting(nodes=2, step_s=2.0), [first, Fault(kind="kill_trainer", node=0, at_s=round(at_s + 0.05, 2))]


def _slow_upload(seed: int) -> tuple[Setting, list[Fault]]:
    """Uploads take longer than steps."""
    return Setting(nodes=1 + seed % 3, ship_s=4.0, step_s=0.5), []


def _back_to_an_older_commit(seed: int) -> tuple[Setting, list[Fault]]:
    """The newest checkpoint is damaged and all memory lost; soon after the fall back everything is lost again."""
    dice = random.Random(seed)
    at_s = round(dice.uniform(10.0, 13.0), 2)
    again_s = round(at_s + dice.uniform(7.0, 11.0), 2)
    faults = [Fault(kind="damage_store", at_s=at_s)]
    faults += [Fault(kind="kill_node", node=node, at_s=at_s) for node in (0, 1)]
    faults += [Fault(kind="kill_node", node=node, at_s=again_s) for node in (0, 1)]
    return Setting(nodes=2, steps=24, replace_after_s=1.0, save_gap_s=0.5, ship_s=0.3, keep_every_s=0.5), faults


def _sleeping_committer(seed: int) -> tuple[Setting, list[Fault]]:
    """A node sleeps in mid-upload until others went on without it, wakes, and sleeps again before it commits."""
    dice = random.Random(seed)
    first = Fault(
        kind="stop_node", node=2, effect="agent put steps/", count=dice.choice([3, 5, 7]),
        seconds=round(dice.uniform(8.0, 10.0), 2),
    )  # fmt: skip
    second = Fault(kind="stop_agent", node=2, at_s=12.0, effect="agent put commits/", seconds=8.0)
    return Setting(nodes=3, steps=30, keep_every_s=0.5, save_gap_s=0.5, loss=0.0, sweep_s=200.0), [first, second]


def _killed_before_it_takes_back(seed: int) -> tuple[Setting, list[Fault]]:
    """An image is damaged while it is sent, and the agent dies when it is about to delete what it sent."""
    first = Fault(kind="damage_memory", node=1, effect="agent read 0", count=1 + seed % 3)
    return Setting(nodes=2), [first, Fault(kind="kill_agent", node=1, effect="agent delete steps/")]


def _cut_while_asked(seed: int) -> tuple[Setting, list[Fault]]:
    """A node is cut off right when it is to tell what its memory holds, for less than the launcher waits."""
    dice = random.Random(seed)
    kill = Fault(kind="kill_trainer", node=0, at_s=round(dice.uniform(6.0, 9.0), 2))
    cut = Fault(kind="cut", node=1, at_s=6.0, effect="agent tell inventory", seconds=5.5)
    return Setting(nodes=3, ship_s=3.0), [kill, cut]


def _killed_between_saves(seed: int) -> tuple[Setting, list[Fault]]:
    """A trainer dies while memory holds newer steps than the store."""
    dice = random.Random(seed)
    kill = Fault(kind="kill_trainer", node=0, at_s=round(dice.uniform(6.0, 12.0), 2))
    return Setting(nodes=2 + seed % 2, ship_s=3.0), [kill]


def _slow_copies(seed: int) -> tuple[Setting, list[Fault]]:
    """Copies that take about as long as steps, and unlike ones."""
    return Setting(nodes=2 + seed % 3, copy_s=0.5, step_s=0.6), []


WHERE_IT_MATTERS: dict[str, Family] = {
    "a slot is filled before a newer step is sealed on all ranks": _run_ahead,
    "a step is committed one acknowledgement short": anything,
    "acknowledgements of two plans are taken for one set": _one_rank_drifts,
    "hashes are not checked": _bad_memory,
    "a slot is freed while it is still being sent": _slow_upload,
    "the lineage's cut is ignored": _back_to_an_older_commit,
    "the generation is recorded after its training began": _killed_between_saves,
    "retention does not look at what the newest generation stands on": _back_to_an_older_commit,
    "an abandoned step is deleted without a tombstone": _sleeping_committer,
    "each node chooses what to restore for itself": _killed_between_saves,
    "a shard is acknowledged before it was compared with its hash": _killed_before_it_takes_back,
    "a leader chooses without having heard every member": _cut_while_asked,
    "the strict fence does not wait for the other ranks": _slow_copies,
}
"""Every mutation, and the worlds that show it."""
SEEDS = range(8)
"""The seeds of each family: the real decisions pass them all, a mutated one fails one of them at least."""
