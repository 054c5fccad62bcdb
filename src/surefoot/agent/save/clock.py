"""Raises the board's wish for a durable save whenever one is due, and measures how long the last took."""

from __future__ import annotations

import asyncio
from math import inf

from surefoot.agent.frozen.transfer import FrozenSaver
from surefoot.agent.journal import Journal
from surefoot.agent.nodes.membership import Membership
from surefoot.core.cadence import LONG_INTERVAL_S, Cadence, next_start
from surefoot.host.clock import boot_s
from surefoot.ipc.board import Board, NodeWord


class SaveClock:
    """One wish at a time: the next is made when the save that it led to has ended, well or not."""

    def __init__(
        self, membership: Membership, frozen: FrozenSaver, board: Board, journal: Journal, cadence: Cadence
    ) -> None:
        self._membership = membership
        self._frozen = frozen
        self._board = board
        self._journal = journal
        self._cadence = cadence
        self._due_s = 0.0
        self._took_s = inf
        """By the last save, if there was one."""
        self._running = asyncio.Event()

    def restart(self) -> None:
        """A new generation trains: its first durable save is due at once."""
        self._due_s = 0.0
        self._running.set()

    def wish_in(self, pause_s: float) -> None:
        """A save came to nothing; the next one is due then."""
        self._due_s = boot_s() + pause_s
        self._running.set()

    def saved(self, started_s: float, size_bytes: int, *, again: bool) -> None:
        """A step became durable. `again`: the clock had wished for it, and goes on."""
        now_s = boot_s()
        self._due_s = next_start(self._cadence, started_s, now_s, size_bytes, self._took_s)
        self._took_s = now_s - started_s
        if again:
            self._running.set()

    async def run(self) -> None:
        interval_s = self._cadence.interval_s or 0.0
        if interval_s > LONG_INTERVAL_S:
            self._journal.record("warning", what=f"durable saves are {interval_s / 60:.0f} minutes apart")
        while True:
            await self._running.wait()
            self._running.clear()
            await asyncio.sleep(max(0.0, self._due_s - boot_s()))
            await self._frozen.ready()
            await self._membership.settled()
            # All ranks learn of it at the boundary; two clocks would save twice.
            if self._membership.leads:
                self._board.set_node(NodeWord.DURABLE_WANTED, self._board.node(NodeWord.DURABLE_WANTED) + 1)
