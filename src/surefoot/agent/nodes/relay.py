"""Relay: sends this node's progress to the other nodes, and writes theirs to the board for this node's trainers.

The board has the numbers for which trainers wait (see `surefoot.ipc.board`): minima over the other nodes that may lag
behind and never run ahead. So a trainer waits a little too long when a message is lost, and never goes on too soon.
"""

from __future__ import annotations

from surefoot.agent.nodes.membership import Membership
from surefoot.core.documents import Fields
from surefoot.core.relay import Progress, merge, minimum
from surefoot.ipc.board import Board, NodeWord, RankWord
from surefoot.ipc.wire import Body


class Relay:
    """Relays progress in both directions."""

    def __init__(self, membership: Membership, board: Board) -> None:
        self._membership = membership
        self._board = board
        self._known: dict[str, Progress] = {}
        self._sent: Progress | None = None
        self._generation = 0
        self._local_ranks = 0
        membership.hear("progress", self._receive)

    def begin(self, generation: int, local_ranks: int) -> None:
        """Start a generation, before any of its trainers runs: from here on they wait for the other nodes' ranks,
        too."""
        self._generation, self._local_ranks = generation, local_ranks
        self._board.set_others(generation, -1, -1)
        self._board.set_node(NodeWord.OTHERS, len(self._membership.others))
        self._sent = None
        self._write()

    def tell(self) -> None:
        """Send this node's progress: one of its ranks sealed a step, gave one up, or left."""
        if self._membership.alone or not self._local_ranks:
            # An agent that has just replaced another sends its progress once it has met the other nodes.
            return
        sealed = self._board.lowest(RankWord.SEALED, self._generation, self._local_ranks)
        passed = self._board.lowest(RankWord.PASSED, self._generation, self._local_ranks)
        mine = Progress(self._generation, sealed, passed)
        if mine != self._sent:
            self._sent = mine
            self._membership.tell_on(
                {"op": "progress", "generation": mine.generation, "sealed": sealed, "passed": passed}
            )

    def _receive(self, node: str, body: Body) -> None:
        fields = Fields(body, "progress")
        theirs = Progress(fields.integer("generation", 1), fields.integer("sealed", -1), fields.integer("passed", -1))
        self._known[node] = merge(self._known.get(node), theirs)
        self._write()

    def _write(self) -> None:
        others = self._membership.others
        if others and self._generation:
            least = minimum(self._known, others, self._generation)
            self._board.set_others(self._generation, max(-1, least.sealed), max(-1, least.passed))
