"""Peers: what the nodes of a round have in memory, together, and its bytes from one to another.

Images travel as answers to questions, a few MiB each: enough for a restart, which needs of the others only what its own
memory lacks.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from surefoot.agent.fetch import ShardError
from surefoot.agent.fleet import Fleet
from surefoot.agent.memory import Held, ImageSet, Memory
from surefoot.agent.ranges import Portion
from surefoot.agent.twins import Twins
from surefoot.core.copies import Copy, Whole, wholes
from surefoot.core.documents import Fields
from surefoot.core.layout import StepId
from surefoot.core.lineage import Cuts
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, SurefootError
from surefoot.wire import Body

_ASK_WITHIN_S = 60.0
_CHUNK_BYTES = 4 * 1024 * 1024
_CHUNKS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """A whole step in the memory of several nodes."""

    at: StepId
    plan: str
    holders: tuple[Copy, ...]
    """By rank."""

    @classmethod
    def of(cls, whole: Whole) -> Spread:
        return cls(whole.at, whole.plan, tuple(copies[0] for copies in whole.copies))

    def to_json(self) -> Body:
        return {"copies": [_copy_to_json(copy) for copy in self.holders]}

    @classmethod
    def from_json(cls, body: Body) -> Spread:
        holders = tuple(_copy_from_json(one) for one in Fields(body, "order").items("copies"))
        if not holders:
            raise CorruptError("an order names no copies")
        return cls(holders[0].at, holders[0].plan, holders)


class Peers:
    """Tells what this node has, and asks for what others have."""

    def __init__(self, fleet: Fleet, memory: Memory, twins: Twins) -> None:
        self._fleet = fleet
        self._memory = memory
        self._twins = twins
        fleet.answer("inventory", self._tell_copies)
        fleet.answer("plan", self._tell_plan)
        fleet.answer("record", self._tell_record)
        fleet.answer("read", self._tell_bytes)
        fleet.answer("sift", self._sift)

    async def whole(self, chain: Cuts | None = None) -> list[Whole]:
        """Steps that are whole in all nodes' memory together, best first.

        Args:
            chain: the lineage, for a start; without it every step counts, and so does what some nodes alone tell, with
                what they have of those that do not.

        Raises:
            AgentError: for a start, if a node does not tell. Taken for empty, it could hold what is cut off by it.
        """
        copies = copies_of(await self._memory.sets(), self._fleet.me)
        answers = await self._fleet.ask_all({"op": "inventory"}, _ASK_WITHIN_S)
        silent = sorted(set(self._fleet.others) - set(answers))
        if silent and chain is not None:
            raise AgentError(f"node {', '.join(silent)} does not tell what it has in memory")
        twins = self._twins.copies()
        for node, body in answers.items():
            fields = Fields(body, f"inventory of {node}")
            for found, name in ((copies, "copies"), (twins, "twins")):
                told = [_copy_from_json(one) for one in fields.items(name)]
                found += [copy for copy in told if copy.node == node]
        if chain is None:
            twins = [twin for twin in twins if self._fleet.node_of(twin.rank) in silent]
        copies += _of_the_lost(copies, twins)
        return wholes(copies, [], chain if chain is not None else {copy.at.generation: inf for copy in copies})

    async def plan(self, spread: Spread) -> Plan:
        """The plan of a step.

        Raises:
            AgentError: nobody who holds an image tells it.
        """
        for segment in self._memory.segments:
            if segment.plan_hash == spread.plan:
                return segment.plan()
        holder = spread.holders[0].node
        answer = await self._fleet.ask(holder, {"op": "plan", "plan": spread.plan}, _ASK_WITHIN_S)
        plan = Plan.from_body(Fields(answer, f"plan of node {holder}").mapping("plan"))
        if plan.hash != spread.plan:
            raise AgentError(f"node {holder} told another plan than the one asked for")
        return plan

    def is_mine(self, copy: Copy) -> bool:
        """True if it lies in this node's own memory."""
        return copy.node == self._fleet.me

    async def records(self, spread: Spread) -> tuple[Mapping[str, Any], ...]:
        """Every rank's record."""
        return tuple(await asyncio.gather(*(self._record(copy) for copy in spread.holders)))

    async def held(self, spread: Spread) -> ImageSet | None:
        """This node's part."""
        parts = await self._memory.parts(spread.at, spread.plan)
        for copy in spread.holders:
            if self.is_mine(copy) and copy.rank not in parts:
                parts[copy.rank] = await self._twins.find(copy.at, copy.plan, copy.rank)
        same = tuple(
            held
            for rank, held in sorted(parts.items())
            if rank < len(spread.holders) and held.image_hash == spread.holders[rank].xxh3_128
        )
        return ImageSet(spread.at, spread.plan, same) if same else None

    async def sift(self, spread: Spread) -> None:
        """A step turned out bad: every node looks for what is wrong with its part, and gives that up."""
        await self._memory.sift(spread.at, spread.plan)
        await self._fleet.ask_all({"op": "sift", **spread.at.to_json(), "plan": spread.plan}, _ASK_WITHIN_S)

    async def _record(self, copy: Copy) -> Mapping[str, Any]:
        if self.is_mine(copy):
            return (await self._find(copy.at, copy.plan, copy.rank)).record()
        answer = await self._fleet.ask(copy.node, {"op": "record", **_about(copy)}, _ASK_WITHIN_S)
        return Fields(answer, f"record of rank {copy.rank}").mapping("record")

    async def read_into(self, copy: Copy, offset: int, buffer: memoryview) -> None:
        """Bytes of an image of another node.

        Raises:
            AgentError: it does not tell them.
        """
        turn = asyncio.Semaphore(_CHUNKS_AT_ONCE)

        async def read(start: int) -> None:
            part = buffer[start : start + _CHUNK_BYTES]
            async with turn:
                body = {"op": "read", **_about(copy), "offset": offset + start, "length": len(part)}
                answer = await self._fleet.ask(copy.node, body, _ASK_WITHIN_S)
            data = Fields(answer, "read").binary("data")
            if len(data) != len(part):
                raise AgentError(f"node {copy.node} told {len(data)} of {len(part)} bytes")
            part[:] = data

        await asyncio.gather(*(read(start) for start in range(0, len(buffer), _CHUNK_BYTES)))

    # ------------------------------------------------------------------ answers

    async def _tell_copies(self, _node: str, _body: Body) -> Body:
        return {
            "copies": [_copy_to_json(copy) for copy in copies_of(await self._memory.sets(), self._fleet.me)],
            "twins": [_copy_to_json(copy) for copy in self._twins.copies()],
        }

    async def _tell_plan(self, _node: str, body: Body) -> Body:
        wanted = Fields(body, "plan").text("plan")
        for segment in self._memory.segments:
            if segment.plan_hash == wanted:
                return {"plan": segment.plan().body}
        raise ObjectMissingError(f"no image of plan {wanted} is here")

    async def _tell_record(self, _node: str, body: Body) -> Body:
        return {"record": (await self._asked_for(body)).record()}

    async def _tell_bytes(self, _node: str, body: Body) -> Body:
        fields = Fields(body, "read")
        held = await self._asked_for(body)
        offset, length = fields.integer("offset"), fields.integer("length", 1)
        image = held.segment.image(held.sealed.slot)
        if length > _CHUNK_BYTES or offset + length > len(image):
            raise ObjectMissingError(f"bytes {offset} to {offset + length} of an image of {len(image)} cannot be had")
        data = await asyncio.to_thread(lambda: base64.b64encode(image[offset : offset + length]).decode("ascii"))
        if not held.unchanged():
            raise ObjectMissingError("the image moved on while it was read")
        return {"data": data}

    async def _sift(self, _node: str, body: Body) -> Body:
        fields = Fields(body, "sift")
        await self._memory.sift(StepId.of(fields), fields.text("plan"))
        return {}

    async def _asked_for(self, body: Body) -> Held:
        fields = Fields(body, "question about an image")
        at = StepId.of(fields)
        return await self._find(at, fields.text("plan"), fields.integer("rank"))

    async def _find(self, at: StepId, plan: str, rank: int) -> Held:
        segment = self._memory.find(rank, plan)
        for sealed in segment.all_sealed() if segment is not None else []:
            held = await self._memory.hash_slot(segment, sealed.slot) if segment and sealed.at == at else None
            if held is not None:
                return held
        return await self._twins.find(at, plan, rank)


class PeerPlace:
    """Images in the memory of other nodes; the last place to look, as nothing else has them."""

    name = "peer"

    def __init__(self, peers: Peers, spread: Spread) -> None:
        self._peers = peers
        self._spread = spread

    async def size(self, portion: Portion) -> int:
        holder = self._spread.holders[portion.rank]
        if self._peers.is_mine(holder):
            # It was looked for in this node's memory first.
            raise ShardError(portion.key, "is not good in this node's memory, and no other node has it")
        return holder.size_bytes

    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None:
        try:
            await self._peers.read_into(self._spread.holders[portion.rank], offset, buffer)
        except (AgentError, CorruptError) as error:
            raise ShardError(portion.key, f"could not be had from another node: {error}") from error

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        raise error if isinstance(error, ShardError) else ShardError(portion.key, str(error))


def copies_of(sets: list[ImageSet], node: str) -> list[Copy]:
    """What a node has."""
    return [
        Copy(
            one.at,
            one.plan,
            part.segment.plan().world_size,
            part.segment.rank,
            part.image_hash,
            part.segment.geometry.image_bytes,
            "ram",
            node,
        )
        for one in sets
        for part in one.parts
    ]


def _of_the_lost(copies: list[Copy], twins: list[Copy]) -> list[Copy]:
    """Second copies of what no node has itself."""
    here = {(copy.at, copy.plan, copy.rank) for copy in copies}
    return [twin for twin in twins if (twin.at, twin.plan, twin.rank) not in here]


def _about(copy: Copy) -> Body:
    return {**copy.at.to_json(), "plan": copy.plan, "rank": copy.rank}


def _copy_to_json(copy: Copy) -> Body:
    more = {"world_size": copy.world_size, "xxh3_128": copy.xxh3_128, "bytes": copy.size_bytes, "node": copy.node}
    return {**_about(copy), **more}


def _copy_from_json(data: Any) -> Copy:
    fields = Fields(data, "copy")
    return Copy(
        StepId.of(fields),
        fields.text("plan"),
        fields.integer("world_size", 1),
        fields.integer("rank"),
        fields.text("xxh3_128"),
        fields.integer("bytes"),
        "ram",
        fields.text("node"),
    )
