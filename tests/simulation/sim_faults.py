"""Faults, schedules of them, their making, their shrinking, and their printing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sim_kernel import Process

if TYPE_CHECKING:
    from sim_node import Node
    from sim_world import Setting, World

KINDS = ("kill_trainer", "kill_agent", "kill_node", "stop_node", "stop_agent", "cut", "notice", "clock", "drift")
ANY = "any"
"""As a fault's effect: whatever process has the n-th effect of all is killed."""
DAMAGE = ("damage_memory", "damage_store")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that happens: at a time, or at the n-th effect of a kind on a node, before it or after it."""

    kind: str
    node: int = 0
    at_s: float | None = None
    effect: str = ""
    """Process kind and beginning of the effect's label: `agent put commits/`."""
    count: int = 1
    side: str = "before"
    seconds: float = 0.0
    """How long a stop or a cut lasts, how far a clock jumps, how much warning a notice gives."""

    def __str__(self) -> str:
        given = [f"kind={self.kind!r}", f"node={self.node}"]
        if self.at_s is not None:
            given.append(f"at_s={self.at_s!r}")
        if self.effect:
            given += [f"effect={self.effect!r}", f"count={self.count}", f"side={self.side!r}"]
        if self.seconds:
            given.append(f"seconds={self.seconds!r}")
        return f"Fault({', '.join(given)})"


class Faults:
    """Makes a schedule happen."""

    def __init__(self, world: World, schedule: Sequence[Fault]) -> None:
        self._world = world
        self._schedule = schedule
        self._waiting = [fault for fault in schedule if fault.effect]
        self._seen: dict[int, int] = {}
        self._drifting: set[tuple[int, int]] = set()
        self._drifted: dict[tuple[int, int, int], bool] = {}
        self.damaged = False
        lasting = [fault for fault in schedule if fault.kind != "clock"]
        latest = [fault.at_s + fault.seconds for fault in lasting if fault.at_s is not None]
        pauses = [fault.seconds for fault in lasting if fault.effect]
        self.quiet_after_s = max(latest, default=0.0) + sum(pauses) + world.setting.second_launch_s

    def start(self) -> None:
        for fault in self._schedule:
            if fault.at_s is not None and not fault.effect:
                self._world.kernel.after(fault.at_s, lambda fault=fault: self.happen(fault))  # type: ignore[misc]

    def at_effect(self, process: Process, label: str, side: str) -> None:
        """Called before and after every effect."""
        if not self._waiting:
            return
        for fault in list(self._waiting):
            if fault.side == side and self._is_meant(fault, process, label) and self._counted(fault):
                self._waiting.remove(fault)
                if fault.effect == ANY:
                    self._world.kernel.kill(process)
                else:
                    self.happen(fault)

    def _is_meant(self, fault: Fault, process: Process, label: str) -> bool:
        if fault.effect == ANY:
            return True
        kind, _, beginning = fault.effect.partition(" ")
        return process.node == fault.node and process.kind == kind and label.startswith(beginning)

    def _counted(self, fault: Fault) -> bool:
        if fault.at_s is not None and self._world.kernel.now < fault.at_s:
            return False
        seen = self._seen[id(fault)] = self._seen.get(id(fault), 0) + 1
        return seen == fault.count

    def happen(self, fault: Fault) -> None:
        if self._world.is_over():
            return
        getattr(self, f"_{fault.kind}")(self._world.nodes[fault.node % len(self._world.nodes)], fault)

    # ------------------------------------------------------------------ kinds

    def _kill_trainer(self, node: Node, _fault: Fault) -> None:
        for process in list(node.trainers.values())[:1]:
            self._world.kernel.kill(process)

    def _kill_agent(self, node: Node, _fault: Fault) -> None:
        if node.agent is not None:
            self._world.kernel.kill(node.agent)

    def _kill_node(self, node: Node, _fault: Fault) -> None:
        self._world.power_off(node)

    def _stop_node(self, node: Node, fault: Fault) -> None:
        self._pause(list(node.processes()), fault.seconds)

    def _stop_agent(self, node: Node, fault: Fault) -> None:
        if node.agent is not None:
            self._pause([node.agent], fault.seconds)

    def _pause(self, processes: list[Process], seconds: float) -> None:
        for process in processes:
            self._world.kernel.stop(process)
            self._world.kernel.after(seconds, lambda process=process: self._world.kernel.wake(process))  # type: ignore[misc]

    def _cut(self, node: Node, fault: Fault) -> None:
        off = self._world.network.cut_off
        off.add(node.index)

        def heal() -> None:
            off.discard(node.index)
            self._world.heal()

        self._world.kernel.after(fault.seconds, heal)

    def _notice(self, node: Node, fault: Fault) -> None:
        if not node.up or node.agent is None or not node.agent.alive:
            return
        node.brain.notice(self._world.kernel.now + fault.seconds)
        booted = node.board

        def end() -> None:
            if node.board is booted:
                self._world.power_off(node)

        self._world.kernel.after(fault.seconds, end)

    def _clock(self, node: Node, fault: Fault) -> None:
        node.wall_offset_s += fault.seconds

    def _drift(self, node: Node, _fault: Fault) -> None:
        for rank in list(node.trainers)[:1]:
            self._drifting.add((node.index, rank))

    def drifts(self, generation: int, step: int, rank: int) -> bool:
        """Whether a rank's structure changes at this step. Once asked, the answer stays."""
        key = (generation, step, rank)
        if key not in self._drifted:
            hit = next((d for d in self._drifting if d[1] == rank), None)
            if hit is not None:
                self._drifting.discard(hit)
            self._drifted[key] = hit is not None
        return self._drifted[key]

    def _damage_memory(self, node: Node, _fault: Fault) -> None:
        hashed = [(g, slot) for g, slot in node.sealed_slots() if slot.hashed]
        if hashed:
            self.damaged = True
            _segment, slot = max(hashed, key=lambda found: found[1].at)
            slot.parts[-1] = slot.parts[-1][:-1] + b"!"

    def _damage_store(self, _node: Node, fault: Fault) -> None:
        """Flip a bit in a shard of each of the newest checkpoints, as many as `count` says."""
        checkpoints = self._world.truth.checkpoints()
        for at in sorted(checkpoints, reverse=True)[: fault.count]:
            self.damaged = True
            self._world.store.damage(checkpoints[at].shards[-1].key)


# ---------------------------------------------------------------------- schedules


def make_schedule(seed: int, setting: Setting, kinds: Sequence[str], most: int) -> list[Fault]:
    """A random schedule. The same seed gives the same one."""
    dice = random.Random(f"{seed}/schedule")
    return [_random_fault(dice, setting, kinds) for _ in range(dice.randint(1, most))]


_EFFECTS = (
    "agent put commits/", "agent put generations/", "agent put steps/", "agent put plans/", "agent get generations/",
    "agent delete", "agent list", "agent read", "agent hash", "agent choose", "agent enter", "agent unpin",
    "agent size", "agent get commits/", "trainer begin", "trainer fill", "trainer seal", "trainer optimizer",
    "trainer vector", "trainer loaded", "trainer gradients",
)  # fmt: skip


def _random_fault(dice: random.Random, setting: Setting, kinds: Sequence[str]) -> Fault:
    kind = dice.choice(list(kinds))
    horizon_s = 1.5 * setting.steps * setting.step_s + 10.0
    fault = Fault(kind=kind, node=dice.randrange(setting.nodes * setting.launches))
    seconds = {
        "stop_node": dice.choice([1.0, 8.0, 40.0, 200.0]),
        "stop_agent": dice.choice([1.0, 8.0, 40.0, 200.0]),
        "cut": dice.choice([2.0, 15.0, 60.0]),
        "notice": dice.choice([2.0, 5.0, 30.0]),
        "clock": dice.choice([-86400.0, -30.0, 30.0, 86400.0]),
    }.get(kind, 0.0)
    if dice.random() < 0.5 and kind != "clock":
        effect, count = dice.choice(_EFFECTS), dice.choice([1, 1, 2, 3, 5, 9])
        return replace(fault, effect=effect, count=count, side=dice.choice(["before", "after"]), seconds=seconds)
    return replace(fault, at_s=round(dice.uniform(0.0, horizon_s), 2), seconds=seconds)


def shrink(schedule: Sequence[Fault], fails: Callable[[list[Fault]], bool]) -> list[Fault]:
    """A schedule of which no single fault can be left out. `fails` says whether a schedule still shows the failure."""
    kept = list(schedule)
    size = max(1, len(kept) // 2)
    while True:
        for start in range(0, len(kept), size):
            fewer = kept[:start] + kept[start + size :]
            if fails(fewer):
                kept = fewer
                break
        else:
            if size == 1:
                return kept
            size = max(1, size // 2)
        size = min(size, max(1, len(kept)))


def as_test(setting: object, seed: int, schedule: Sequence[Fault], why: str) -> str:
    """A failing schedule as lines that can be pasted into a test."""
    faults = "".join(f"        {fault},\n" for fault in schedule)
    return f"# {why}\nWorld(\n    {setting!r},\n    {seed},\n    [\n{faults}    ],\n).run()"
