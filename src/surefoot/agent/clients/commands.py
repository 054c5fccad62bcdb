"""Commands: what `surefoot evict` and `surefoot status` ask of the agent."""

from __future__ import annotations

from surefoot.agent.clients.server import Link
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.node import Node
from surefoot.agent.save.shipping import Shipper
from surefoot.core.documents import Fields
from surefoot.host.clock import boot_s, wall_s
from surefoot.ipc.board import NodeWord, Phase, RankWord
from surefoot.ipc.wire import Body


class Commands:
    """Answers them. `about` is said of the launch in every status."""

    def __init__(self, node: Node, shipper: Shipper, eviction: Eviction, about: Body) -> None:
        self._trainers = node.trainers
        self._status = node.status
        self._shipper = shipper
        self._eviction = eviction
        self._about = about

    async def serve(self, link: Link, first: Body) -> None:
        """One command."""
        operation = first.get("op")
        if operation == "evict":
            self._eviction.notice("surefoot evict", Fields(first, "evict").optional_number("grace_s"))
            await link.send({"ok": True})
        elif operation == "status":
            await link.send(self._overview())
        else:
            await link.send({"error": f"unknown operation {operation!r}"})

    def _overview(self) -> Body:
        board, status = self._status.board, self._status
        noticed = bool(board.node(NodeWord.NOTICE))
        return {
            **self._about,
            "generation": board.node(NodeWord.GENERATION),
            "ranks": [
                {
                    "rank": trainer.rank,
                    "pid": trainer.pid,
                    "finished": max(0, board.rank(trainer.local_rank, RankWord.STEP) - 1),
                    "phase": Phase(board.rank(trainer.local_rank, RankWord.PHASE)).name.lower(),
                }
                for trainer in self._trainers.live
            ],
            "committed": status.committed and status.committed.step,
            "tier": status.committed_tier,
            "durable_age_s": status.durable_age_s(),
            "notice": noticed,
            "deadline_in_s": board.node(NodeWord.DEADLINE_NS) / 1e9 - boot_s() if noticed else None,
            "time": wall_s(),
            **self._shipper.status(),
        }
