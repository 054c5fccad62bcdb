"""Relay: how far this node's ranks are, told to the other nodes; and theirs, for this node's trainers to read.

What trainers wait for stands on the board (see `surefoot.ipc.board`): a minimum over the other nodes that may be late
and is never early, so that who waits for it waits a little too long when a message is lost, and never goes on too soon.
"""

from __future__ import annotations

from surefoot.agent.nodes.membership import Membership
from surefoot.core.documents import Fields
from surefoot.core.relay import Progress, merge, minimum
from surefoot.ipc.board import Board, NodeWord, RankWord
from surefoot.ipc.wire import Body


class Relay:
    """Both directions."""

    def __init__(self, membership: Membership, board: Board) -> None:
        self._membership = membership
        self._board = board
        self._known: dict[str, Progress] = {}
        self._told: Progress | None = None
        self._generation = 0
        self._local_ranks = 0
        membership.hear("progress", self._hear)

    def begin(self, generation: int, local_ranks: int) -> None:
        """Before any trainer of a generation runs: from here on they wait for the other nodes' ranks, too."""
        self._generation, self._local_ranks = generation, local_ranks
        self._board.set_others(generation, -1, -1)
        self._board.set_node(NodeWord.OTHERS, len(self._membership.others))
        self._told = None
        self._write()

    def tell(self) -> None:
        """A rank of this node sealed a step, gave one up, or left."""
        if self._membership.alone or not self._local_ranks:
            # An agent that has just replaced another tells all once it has met the others.
            return
        sealed = self._board.lowest(RankWord.SEALED, self._generation, self._local_ranks)
        passed = self._board.lowest(RankWord.PASSED, self._generation, self._local_ranks)
        mine = Progress(self._generation, sealed, passed)
        if mine != self._told:
            self._told = mine
            self._membership.tell_on(
                {"op": "progress", "generation": mine.generation, "sealed": sealed, "passed": passed}
            )

    def _hear(self, node: str, body: Body) -> None:
        fields = Fields(body, "progress")
        heard = Progress(fields.integer("generation", 1), fields.integer("sealed", -1), fields.integer("passed", -1))
        self._known[node] = merge(self._known.get(node), heard)
        self._write()

    def _write(self) -> None:
        others = self._membership.others
        if others and self._generation:
            least = minimum(self._known, others, self._generation)
            self._board.set_others(self._generation, max(-1, least.sealed), max(-1, least.passed))
