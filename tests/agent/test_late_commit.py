"""A commit that comes after the step was given up: by the same job's agents, or by a launch that took the run over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from surefoot.agent.save.pacer import Pacer
from surefoot.agent.save.pipeline import Pipeline
from surefoot.core.layout import BoundaryId, ShardId
from surefoot.core.manifest import Generation, Parent, Shard
from surefoot.errors import AgentError, SupersededError
from surefoot.ipc.board import Phase
from surefoot.records.records import Records
from surefoot.tiers.disk import DiskTier

_AT = BoundaryId(74, 2)
_MINE = Generation(2, "mine", None, 1, "node", 0.0)
_SHARD = Shard(ShardId(_AT, 0, "0123abcd"), "p" * 32, 10, "0" * 32, {"world_size": 1, "trigger": "periodic"})


async def _commit_late(place: Path, newer: Generation | None) -> None:
    """Commit what was given up while this agent slept, perhaps with a newer generation there."""
    phases: list[Phase] = []
    tier = DiskTier(place / "run", direct=False)
    try:
        records = Records(tier)
        await records.put_generation(_MINE)
        if newer is not None:
            await Records(tier).put_generation(newer)
        assert await Records(tier).put_tombstone(_AT, 1.0)
        try:
            await Pipeline(records, None, Pacer(None), phases.append).commit([_SHARD], _MINE, 2.0)
        finally:
            assert await Records(tier).manifest(_AT) is None
            assert phases == [Phase.COMMITTING, Phase.IDLE]
    finally:
        await tier.close()


@pytest.mark.parametrize("launch", [None, "mine"])
def test_given_up_by_this_job(tmp_path: Path, launch: str | None) -> None:
    """The save is over and the job goes on: another node's agent has swept it, once a newer one was safe."""
    newer = Generation(3, launch, Parent(2, 139, committed=True), 1, "node", 1.0) if launch else None
    with pytest.raises(AgentError, match="given up by another node"):
        asyncio.run(_commit_late(tmp_path, newer))


def test_given_up_by_another_launch(tmp_path: Path) -> None:
    """The run is another launch's: this one must not train on."""
    with pytest.raises(SupersededError, match="generation 3 of launch other"):
        asyncio.run(_commit_late(tmp_path, Generation(3, "other", Parent(2, 139, committed=True), 1, "node", 1.0)))
