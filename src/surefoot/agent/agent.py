"""The node agent: owns the run's memory on this machine and everything that leaves it. No torch in here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from surefoot.agent.clients.dispatch import Dispatch
from surefoot.agent.clients.pins import Pins
from surefoot.agent.clients.server import Server
from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.evict.newest import NewestInMemory
from surefoot.agent.frozen.files import FrozenFiles
from surefoot.agent.frozen.transfer import FrozenSaver, FrozenStart
from surefoot.agent.journal import Journal
from surefoot.agent.memory.hasher import Hasher
from surefoot.agent.memory.memory import Memory
from surefoot.agent.memory.planning import Planner
from surefoot.agent.memory.replicas import Replicas
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peer_drives import PeerDrives
from surefoot.agent.nodes.peers import Peers
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.clock import SaveClock
from surefoot.agent.save.commits import Commits
from surefoot.agent.save.pacer import Pacer
from surefoot.agent.save.pipeline import Pipeline
from surefoot.agent.save.retention import Retention
from surefoot.agent.save.shipping import Shipper
from surefoot.agent.start.choosing import Starter
from surefoot.agent.start.loading import Loader
from surefoot.agent.start.needs import NeedsOfTrainers
from surefoot.agent.start.opening import Opening
from surefoot.agent.status import Status
from surefoot.core.documents import Fields
from surefoot.core.plan import Plan
from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED, SUPERSEDED
from surefoot.host.clock import boot_s, wall_s
from surefoot.ipc.board import Board, NodeWord, Phase, RankWord
from surefoot.ipc.home import Home
from surefoot.ipc.wire import Body
from surefoot.launch.config import AgentConfig
from surefoot.notices.base import NoticeSource
from surefoot.notices.file import FileNotice
from surefoot.records.records import Records
from surefoot.tiers.base import Tier

_DRAIN_S = 900.0
"""Bound on finishing what is under way when everybody has left."""
_AGE_LIMIT_S = 600.0
_AGE_LOOK_S = 5.0
_SETTLED_WITHIN_S = 10.0
"""For an agent that replaces another to be among the other nodes' agents again."""
_REPORTED_WITHIN_S = 10.0
"""For the other nodes' trainers to end once this one's have; what their agents report later counts all the same."""
_IDLE_S = 5.0
"""A process that left the run but lives on (a notebook) may come again within this."""


class _Over(Exception):  # noqa: N818 - not an error: the way out of a task group
    """The launch is over."""


class Agent:
    """One run on one node, from the first connection to the last byte shipped. Puts the parts together."""

    def __init__(
        self, config: AgentConfig, home: Home, records: Records, disks: Tier | None, journal: Journal, board: Board
    ) -> None:
        self._config = config
        self._home = home
        self._records = records
        self._disks = disks
        self._journal = journal
        self._status = Status(board, journal)
        self._memory = Memory(home, self._bad_memory)
        self._membership = Membership(records.tier, home.run, _node_name(config), self.spawn, self._say, self._note)
        self._membership.on_dead = self._node_dead
        self._membership.hear("stop", self._hear_stop)
        self._relay = Relay(self._membership, board)
        self._trainers = Trainers(board, lambda: self._opening.trainers_complete(), self._trainer_gone)
        self._pins = Pins(self._trainers)
        pacer = Pacer(config.cadence.max_bytes_per_s)
        pipeline = Pipeline(records, disks, pacer, self._status.set_phase)
        frozen_files = FrozenFiles(records, disks, journal)
        self._frozen = FrozenSaver(self._trainers, frozen_files, pacer, journal, self.spawn)
        needs = NeedsOfTrainers(self._trainers)
        retention = Retention(records, disks, frozen_files, journal)
        self._replicas = Replicas(home, self._membership, self._memory, self._say)
        peers = Peers(self._membership, self._memory, self._replicas)
        commits = Commits(self._membership, records, pipeline)
        self._clock = SaveClock(self._membership, self._frozen, board, journal, config.cadence)
        self._shipper = Shipper(
            self._membership,
            self._memory,
            pipeline,
            commits,
            self._pins,
            retention,
            self._frozen,
            journal,
            self._status,
            self._clock,
            disks is not None,
            self.spawn,
        )
        self._newest_in_memory = NewestInMemory(
            self._membership,
            peers,
            self._memory,
            self._replicas,
            commits,
            self._pins,
            self._shipper,
            self._status,
            journal,
            self.spawn,
        )
        self._hasher = Hasher(self._memory, self._shipper.pinned, self._replicas.hashed)
        planner = Planner(
            self._membership, self._memory, journal, config.num_slots, self._shipper.pinned, self._planned, self.spawn
        )
        self._eviction = Eviction(
            self._membership, self._trainers, self._memory, self._shipper, self._newest_in_memory, self._status, journal
        )
        self._dispatch = Dispatch(
            self._membership,
            self._relay,
            self._trainers,
            self._memory,
            planner,
            self._pins,
            self._shipper,
            self._newest_in_memory,
            self._hasher,
            self._eviction,
            self._frozen,
            needs,
            self._status,
            journal,
            config.grace_s,
            self,
        )
        loader = Loader(
            self._membership,
            peers,
            records,
            disks,
            self._memory,
            FrozenStart(self._trainers, frozen_files, journal),
            needs,
            PeerDrives(self._membership, disks, self._say),
            journal,
        )
        starter = Starter(self._membership, peers, records, loader, journal, config.launch, config.node, config.resume)
        self._opening = Opening(
            home.run,
            self._membership,
            self._relay,
            self._trainers,
            starter,
            self._memory,
            self._shipper,
            self._clock,
            self._status,
            journal,
            self._dispatch.refusal,
            self.spawn,
        )
        self._sources: list[NoticeSource] = [FileNotice(config.watch)] if config.watch is not None else []
        self._group: asyncio.TaskGroup | None = None

    async def run(self, ready: Callable[[Path, Path], None]) -> int:
        """Serve until the launch is over and everything that can be safe is. Returns the launch's exit code."""
        await self._adopt()
        server = Server(self._home.socket, self._dispatch.converse)
        code = FINISHED
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                server.listen()
                for work in (
                    server.serve(group),
                    self._hasher.run(),
                    self._shipper.run(),
                    self._clock.run(),
                    self._journal.keep_uploading(),
                    self._opening.run(),
                    self._opening.name_the_missing(),
                    self._watch_age(),
                    self._obey_superseding(),
                    self._watch_supervisor(),
                    *(self._watch(source) for source in self._sources),
                ):
                    group.create_task(work)
                ready(self._home.socket, self._home.board)
                code = await self._until_over()
                raise _Over
        except* _Over:
            # Raised inside the group, so that everything still running in it ends with the agent.
            pass
        await self._close(code)
        return code

    # ------------------------------------------------------------------ beginning and end

    async def _adopt(self) -> None:
        """Take over what an earlier agent of this run left on this machine."""
        adopted = self._memory.adopt_files()
        self._replicas.adopt()
        restart = self._home.previous_launch == self._config.launch
        self._journal.record("agent_started", adopted=adopted, restart=restart)
        status, board = self._status, self._status.board
        status.note_end()
        # The phase first: what lies there is what the agent before this one died of.
        board.set_node(NodeWord.PHASE, Phase.IDLE)
        board.set_node(NodeWord.AGENT_PID, os.getpid())
        if restart:
            await self._continue(board)
            self._eviction.resume_notice()
        else:
            for word in (NodeWord.NOTICE, NodeWord.SUPERSEDED, NodeWord.DEADLINE_NS, NodeWord.COMMITTED_NS):
                board.set_node(word, 0)
        self._clock.restart()

    async def _continue(self, board: Board) -> None:
        number = board.node(NodeWord.GENERATION)
        if not number:
            return
        if board.node(NodeWord.OTHERS):
            self._membership.replaces_one()
        generation = await self._records.generation(number)
        self._status.enter(generation, generation.parent.at if generation.parent is not None else None)
        newest, step = board.node(NodeWord.COMMITTED) - 1, board.node(NodeWord.COMMITTED_STEP) - 1
        there = (replace(at, step=step) for at in await self._records.commits() if at.boundary == newest)
        self._status.committed = max(there, default=None)
        self._status.committed_tier = self._records.tier.name

    async def _until_over(self) -> int:
        """Wait for the launch's end, whichever it is, and see it through."""
        over = asyncio.create_task(self._launch_over())
        evicted = asyncio.create_task(self._eviction.see_through())
        superseded = asyncio.create_task(self._status.superseded.wait())
        tasks = (over, evicted, superseded)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if superseded.done():
                code = SUPERSEDED
                await self._trainers.gone(10.0)
            elif evicted.done():
                await self._eviction.clear_trainers()
                code = EVICTED if evicted.result() or self._status.is_safe() else EVICTED_UNSAVED
                code = FINISHED if self._status.finished else code
            else:
                code = FINISHED
                await self._drain()
            await self._trainers.stopped()
        finally:
            for task in tasks:
                task.cancel()
        await self._part_from_supervisor(code)
        return code

    async def _launch_over(self) -> None:
        """Wait until nobody will start or continue training here."""
        if self._config.supervised:
            await self._dispatch.supervisor_done.wait()
            if not await self._trainers.gone(2.0):
                self._trainers.stop_all()
                await self._trainers.gone(10.0)
            return
        owner = asyncio.create_task(_process_gone(self._config.owner_pid))
        idle = asyncio.create_task(self._trainers.idle_for(_IDLE_S))
        try:
            await asyncio.wait((owner, idle), return_when=asyncio.FIRST_COMPLETED)
        finally:
            owner.cancel()
            idle.cancel()
        if owner.done() and not owner.cancelled():
            await self._trainers.gone(10.0)

    async def _part_from_supervisor(self, code: int) -> None:
        if not self._dispatch.has_supervisor:
            return
        await self._dispatch.tell_supervisor({"op": "drained", "code": code})
        try:
            async with asyncio.timeout(10.0):
                await self._dispatch.supervisor_done.wait()
        except TimeoutError:
            return

    async def _drain(self) -> None:
        """Everybody left: make the newest image durable if it is not, and finish what is under way."""
        self.draining()
        await self._shipper.drop_incomplete()
        await self._membership.settled(_SETTLED_WITHIN_S)
        if self._status.has_generation:
            waits = self._shipper.busy() or not self._newest_in_memory.all_durable()
            await self._newest_in_memory.report_left(
                self._status.generation.number, _REPORTED_WITHIN_S if waits else 0.0
            )
        # Else there is nothing to ask for, of a leader that may have left in as good order.
        if not self._newest_in_memory.all_durable():
            await self._newest_in_memory.ship_newest("agent")
        end_s = boot_s() + _DRAIN_S
        while (self._shipper.busy() or self._newest_in_memory.busy()) and boot_s() < end_s:
            await self._shipper.something(0.5 if self._shipper.busy() else 0.02)

    async def _close(self, code: int) -> None:
        await self._journal.close(2.0)
        self._memory.close()
        await self._records.tier.close()
        if self._disks is not None:
            await self._disks.close()
        # Memory that holds a step which is nowhere else stays for the next launch to adopt.
        if code != EVICTED_UNSAVED and (self._status.superseded_by is not None or self._newest_in_memory.all_durable()):
            self._home.remove()
        if self._config.note is not None:
            await asyncio.to_thread(Path(self._config.note).unlink, missing_ok=True)
        self._home.release()

    # ------------------------------------------------------------------ what goes on beside

    def _planned(self, plan: Plan) -> None:
        self._hasher.set_plan(plan)
        self._replicas.forget()
        self._frozen.planned(plan)

    def _trainer_gone(self, trainer: Trainer) -> None:
        self._frozen.trainer_gone(trainer)
        status = self._status
        if not self._trainers.live:
            status.note_end()
            self._dispatch.trainers_gone()
        if (trainer.leaving and not trainer.failed) or trainer.stopping:
            return
        step = max(0, status.board.rank(trainer.local_rank, RankWord.STEP) - 1)
        self._journal.record("trainer_lost", rank=trainer.rank, pid=trainer.pid, step=step)
        # The other nodes' ranks would wait for it in a collective until that times out.
        self._membership.tell_on({"op": "stop", "why": f"rank {trainer.rank} died"})
        self._stop_trainers(f"rank {trainer.rank} died")

    def _hear_stop(self, node: str, body: Body) -> None:
        self._stop_trainers(f"{Fields(body, 'stop').text('why')} on node {node}")

    def _node_dead(self, node: str) -> None:
        self._stop_trainers(f"node {node} is gone")

    def _stop_trainers(self, why: str) -> None:
        trainers = self._trainers.live
        if any(trainer.hello.get("round", "") != self._membership.round for trainer in trainers):
            # Others than those of the round that this is about.
            return
        ranks = self._trainers.stop_all()
        if ranks:
            self._journal.record("stopped", ranks=ranks, why=why)

    def _note(self, what: str) -> None:
        self._journal.record("mesh", what=what)

    def _say(self, what: str) -> None:
        self._journal.record("warning", what=what)

    async def _watch_supervisor(self) -> None:
        # By its process, not by its connection: it may die before it connects.
        if self._config.supervised:
            await _process_gone(self._config.owner_pid)
            await self._dispatch.supervisor_lost()

    async def _obey_superseding(self) -> None:
        await self._status.superseded.wait()
        self._trainers.stop_all()

    async def _watch(self, source: NoticeSource) -> None:
        notice = await source.wait()
        self._eviction.notice(notice.source, notice.grace_s or self._config.grace_s)

    async def _watch_age(self) -> None:
        """Say so, once a while, when the newest durable checkpoint has grown too old."""
        limit_s = max(_AGE_LIMIT_S, 3 * (self._config.cadence.interval_s or 300.0))
        began_s = said_s = boot_s()
        while True:
            await asyncio.sleep(_AGE_LOOK_S)
            # Without any, the age is that of the wait for the first.
            age_s = self._status.durable_age_s() or boot_s() - began_s
            if self._trainers.live and age_s > limit_s and boot_s() - said_s > limit_s:
                said_s = boot_s()
                committed = self._status.committed
                self._journal.record(
                    "durable_age",
                    age_s=round(age_s, 1),
                    step=committed.step if committed else None,
                    tier=self._status.committed_tier,
                )

    # ------------------------------------------------------------------ what parts ask of the whole

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something that the agent's end ends."""
        assert self._group is not None
        return self._group.create_task(work)

    def draining(self) -> None:
        """From here on a newcomer waits for this agent's end instead of being refused."""
        self._home.set_draining()

    def status(self) -> Body:
        """For `surefoot status`."""
        board, status = self._status.board, self._status
        noticed = bool(board.node(NodeWord.NOTICE))
        return {
            "run": self._home.run,
            "uri": self._records.tier.uri,
            "launch": self._config.launch,
            "generation": board.node(NodeWord.GENERATION),
            "ranks": [
                {
                    "rank": trainer.rank,
                    "pid": trainer.pid,
                    "finished": max(0, board.rank(trainer.local_rank, RankWord.STEP) - 1),
                    "phase": Phase(board.rank(trainer.local_rank, RankWord.PHASE)).name.lower(),
                }
                for trainer in self._trainers.live
            ],
            "committed": status.committed and status.committed.step,
            "tier": status.committed_tier,
            "durable_age_s": status.durable_age_s(),
            "notice": noticed,
            "deadline_in_s": board.node(NodeWord.DEADLINE_NS) / 1e9 - boot_s() if noticed else None,
            "time": wall_s(),
            **self._shipper.status(),
        }

    def _bad_memory(self, what: str, why: str) -> None:
        self._journal.record("quarantined", object=what, tier="ram", why=why)


def _node_name(config: AgentConfig) -> str:
    """Unlike that of any other node, and the same for the agent that replaces this one."""
    host = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in config.node).lstrip("._-")
    return f"{host[:100] or 'node'}-{config.launch[:12]}"


async def _process_gone(pid: int) -> None:
    """Wait for the end of a process; at once if it is gone, or if there is none to wait for."""
    try:
        pidfd = os.pidfd_open(pid) if pid else -1
    except ProcessLookupError:
        return
    if pidfd < 0:
        return
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
