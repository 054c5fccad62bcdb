"""Last words: what nodes whose trainers are gone tell each other of the steps that they still work on.

A rank may die after others sealed a step and before it did. Their nodes would wait for its node's part as long as that
lives, and that node for theirs of an older step. So each says once which steps it has a part of; what a node neither
has nor had will not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from surefoot.agent.fleet import Fleet
from surefoot.agent.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.errors import AgentError


class LastWords:
    """One node's part in them. `spawn` runs a task that ends with the agent."""

    def __init__(self, fleet: Fleet, shipper: Shipper, spawn: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        self._fleet = fleet
        self._shipper = shipper
        self._spawn = spawn

    async def exchange(self, generation: int, within_s: float) -> None:
        """Say this node's, and give up what the others say they have no part of; those that say it later count, too.

        Args:
            generation: of the trainers that are gone from here: they bring nothing more.
            within_s: how long the others' are waited for.
        """
        if self._fleet.alone or self._fleet.apart:
            return
        what = f"last words {generation}"
        self._fleet.bring(what, {"names": self._shipper.names()})
        heard = asyncio.Event()
        self._spawn(self._hear_all(what, self._fleet.others, heard))
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await heard.wait()

    async def _hear_all(self, what: str, nodes: Sequence[str], heard: asyncio.Event) -> None:
        await asyncio.gather(*(self._hear(what, node) for node in nodes))
        heard.set()

    async def _hear(self, what: str, node: str) -> None:
        # It may be gone, or others train: who waits for its part hears of that himself.
        with suppress(AgentError):
            names = Fields(await self._fleet.brought_by(node, what), what).items("names")
            await self._shipper.will_lack(node, {str(name) for name in names})
