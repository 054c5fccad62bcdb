"""Keeps the trainers of this node: which of them are alive, and how they are ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from surefoot.agent.clients.server import Link
from surefoot.core.documents import Fields
from surefoot.errors import AgentError, UsageError
from surefoot.ipc.board import Board, Phase, RankWord
from surefoot.ipc.wire import Body

STOP_WITHIN_S = 2.0
"""Time for a trainer's watcher thread to leave before SIGKILL. torchrun's own way of ending trainers takes 30 s."""


@dataclass(slots=True, eq=False)
class Trainer:
    """One live trainer."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    incarnation: int
    pid: int
    pidfd: int
    link: Link
    hello: Body
    leaving: bool = False
    """True once it has said goodbye: its end is not a loss."""
    failed: bool = False
    """True if it said goodbye because of an error of its own: the others cannot go on without it."""
    left: bool = False
    """True once it closed its connection after its goodbye; its process may live on and connect again."""
    stopping: bool = False
    answers: dict[str, asyncio.Future[Body]] = field(default_factory=dict)


class Trainers:
    """Registers trainers, notices their death at once, and ends them all when one is lost.

    Death is seen by pidfd: a forked child that inherited the socket would hide it from an end-of-stream.
    """

    def __init__(self, board: Board, on_complete: Callable[[], None], on_gone: Callable[[Trainer], None]) -> None:
        self._board = board
        self._on_complete = on_complete
        self._on_gone = on_gone
        self._by_rank: dict[int, Trainer] = {}
        self._launcher_pidfd = -1
        self.changed = asyncio.Event()
        """Set whenever a trainer came or went."""

    @property
    def live(self) -> list[Trainer]:
        """Live trainers in rank order."""
        return [self._by_rank[rank] for rank in sorted(self._by_rank)]

    @property
    def complete(self) -> bool:
        live = self.live
        return bool(live) and len(live) == live[0].local_world_size

    def of_rank(self, rank: int) -> Trainer | None:
        return self._by_rank.get(rank)

    def register(self, link: Link, hello: Body) -> Trainer:
        """Take in a trainer, or a trainer's new connection after the agent was replaced.

        Raises:
            UsageError: its rank is taken, or its world is another than its neighbours'.
        """
        fields = Fields(hello, "hello")
        rank = fields.integer("rank")
        taken = self._by_rank.get(rank)
        if taken is not None and taken.incarnation == fields.integer("incarnation"):
            taken.link = link
            return taken
        if taken is not None and taken.left and taken.pid == link.pid:
            self._forget(taken)
        elif taken is not None:
            raise UsageError(
                f"rank {rank} of this run is already being trained on this machine by process {taken.pid}; "
                "end that one first, or give this run another place"
            )
        trainer = self._new_trainer(link, hello, fields, rank)
        for other in self._by_rank.values():
            if other.world_size != trainer.world_size:
                os.close(trainer.pidfd)
                raise UsageError(f"rank {rank} is one of {trainer.world_size}, rank {other.rank} of {other.world_size}")
        if not hello.get("reconnect"):
            # The trainer does not know the board yet: it waits for our answer. The phase goes first: it is that of PID.
            self._board.set_rank(trainer.local_rank, RankWord.PHASE, Phase.STARTING)
            self._board.set_rank(trainer.local_rank, RankWord.PID, trainer.pid)
        self._by_rank[rank] = trainer
        asyncio.get_running_loop().add_reader(trainer.pidfd, self._died, trainer)
        self.changed.set()
        if self.complete:
            self._on_complete()
        return trainer

    def stop_all(self) -> list[int]:
        """End every trainer now: by its stop word, then by SIGKILL if it is still there. Returns their ranks."""
        loop = asyncio.get_running_loop()
        told = [trainer for trainer in self.live if not trainer.stopping]
        for trainer in told:
            trainer.stopping = True
            self._board.set_rank(trainer.local_rank, RankWord.STOP, trainer.incarnation)
            loop.call_later(STOP_WITHIN_S, self._kill, trainer)
        return [trainer.rank for trainer in told]

    def set_launcher(self, pid: int) -> None:
        """Note the process that starts trainers again (torchrun): it must not outlive its supervisor."""
        if self._launcher_pidfd >= 0:
            os.close(self._launcher_pidfd)
        try:
            self._launcher_pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._launcher_pidfd = -1

    def kill_launcher(self) -> None:
        if self._launcher_pidfd >= 0:
            try:
                signal.pidfd_send_signal(self._launcher_pidfd, signal.SIGKILL)
            except ProcessLookupError:
                return

    async def gone(self, within_s: float | None = None) -> bool:
        """Wait until no trainer is left. False if some are after `within_s`."""
        return await self._none(lambda _worker: True, within_s)

    async def stopped(self) -> None:
        """Wait for the end of the trainers that must end: without this agent nothing would kill them."""
        await self._none(lambda trainer: trainer.stopping, 2 * STOP_WITHIN_S)

    async def _none(self, of: Callable[[Trainer], bool], within_s: float | None) -> bool:
        try:
            async with asyncio.timeout(within_s):
                while any(of(trainer) for trainer in self._by_rank.values()):
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            return False
        return True

    async def idle_for(self, within_s: float) -> None:
        """Return once all trainers, of which there was at least one, have left and stayed away for that long."""
        while True:
            self.changed.clear()
            idle = bool(self._by_rank) and self.all_left
            try:
                async with asyncio.timeout(within_s if idle else None):
                    await self.changed.wait()
            except TimeoutError:
                return

    async def incomplete_for(self, within_s: float) -> None:
        """Return when some trainers have been waiting for others that long."""
        while True:
            self.changed.clear()
            waiting = bool(self._by_rank) and not self.complete
            try:
                async with asyncio.timeout(within_s if waiting else None):
                    await self.changed.wait()
            except TimeoutError:
                return

    def _new_trainer(self, link: Link, hello: Body, fields: Fields, rank: int) -> Trainer:
        local_world_size = fields.integer("local_world_size", 1)
        local_rank = fields.integer("local_rank")
        if local_rank >= local_world_size:
            raise UsageError(f"local rank {local_rank} of {local_world_size}")
        try:
            pidfd = os.pidfd_open(link.pid)
        except ProcessLookupError as error:
            raise AgentError(f"process {link.pid} ended while it was registered") from error
        return Trainer(
            rank,
            local_rank,
            fields.integer("world_size", 1),
            local_world_size,
            fields.integer("incarnation", 1),
            link.pid,
            pidfd,
            link,
            hello,
        )

    @property
    def all_left(self) -> bool:
        """True if no process here trains, though processes may live on."""
        return all(trainer.left for trainer in self._by_rank.values())

    def hung_up(self, trainer: Trainer) -> None:
        """Note that a trainer's connection ended. The pidfd watches its process; this only matters after a goodbye."""
        trainer.left = trainer.leaving
        _end_answers(trainer, "hung up")
        self.changed.set()

    def _forget(self, trainer: Trainer) -> None:
        asyncio.get_running_loop().remove_reader(trainer.pidfd)
        os.close(trainer.pidfd)
        del self._by_rank[trainer.rank]

    def _died(self, trainer: Trainer) -> None:
        self._forget(trainer)
        if self._launcher_pidfd >= 0 and (trainer.failed or not trainer.leaving):
            _end_group(trainer.pid)
        _end_answers(trainer, "died")
        self.changed.set()
        self._on_gone(trainer)

    def _kill(self, trainer: Trainer) -> None:
        if self._by_rank.get(trainer.rank) is trainer:
            signal.pidfd_send_signal(trainer.pidfd, signal.SIGKILL)


def _end_answers(trainer: Trainer, why: str) -> None:
    """Fail the questions that this trainer has not answered."""
    for future in trainer.answers.values():
        if not future.done():
            future.set_exception(AgentError(f"rank {trainer.rank} {why}"))


def _end_group(pid: int) -> None:
    """End the children that a supervised trainer has left: they would keep ports and memory from the next trainer.

    torchrun makes each trainer the leader of a group, and ends the groups of live trainers, not of one that died. The
    kernel gives a process's number to no other one while it names a group, nor before the parent has seen its end.
    """
    if pid == os.getpgrp():
        return
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # No process is left in the group, or none that this user started.
        return
