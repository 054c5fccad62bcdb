"""Peers: finds the images that all nodes of a round have in memory, and sends their bytes from node to node.

Images travel as answers to questions, a few MiB each: enough for a restart, which needs from other nodes only the
images that its own memory lacks.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from math import inf
from typing import Any

from surefoot.agent.memory.memory import Held, ImageSet, Memory
from surefoot.agent.memory.replicas import Replicas
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.start.reading import Portion, ShardError
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.core.recovery import Copy, Source, wholes
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, SurefootError
from surefoot.ipc.wire import Body

_ASK_WITHIN_S = 60.0
_CHUNK_BYTES = 4 * 1024 * 1024


class Peers:
    """Serves the images of this node, and asks for those of other nodes."""

    def __init__(self, membership: Membership, memory: Memory, replicas: Replicas) -> None:
        self._membership = membership
        self._memory = memory
        self._replicas = replicas
        membership.answer("inventory", self._answer_copies)
        membership.answer("plan", self._answer_plan)
        membership.answer("record", self._answer_record)
        membership.answer("read", self._answer_bytes)
        membership.answer("sift", self._sift)

    async def in_memory(self) -> tuple[list[Copy], list[str]]:
        """The images that all nodes have in memory, with second copies of lost ones; and the nodes that did not
        answer."""
        copies, replicas, silent = await self._inventories()
        return [*copies, *_of_the_lost(copies, replicas)], silent

    async def newest(self) -> Source | None:
        """The newest step that is whole in memory, whatever its lineage, with second copies of the images of nodes that
        do not answer."""
        copies, replicas, silent = await self._inventories()
        of_silent = [copy for copy in replicas if self._membership.node_of(copy.rank) in silent]
        copies += _of_the_lost(copies, of_silent)
        return next(iter(wholes(copies, {copy.at.generation: inf for copy in copies})), None)

    async def _inventories(self) -> tuple[list[Copy], list[Copy], list[str]]:
        copies, replicas = copies_of(await self._memory.sets(), self._membership.me), self._replicas.copies()
        answers = await self._membership.ask_all({"op": "inventory"}, _ASK_WITHIN_S)
        for node, body in answers.items():
            fields = Fields(body, f"inventory of {node}")
            for found, name in ((copies, "copies"), (replicas, "replicas")):
                theirs = [Copy.from_json(one) for one in fields.items(name)]
                found += [copy for copy in theirs if copy.node == node]
        return copies, replicas, sorted(set(self._membership.others) - set(answers))

    async def plan(self, source: Source) -> Plan:
        """The plan of a step.

        Raises:
            AgentError: the node that holds an image does not send the plan.
        """
        for segment in self._memory.segments:
            if segment.plan_hash == source.plan:
                return segment.plan()
        holder = source.holders[0].node
        answer = await self._membership.ask(holder, {"op": "plan", "plan": source.plan}, _ASK_WITHIN_S)
        plan = Plan.from_body(Fields(answer, f"plan of node {holder}").mapping("plan"))
        if plan.hash != source.plan:
            raise AgentError(f"node {holder} sent another plan than the one asked for")
        return plan

    def is_mine(self, copy: Copy) -> bool:
        """True if the copy lies in this node's own memory."""
        return copy.node == self._membership.me

    async def records(self, source: Source) -> tuple[Mapping[str, Any], ...]:
        """Every rank's record."""
        return tuple(await asyncio.gather(*(self._record(copy) for copy in source.holders)))

    async def held(self, source: Source) -> ImageSet | None:
        """This node's part of a step."""
        parts = await self._memory.parts(source.at, source.plan)
        for copy in source.holders:
            if self.is_mine(copy) and copy.rank not in parts:
                parts[copy.rank] = await self._replicas.find(copy.at, copy.plan, copy.rank)
        same = tuple(
            held
            for rank, held in sorted(parts.items())
            if rank < len(source.holders) and held.image_hash == source.holders[rank].xxh3_128
        )
        return ImageSet(source.at, source.plan, same) if same else None

    async def sift(self, source: Source) -> None:
        """Have every node look for bad images in its part of a step that turned out bad, and give those up."""
        await self._memory.sift(source.at, source.plan)
        await self._membership.ask_all({"op": "sift", **source.at.to_json(), "plan": source.plan}, _ASK_WITHIN_S)

    async def _record(self, copy: Copy) -> Mapping[str, Any]:
        if self.is_mine(copy):
            return (await self._find(copy.at, copy.plan, copy.rank)).record()
        answer = await self._membership.ask(copy.node, {"op": "record", **_about(copy)}, _ASK_WITHIN_S)
        return Fields(answer, f"record of rank {copy.rank}").mapping("record")

    async def read_into(self, copy: Copy, offset: int, buffer: memoryview) -> None:
        """Read bytes of an image of another node.

        Raises:
            AgentError: the node does not send them.
        """
        await read_from(self._membership, copy.node, {"op": "read", **_about(copy)}, offset, buffer)

    # ------------------------------------------------------------------ answers

    async def _answer_copies(self, _node: str, _body: Body) -> Body:
        return {
            "copies": [copy.to_json() for copy in copies_of(await self._memory.sets(), self._membership.me)],
            "replicas": [copy.to_json() for copy in self._replicas.copies()],
        }

    async def _answer_plan(self, _node: str, body: Body) -> Body:
        wanted = Fields(body, "plan").text("plan")
        for segment in self._memory.segments:
            if segment.plan_hash == wanted:
                return {"plan": segment.plan().body}
        raise ObjectMissingError(f"no image of plan {wanted} is here")

    async def _answer_record(self, _node: str, body: Body) -> Body:
        return {"record": (await self._asked_for(body)).record()}

    async def _answer_bytes(self, _node: str, body: Body) -> Body:
        offset, length = stretch_of(body)
        held = await self._asked_for(body)
        image = held.segment.image(held.sealed.slot)
        if offset + length > len(image):
            raise ObjectMissingError(f"bytes {offset} to {offset + length} of an image of {len(image)} cannot be had")
        answer = await asyncio.to_thread(answer_with, image[offset : offset + length])
        if not held.unchanged():
            raise ObjectMissingError("the image moved on while it was read")
        return answer

    async def _sift(self, _node: str, body: Body) -> Body:
        fields = Fields(body, "sift")
        await self._memory.sift(BoundaryId.of(fields), fields.text("plan"))
        return {}

    async def _asked_for(self, body: Body) -> Held:
        fields = Fields(body, "question about an image")
        at = BoundaryId.of(fields)
        return await self._find(at, fields.text("plan"), fields.integer("rank"))

    async def _find(self, at: BoundaryId, plan: str, rank: int) -> Held:
        segment = self._memory.find(rank, plan)
        for sealed in segment.all_sealed() if segment is not None else []:
            held = await self._memory.hash_slot(segment, sealed.slot) if segment and sealed.at == at else None
            if held is not None:
                return held
        return await self._replicas.find(at, plan, rank)


class PeerPlace:
    """Images in the memory of other nodes; the last place to look, as nothing else has them."""

    name = "peer"

    def __init__(self, peers: Peers, source: Source) -> None:
        self._peers = peers
        self._source = source

    async def size(self, portion: Portion) -> int:
        holder = self._source.holders[portion.rank]
        if self._peers.is_mine(holder):
            # This node's memory was searched first.
            raise ShardError(portion.key, "is not good in this node's memory, and no other node has it")
        return holder.size_bytes

    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None:
        try:
            await self._peers.read_into(self._source.holders[portion.rank], offset, buffer)
        except (AgentError, CorruptError) as error:
            raise ShardError(portion.key, f"could not be had from another node: {error}") from error

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        raise error if isinstance(error, ShardError) else ShardError(portion.key, str(error))


def copies_of(sets: list[ImageSet], node: str) -> list[Copy]:
    """The images that a node has."""
    return [
        Copy(
            one.at,
            one.plan,
            part.segment.plan().world_size,
            part.segment.rank,
            part.image_hash,
            part.segment.geometry.image_bytes,
            node,
        )
        for one in sets
        for part in one.parts
    ]


async def read_from(membership: Membership, node: str, question: Body, offset: int, buffer: memoryview) -> None:
    """Read the bytes that a question names from another node, which answers with `answer_with`.

    Raises:
        CorruptError: the node answered that they cannot be had, or with too few of them.
        AgentError: the node did not answer.
    """
    # One piece after the other: the reader itself reads several stretches at once.
    for start in range(0, len(buffer), _CHUNK_BYTES):
        part = buffer[start : start + _CHUNK_BYTES]
        body = {**question, "offset": offset + start, "length": len(part)}
        answer = Fields(await membership.ask(node, body, _ASK_WITHIN_S), f"bytes of node {node}")
        if (why := answer.optional_text("error")) is not None:
            raise CorruptError(f"could not be had from node {node}: {why}")
        data = answer.binary("data")
        if len(data) != len(part):
            raise CorruptError(f"node {node} sent {len(data)} of {len(part)} bytes")
        part[:] = data


def stretch_of(question: Body) -> tuple[int, int]:
    """The offset and the length that another node asks for.

    Raises:
        ObjectMissingError: more than a message holds.
    """
    fields = Fields(question, "question about bytes")
    offset, length = fields.integer("offset"), fields.integer("length", 1)
    if length > _CHUNK_BYTES:
        raise ObjectMissingError(f"{length} bytes cannot be had at once")
    return offset, length


def answer_with(data: memoryview) -> Body:
    return {"data": base64.b64encode(data).decode("ascii")}


def _of_the_lost(copies: list[Copy], replicas: list[Copy]) -> list[Copy]:
    """Second copies of images that no node has itself."""
    here = {(copy.at, copy.plan, copy.rank) for copy in copies}
    return [replica for replica in replicas if (replica.at, replica.plan, replica.rank) not in here]


def _about(copy: Copy) -> Body:
    return {**copy.at.to_json(), "plan": copy.plan, "rank": copy.rank}
