"""The journal of an agent, and its neighbours'."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from surefoot.agent.journal import Journal
from surefoot.tiers.disk import DiskTier


def test_agents_of_one_name_and_one_second_keep_their_events_apart(tmp_path: Path) -> None:
    """Containers that share a host name, or an agent that is started again at once: nobody's events replace others'."""
    tier = DiskTier(tmp_path / "run", direct=False)
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        journal = Journal("r" * 8, "launch", "node", tier, path.open("a", buffering=1), path)
        journal.record("warning", what=f"number {number}")
        journal.record("warning", what=f"number {number} again")
        asyncio.run(journal.close(60.0))
    written = [path.read_text().splitlines() for path in (tmp_path / "run" / "events").iterdir()]
    told = sorted([json.loads(line)["what"] for line in lines] for lines in written)
    assert told == [[f"number {number}", f"number {number} again"] for number in range(3)]
