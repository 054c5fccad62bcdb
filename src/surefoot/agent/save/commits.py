"""Commits a step: when all nodes' shards of it are acknowledged, one agent writes the manifest and informs the others.

Acknowledgements go from agent to agent, so that nobody has to list the run's place for each save. They also lie there
as objects: if a node falls silent, those that are left look for its acknowledgements themselves. Any agent may commit;
the order in which they do is only an economy, and the first one wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from surefoot.agent.nodes.membership import Membership
from surefoot.agent.save.pipeline import Pipeline
from surefoot.core.commit import commit_order, complete_set
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Generation, Manifest, Shard
from surefoot.errors import AgentError, CorruptError, TierError
from surefoot.host.clock import wall_s
from surefoot.ipc.wire import Body
from surefoot.records.records import Records

_LOOK_AFTER_S = 1.0
"""Silence of another node after which the run's place is asked."""
_TURN_S = 0.5
"""Between the turns of agents that commit because the ones before them did not."""
_LONGEST_TURN_S = 4.0
_TOLD_KEPT = 64


class Commits:
    """One node's part in the commits of its generation."""

    def __init__(self, membership: Membership, records: Records, pipeline: Pipeline) -> None:
        self._membership = membership
        self._records = records
        self._pipeline = pipeline
        self._told: dict[BoundaryId, asyncio.Event] = {}
        membership.hear("committed", self._hear_committed)

    async def commit(self, name: str, at: BoundaryId, mine: Mapping[int, Shard], current: Generation) -> Manifest:
        """Commit a step with what this node's ranks have acknowledged of it.

        Args:
            name: of this upload, the same on all nodes.
            at: the step.
            mine: this node's shards, by rank.
            current: the generation that this agent works in.

        Raises:
            AgentError: another node gave up its part, or the step; the message gives the reason.
            SupersededError: a newer launch owns the run.
            CorruptError: a record by which this is decided is damaged.
            TierError: the tier failed; it may be tried again.
        """
        if self._membership.alone:
            return await self._pipeline.commit(_whole(mine.values(), at), current, wall_s())
        shards = await self._all_shards(name, at, mine.values())
        if not await self._is_told(at):
            manifest = await self._pipeline.commit(shards, current, wall_s())
            # Sent also to an agent that is just replacing another: else it would hold its slot until its turn.
            self._membership.tell_on({"op": "committed", **at.to_json()})
            return manifest
        standing = await self._records.manifest(at)
        if standing is None:
            raise TierError(f"{at.label} was reported as committed, but the run's place does not show it")
        return standing

    def give_up(self, name: str, why: str) -> None:
        """Report that this node has no part for an upload: the others need not wait."""
        self._membership.bring(name, {"error": why})

    async def _all_shards(self, name: str, at: BoundaryId, mine: Iterable[Shard]) -> tuple[Shard, ...]:
        acks = [[shard.ack, shard.ack_bytes().decode("ascii")] for shard in mine]
        waiting = asyncio.ensure_future(self._membership.gather(name, {"acks": acks}))
        try:
            while True:
                done, _ = await asyncio.wait([waiting], timeout=_LOOK_AFTER_S)
                if done and waiting.exception() is None:
                    return _complete(waiting.result(), self._membership.nodes, at)
                shards = complete_set(await self._records.acks((await self._records.pieces()).get(at, [])), at)
                if shards is not None:
                    return shards
                if done:
                    # A node is gone, and has not left its part.
                    await waiting
        finally:
            waiting.cancel()

    async def _is_told(self, at: BoundaryId) -> bool:
        """True if another agent commits the step before it is this one's turn."""
        turn = commit_order(self._membership.nodes, self._membership.leaving).index(self._membership.me)
        if turn == 0:
            return False
        turn_s = min(_LONGEST_TURN_S, _TURN_S * (1 + turn))
        try:
            async with asyncio.timeout(turn_s):
                await self._event(at).wait()
        except TimeoutError:
            return False
        return True

    def _event(self, at: BoundaryId) -> asyncio.Event:
        for old in list(self._told)[:-_TOLD_KEPT]:
            del self._told[old]
        return self._told.setdefault(at, asyncio.Event())

    def _hear_committed(self, _node: str, body: Body) -> None:
        fields = Fields(body, "committed")
        self._event(BoundaryId.of(fields)).set()


def _complete(brought: Iterable[Body], nodes: Iterable[str], at: BoundaryId) -> tuple[Shard, ...]:
    shards: list[Shard] = []
    for node, body in zip(nodes, brought, strict=True):
        fields = Fields(body, "acknowledgements")
        why = fields.optional_text("error")
        if why is not None:
            raise AgentError(f"node {node} gave up {at.label}: {why}")
        shards += [Shard.from_ack(text.encode("ascii"), key) for key, text in fields.items("acks")]
    return _whole(shards, at)


def _whole(shards: Iterable[Shard], at: BoundaryId) -> tuple[Shard, ...]:
    found = complete_set(shards, at)
    if found is None:
        raise CorruptError(f"the acknowledgements of {at.label} do not make a whole")
    return found
