"""The node agent: owns the run's memory on this machine and everything that leaves it. No torch in here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from surefoot.agent.clients.checks import Checks
from surefoot.agent.clients.commands import Commands
from surefoot.agent.clients.dispatch import Dispatch
from surefoot.agent.clients.leaving import Leaving
from surefoot.agent.clients.pins import Pins
from surefoot.agent.clients.server import Server
from surefoot.agent.clients.supervisor import Supervisor
from surefoot.agent.clients.trainers import Trainers
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.evict.newest import NewestInMemory
from surefoot.agent.frozen.files import FrozenFiles
from surefoot.agent.frozen.transfer import FrozenSaver, FrozenStart
from surefoot.agent.journal import Journal
from surefoot.agent.memory.hasher import Hasher
from surefoot.agent.memory.memory import Memory
from surefoot.agent.memory.planning import Planner
from surefoot.agent.memory.replicas import Replicas
from surefoot.agent.node import Node
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peer_drives import PeerDrives
from surefoot.agent.nodes.peers import Peers
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.clock import SaveClock
from surefoot.agent.save.commits import Commits
from surefoot.agent.save.pacer import Pacer
from surefoot.agent.save.pipeline import Pipeline
from surefoot.agent.save.retention import Retention
from surefoot.agent.save.sealing import Sealing
from surefoot.agent.save.shipping import Shipper
from surefoot.agent.start.choosing import Starter
from surefoot.agent.start.loading import Loader
from surefoot.agent.start.needs import NeedsOfTrainers
from surefoot.agent.start.opening import Opening
from surefoot.agent.status import Status
from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED, SUPERSEDED
from surefoot.host.clock import boot_s
from surefoot.ipc.board import Board, NodeWord, Phase
from surefoot.ipc.home import Home
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
        self._tasks = tasks = asyncio.TaskGroup()

        # Who is here and what is known.
        self._status = Status(board, journal)
        self._memory = Memory(home, self._bad_memory)
        spawn = tasks.create_task
        self._membership = Membership(records.tier, home.run, _node_name(config), spawn, self._say, self._note)
        self._trainers = Trainers(board)
        node = Node(self._membership, self._trainers, self._memory, self._status, journal, tasks)
        relay = Relay(self._membership, board)
        pins = Pins(self._trainers)
        self._replicas = Replicas(home, self._membership, self._memory, self._say)
        peers = Peers(self._membership, self._memory, self._replicas)

        # What leaves this node.
        pacer = Pacer(config.cadence.max_bytes_per_s)
        pipeline = Pipeline(records, disks, pacer, self._status.set_phase)
        frozen_files = FrozenFiles(records, disks, journal)
        frozen = FrozenSaver(node, frozen_files, pacer)
        retention = Retention(records, disks, frozen_files, journal)
        commits = Commits(self._membership, records, pipeline)
        self._clock = SaveClock(self._membership, frozen, board, journal, config.cadence)
        self._shipper = Shipper(node, pipeline, commits, pins, retention, frozen, self._clock)
        self._hasher = Hasher(self._memory, self._shipper.pinned, self._replicas.hashed)
        Sealing(node, relay, self._shipper, self._hasher)

        # Before an image: whether all must plan again, and the plan.
        Checks(self._membership, self._trainers, self._status, journal, spawn)
        on_planned = (self._hasher.set_plan, lambda _plan: self._replicas.forget(), frozen.planned)
        Planner(node, config.num_slots, self._shipper.pinned, on_planned)

        # The end, announced or not.
        self._newest_in_memory = NewestInMemory(node, peers, self._replicas, commits, pins, self._shipper)
        self._eviction = Eviction(node, self._shipper, self._newest_in_memory, config.grace_s)
        self._supervisor = Supervisor(node, home, self._eviction)
        Leaving(node, home, relay, self._shipper, self._eviction, self._supervisor)

        # The start.
        needs = NeedsOfTrainers(self._trainers)
        frozen_start = FrozenStart(self._trainers, frozen_files, journal)
        drives = PeerDrives(self._membership, disks, self._say)
        loader = Loader(self._membership, peers, records, disks, self._memory, frozen_start, needs, drives, journal)
        starter = Starter(self._membership, peers, records, loader, journal, config.launch, config.node, config.resume)
        self._opening = Opening(home.run, node, relay, starter, self._shipper, self._clock, self._eviction)

        about = {"run": home.run, "uri": records.tier.uri, "launch": config.launch}
        commands = Commands(node, self._shipper, self._eviction, about)
        self._dispatch = Dispatch(node, self._eviction, self._supervisor, commands)
        self._sources: list[NoticeSource] = [FileNotice(config.watch)] if config.watch is not None else []

    async def run(self, ready: Callable[[Path, Path], None]) -> int:
        """Serve until the launch is over and everything that can be safe is. Returns the launch's exit code."""
        await self._adopt()
        server = Server(self._home.socket, self._dispatch.converse)
        code = FINISHED
        try:
            async with self._tasks as group:
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
        await self._supervisor.part(code)
        return code

    async def _launch_over(self) -> None:
        """Wait until nobody will start or continue training here."""
        if self._config.supervised:
            await self._supervisor.done.wait()
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

    async def _drain(self) -> None:
        """Everybody left: make the newest image durable if it is not, and finish what is under way."""
        # From here on a newcomer waits for this agent's end instead of being refused.
        self._home.set_draining()
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

    def _note(self, what: str) -> None:
        self._journal.record("mesh", what=what)

    def _say(self, what: str) -> None:
        self._journal.record("warning", what=what)

    async def _watch_supervisor(self) -> None:
        # By its process, not by its connection: it may die before it connects.
        if self._config.supervised:
            await _process_gone(self._config.owner_pid)
            await self._supervisor.lost()

    async def _obey_superseding(self) -> None:
        await self._status.superseded.wait()
        self._trainers.stop_all()

    async def _watch(self, source: NoticeSource) -> None:
        notice = await source.wait()
        self._eviction.notice(notice.source, notice.grace_s)

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
