"""The world: nodes, a launcher that forms rounds, a store, a network, faults, and the observer.

The launcher is what torch's elastic launcher is to the real agents: it ends a round when a member dies, is gone for
long, or fails, and forms the next from what it can reach. It decides nothing about checkpoints.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from sim_agent import Brain
from sim_faults import Fault, Faults
from sim_kernel import Kernel, Process, Request, Violation
from sim_node import Network, Node, Words
from sim_policy import REAL, Policy
from sim_store import Store, Stored
from sim_trainer import Group, Trainer
from sim_truth import Truth

from surefoot.core.recovery import Copy
from surefoot.errors import ObjectMissingError, TierError


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a world is like. Times in seconds of the simulation."""

    nodes: int = 3
    ranks_per_node: int = 1
    steps: int = 12
    launches: int = 1
    second_launch_s: float = 15.0
    step_s: float = 1.0
    copy_s: float = 0.1
    ship_s: float = 0.4
    start_s: float = 1.0
    save_gap_s: float = 1.0
    keep_every_s: float = 4.0
    sweep_s: float = 15.0
    slots: int = 3
    every: int = 1
    strict: bool = True
    saves: tuple[int, ...] = ()
    evaluates_after: int = 0
    """After the boundary of this step rank 0 evaluates for a minute; the others wait in a collective."""
    loss: float = 0.02
    delay_s: float = 0.05
    outage: float = 0.0
    """Share of the store's answers that are errors."""
    replace_after_s: float = 20.0
    """A machine that died is replaced after this, with empty memory."""
    patience_s: float = 600.0
    """After the last fault everything must be done within this, and a step's time for each step."""


@dataclass(eq=False)
class Round:
    """One trainers: the nodes and ranks that the launcher put together."""

    members: list[Node]
    ranks_per_node: int
    trainers: list[Trainer] = field(default_factory=list)
    agents: list[tuple[Node, Process]] = field(default_factory=list)
    began_s: float = 0.0
    lonely_s: float = 0.0

    @property
    def size(self) -> int:
        return len(self.members) * self.ranks_per_node

    def ranks_of(self, node: Node) -> list[int]:
        first = self.members.index(node) * self.ranks_per_node
        return list(range(first, first + self.ranks_per_node))


@dataclass(eq=False)
class Launch:
    """One `surefoot run` over some nodes."""

    name: str
    nodes: list[Node]
    round: Round | None = None
    rounds: int = 0
    not_before_s: float = 0.0
    over: str = ""
    """Why it ended: finished or superseded."""


class World:
    """Builds everything and runs it."""

    def __init__(self, setting: Setting, seed: int, faults: list[Fault], policy: Policy = REAL) -> None:
        self.setting = setting
        self.policy = policy
        self.seed = seed
        self.kernel = Kernel(seed)
        self.store = Store()
        self.network = Network(self.kernel, setting.loss, setting.delay_s)
        dice = random.Random(f"{seed}/clocks")
        self.nodes: list[Node] = []
        self.launches: list[Launch] = []
        for number in range(setting.launches):
            nodes = [
                Node(number * setting.nodes + n, f"launch{number}", dice.uniform(0.98, 1.02))
                for n in range(setting.nodes)
            ]
            self.nodes.extend(nodes)
            self.launches.append(Launch(f"launch{number}", nodes, not_before_s=number * setting.second_launch_s))
        self.truth = Truth(self.store, self.nodes)
        self.boundaries: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.uneven = False
        """A step was skipped, or one rank's structure changed alone: memory may be behind for longer."""
        self.faults = Faults(self, faults)
        self._groups: dict[int, Group] = {}
        self._dice: dict[str, random.Random] = {}
        self._fresh = 0
        self._over = 0
        self._outages = random.Random(f"{seed}/outages")
        self.kernel.hook = self.faults.at_effect
        self.kernel.rate = lambda node: self.nodes[node].rate
        self.kernel.fails = self._fate

    def run(self) -> None:
        """Run to the end.

        Raises:
            Violation: an invariant does not hold, or the run is stuck.
        """
        for node in self.nodes:
            self.start_agent(node)
        for launch in self.launches:
            self._look_after(launch)
        self.faults.start()
        setting = self.setting
        self.end_s = self.faults.quiet_after_s + setting.patience_s + 4 * setting.steps * setting.step_s
        if not self.kernel.run(self.end_s, self.is_over):
            raise Violation(f"stuck: {self._where()}")
        self.truth.check_all()
        if self.truth.newest_durable() < self.setting.steps and not self.faults.damaged:
            raise Violation(f"finished, but only step {self.truth.newest_durable()} is durable")

    def is_over(self) -> bool:
        return self._over == len(self.launches)

    def _end(self, launch: Launch, how: str) -> None:
        if not launch.over:
            launch.over = how
            self._over += 1

    def _where(self) -> str:
        return "; ".join(
            f"{launch.name} {launch.over or 'goes on'}, round {launch.rounds} of "
            f"{[n.name for n in launch.round.members] if launch.round else None}, at "
            f"{[(t.rank, t.step, t.generation) for t in launch.round.trainers][:4] if launch.round else None}"
            for launch in self.launches
        )

    # ------------------------------------------------------------------ what actors use

    def group(self, generation: int, size: int) -> Group:
        if generation not in self._groups:
            self._groups[generation] = Group(self, size)
        return self._groups[generation]

    def rng_of(self, process: Process) -> random.Random:
        if process.name not in self._dice:
            self._dice[process.name] = random.Random(f"{self.seed}/{process.name}")
        return self._dice[process.name]

    def fresh(self) -> int:
        self._fresh += 1
        return self._fresh

    def drifts(self, generation: int, step: int, rank: int) -> bool:
        return self.faults.drifts(generation, step, rank)

    def read_copy(self, reader: Node, copy: Copy) -> Request:
        """A request for one copy's bytes, wherever they lie."""
        if isinstance(copy, Stored):
            return self.store.get(copy.node)
        return Request(f"read {copy.node}", lambda: self._read_memory(reader, copy), 0.05)

    def _read_memory(self, reader: Node, copy: Copy) -> bytes:
        node = next(node for node in self.nodes if node.name == copy.node)
        gone = not node.up or node.agent is None or not node.agent.alive or node.agent.stopped
        if gone or not self.network.reaches(reader.index, node.index):
            raise TierError(f"{node.name} does not answer")
        for segment, slot in node.sealed_slots():
            if (segment.plan, segment.rank, slot.at) == (copy.plan, copy.rank, copy.at):
                return slot.data()
        raise ObjectMissingError(f"{copy.at} on {node.name}")

    def _fate(self, _process: Process, label: str) -> str | None:
        if self.setting.outage and not label.startswith("read ") and self._outages.random() < self.setting.outage:
            return self._outages.choice(["lost", "unheard"])
        return None

    # ------------------------------------------------------------------ agents

    def start_agent(self, node: Node) -> None:
        node.booted += 1
        process = Process("agent", f"{node.name}.agent{node.booted}", node.index)
        process.on_death = lambda: self._agent_died(node, process)
        node.agent = process
        # Uploads of the one before ended with it.
        for segment in node.segments:
            for slot in segment.slots:
                slot.readers = 0
        launch = self._launch_of(node)
        round_ = launch.round if launch.round is not None and node in launch.round.members else None
        node.brain = Brain(self, node, process, round_)
        node.brain.start()
        self.kernel.touch(node.index)

    def _agent_died(self, node: Node, process: Process) -> None:
        def again() -> None:
            if node.up and node.agent is process and not self._launch_of(node).over:
                self.start_agent(node)

        self.kernel.after(0.5 + self.rng_of(process).random(), again)

    def _launch_of(self, node: Node) -> Launch:
        return next(launch for launch in self.launches if launch.name == node.launch)

    def superseded(self, node: Node) -> None:
        """An agent found that a newer launch owns the run: its launcher does not start again."""
        launch = self._launch_of(node)
        if not launch.over:
            self._end(launch, "superseded")
            self._end_round(launch)

    # ------------------------------------------------------------------ the launcher

    def _look_after(self, launch: Launch) -> None:
        if launch.over:
            return
        if launch.round is None:
            self._form(launch)
        else:
            self._judge(launch, launch.round)
        self.kernel.after(0.5, lambda: self._look_after(launch))

    def _form(self, launch: Launch) -> None:
        if self.kernel.now < launch.not_before_s:
            return
        turned = launch.nodes[launch.rounds % len(launch.nodes) :] + launch.nodes[: launch.rounds % len(launch.nodes)]
        members: list[Node] = []
        for node in turned:
            if self._is_usable(node) and all(self.network.reaches(node.index, m.index) for m in members):
                members.append(node)
        if not members:
            return
        launch.rounds += 1
        for node in members:
            # What a cut or a pause kept alive of an older round ends before the node joins a newer one.
            for trainer in list(node.trainers.values()):
                self.kernel.kill(trainer)
        round_ = Round(members, self.setting.ranks_per_node, began_s=self.kernel.now)
        launch.round = round_
        for node in members:
            node.board.ranks = {}
            node.board.need_slot = False
            node.trainers = {}
            for rank in round_.ranks_of(node):
                self._start_trainer(launch, round_, node, rank)
        for node in members:
            assert node.agent is not None
            round_.agents.append((node, node.agent))
            node.brain.assign(round_)

    def _start_trainer(self, launch: Launch, round_: Round, node: Node, rank: int) -> None:
        process = Process("trainer", f"{node.name}.r{rank}.{launch.rounds}", node.index)
        node.trainers[rank] = process
        trainer = Trainer(self, node, process, rank, round_)
        round_.trainers.append(trainer)
        self.kernel.spawn(process, "main", trainer.run())

    def _is_usable(self, node: Node) -> bool:
        leaving = node.brain is not None and node.name in node.brain.notices
        return node.up and not node.stopped and not leaving and node.agent is not None and node.agent.alive

    def _judge(self, launch: Launch, round_: Round) -> None:
        """Finished, failed, or going on?"""
        if all(trainer.ended == "finished" for trainer in round_.trainers):
            self._end(launch, "finished")
            return
        died = any(not t.process.alive and not t.ended for t in round_.trainers)
        evicted = all(trainer.ended for trainer in round_.trainers)
        first = round_.members[0].index
        lonely = any(n.stopped or not self.network.reaches(n.index, first) for n in round_.members)
        round_.lonely_s = round_.lonely_s + 0.5 if lonely else 0.0
        starting = any(trainer.generation == 0 for trainer in round_.trainers)
        # An agent that is lost while it lets trainers start takes what it knew of them along.
        agentless = starting and any(n.agent is not agent or not agent.alive for n, agent in round_.agents)
        too_long = starting and self.kernel.now - round_.began_s > 60.0
        if died or evicted or round_.lonely_s > 6.0 or agentless or too_long:
            self._end_round(launch)

    def _end_round(self, launch: Launch) -> None:
        round_ = launch.round
        launch.round = None
        launch.not_before_s = self.kernel.now + 1.0
        if round_ is None:
            return
        for trainer in round_.trainers:
            node = trainer.node
            # Nobody can end what does not run, or cannot be reached: it wakes up some day, and must do no harm.
            if not node.stopped and self.network.reaches(node.index, round_.members[0].index):
                self.kernel.kill(trainer.process)
        for node in round_.members:
            self.kernel.touch(node.index)

    # ------------------------------------------------------------------ machines

    def power_off(self, node: Node) -> None:
        """A machine and its memory are gone; another takes its place later."""
        if not node.up:
            return
        node.up = False
        for process in list(node.processes()):
            process.stopped = False
            self.kernel.kill(process)
        node.segments, node.board = [], Words()
        self.kernel.after(self.setting.replace_after_s, lambda: self._replace(node))

    def _replace(self, node: Node) -> None:
        node.up, node.trainers = True, {}
        self.network.cut_off.discard(node.index)
        if not self._launch_of(node).over:
            self.start_agent(node)

    def heal(self) -> None:
        """A link is back: collectives that waited for it go on."""
        for group in self._groups.values():
            self.kernel.touch(group.place)

    def statistics(self) -> dict[str, Any]:
        return {"effects": self.kernel.effects, "generations": len(self.truth.generations), "at_s": self.kernel.now}
