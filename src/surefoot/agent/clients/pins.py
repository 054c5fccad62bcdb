"""Pins slots that must not be reused while they are read. Trainers grant pins; a dead trainer reuses no slot."""

from __future__ import annotations

import asyncio

from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.memory.memory import Held, ImageSet
from surefoot.core.documents import Fields
from surefoot.ipc.segment import Segment
from surefoot.ipc.wire import Body

_GRANT_WITHIN_S = 2.0


class Pins:
    """Asks trainers to keep or to release slots."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers
        self._grants: dict[tuple[int, int, int], asyncio.Future[bool]] = {}

    async def pin(self, images: ImageSet) -> bool:
        """Pin a whole set. False if a part of it moved on before it could be pinned."""
        try:
            async with asyncio.timeout(_GRANT_WITHIN_S):
                granted = await asyncio.gather(*(self._pin(part) for part in images.parts))
        except TimeoutError:
            return False
        return all(granted) and all(part.unchanged() for part in images.parts)

    async def unpin(self, rank: int, segment: Segment, slot: int, seq: int) -> None:
        trainer = self._trainers.of_rank(rank)
        if trainer is not None:
            await trainer.link.send({"op": "unpin", "plan": segment.plan_hash, "slot": slot, "seq": seq})

    def granted(self, trainer: Trainer, body: Body) -> None:
        """Take a trainer's answer."""
        fields = Fields(body, "granted")
        future = self._grants.pop((trainer.rank, fields.integer("slot"), fields.integer("seq")), None)
        if future is not None and not future.done():
            future.set_result(bool(body.get("ok")))

    async def _pin(self, part: Held) -> bool:
        trainer = self._trainers.of_rank(part.segment.rank)
        if trainer is None or trainer.leaving:
            return True
        sealed = part.sealed
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._grants[trainer.rank, sealed.slot, sealed.seq] = future
        await trainer.link.send({"op": "pin", "plan": part.segment.plan_hash, "slot": sealed.slot, "seq": sealed.seq})
        return await future
