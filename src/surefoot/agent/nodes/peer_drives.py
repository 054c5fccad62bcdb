"""Peer drives: reads copies of shards from other nodes' own drives, for a start whose own places have no good ones.

A node asks for a shard by its key, and verifies the bytes that it gets, like the bytes of any other place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from surefoot.agent.nodes.membership import Membership
from surefoot.agent.nodes.peers import answer_with, read_from, stretch_of
from surefoot.agent.start.reading import Portion, ShardError
from surefoot.core.documents import Fields
from surefoot.core.layout import parse_shard
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, SurefootError, TierError
from surefoot.ipc.wire import Body
from surefoot.tiers.base import Tier

_ASK_WITHIN_S = 60.0


class PeerDrives:
    """Serves the shards on this node's drives, and asks for those on other nodes' drives."""

    def __init__(self, membership: Membership, drives: Tier | None, say: Callable[[str], None]) -> None:
        self._membership = membership
        self._drives = drives
        self._say = say
        membership.answer("shard size", self._answer_size)
        membership.answer("shard bytes", self._answer_bytes)

    async def holders(self, key: str) -> dict[str, int]:
        """The size of a shard's copy on each other node that has one.

        Raises:
            AgentError: a node does not answer. If it were taken for a node without a copy, a step could be lost.
        """
        nodes = self._membership.others
        answers = await asyncio.gather(*(self._ask(node, {"op": "shard size", "key": key}) for node in nodes))
        sizes = {node: Fields(answer, "size") for node, answer in zip(nodes, answers, strict=True)}
        return {node: fields.integer("size") for node, fields in sizes.items() if fields.flag("here")}

    async def read_into(self, node: str, key: str, offset: int, buffer: memoryview) -> None:
        """Read bytes of a node's copy.

        Raises:
            CorruptError: its drive fails, or the bytes are not there.
            AgentError: the node does not answer.
        """
        try:
            await read_from(self._membership, node, {"op": "shard bytes", "key": key}, offset, buffer)
        except CorruptError as error:
            raise ShardError(key, str(error)) from error

    async def _ask(self, node: str, body: Body) -> Body:
        return await self._membership.ask(node, body, _ASK_WITHIN_S)

    # ------------------------------------------------------------------ answers

    async def _answer_size(self, _node: str, body: Body) -> Body:
        key = _shard_key(body)
        try:
            if self._drives is not None:
                return {"here": True, "size": await self._drives.size(key)}
        except ObjectMissingError:
            pass
        except TierError as error:
            # A copy is a short cut: one that cannot be read does not count, and the log has the reason.
            self._say(f"{key} is withheld from another node: {error}")
        return {"here": False}

    async def _answer_bytes(self, _node: str, body: Body) -> Body:
        key, (offset, length) = _shard_key(body), stretch_of(body)
        if self._drives is None:
            raise ObjectMissingError(f"{key} is not here: this node has no drives")
        data = memoryview(bytearray(length))
        try:
            await self._drives.read_into(key, offset, data)
        except TierError as error:
            return {"error": str(error)}
        return await asyncio.to_thread(answer_with, data)


class PeerDrivesPlace:
    """The other nodes' drives, after the run's own place: the last place to look."""

    name = "peer disk"

    def __init__(self, drives: PeerDrives, lost: Mapping[str, ShardError]) -> None:
        self._drives = drives
        self._lost = lost
        """By key, the error in the run's own place, which is raised if no drive helps."""
        self._nodes: dict[str, str] = {}
        """By key, the node to ask."""

    async def size(self, portion: Portion) -> int:
        holders = await self._drives.holders(portion.key)
        node = min((node for node, size in holders.items() if size == portion.size_bytes), default=None)
        if node is None:
            raise ObjectMissingError(f"{portion.key} is on no other node's drives")
        self._nodes[portion.key] = node
        return holders[node]

    async def read_into(self, portion: Portion, offset: int, buffer: memoryview) -> None:
        await self._drives.read_into(self._nodes[portion.key], portion.key, offset, buffer)

    async def refuse(self, portion: Portion, error: SurefootError) -> None:
        if isinstance(error, AgentError):
            raise error
        raise self._lost.get(portion.key) or ShardError(portion.key, str(error))


def _shard_key(body: Body) -> str:
    key = Fields(body, "question about a shard").text("key")
    if parse_shard(key) is None:
        raise AgentError(f"{key!r} is not a shard's key")
    return key
