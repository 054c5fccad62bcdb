"""Presence: what each node's agent puts where the others find it, and when all that are needed are there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.layout import is_node_name
from surefoot.errors import ConfigError, CorruptError

MAX_ADDRESSES = 16
MAX_PORT = 65535
MAX_WORLD_SIZE = 1_000_000
_MAX_ADDRESS_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Presence:
    """One node of a round: where its agent listens, and whose trainers it has."""

    node: str
    life: str
    """Which process of that name it is: a restarted agent has another one."""
    addresses: tuple[str, ...]
    """The best one first."""
    port: int
    ranks: tuple[int, ...]
    """Global ranks of its trainers, ascending; empty for a node without one."""
    world_size: int

    @property
    def place(self) -> tuple[str, int]:
        """Where to dial."""
        return self.addresses[0], self.port

    def body(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "life": self.life,
            "addresses": list(self.addresses),
            "port": self.port,
            "ranks": list(self.ranks),
            "world_size": self.world_size,
        }

    @classmethod
    def from_body(cls, body: Any, what: str) -> Presence:
        """Read what another node put; `what` is its key, for messages.

        Raises:
            CorruptError: a member is missing, of another type or out of bounds.
        """
        fields = Fields(body, what)
        presence = cls(
            fields.text("node"),
            fields.text("life"),
            tuple(fields.items("addresses")),
            fields.integer("port", 1),
            fields.integers("ranks"),
            fields.integer("world_size", 1),
        )
        wrong = _wrong(presence)
        if wrong:
            raise CorruptError(f"{what}: {wrong}")
        return presence


@dataclass(frozen=True, slots=True)
class Census:
    """Who is there, and who is not."""

    world_size: int
    """0 while nobody is there."""
    missing: tuple[int, ...]
    """Ranks that no node has, ascending."""

    @property
    def complete(self) -> bool:
        return self.world_size > 0 and not self.missing


def count(present: Iterable[Presence]) -> Census:
    """Whether the ranks of all nodes are together the whole world, each once.

    Raises:
        ConfigError: they cannot become one: two sizes of the world, or a rank that two nodes have or that is beyond it.
    """
    holder: dict[int, str] = {}
    first: Presence | None = None
    for each in sorted(present, key=lambda presence: presence.node):
        first = first or each
        if each.world_size != first.world_size:
            raise ConfigError(
                f"node {each.node} has a world of {each.world_size} ranks, node {first.node} of {first.world_size}: "
                "start all nodes with the same number of nodes and processes"
            )
        for rank in each.ranks:
            if rank in holder:
                raise ConfigError(
                    f"rank {rank} is on node {holder[rank]} and on node {each.node}: "
                    "give each node a rank of its own (torchrun: --node-rank), and each launch a round of its own"
                )
            holder[rank] = each.node
    world_size = first.world_size if first else 0
    return Census(world_size, tuple(rank for rank in range(world_size) if rank not in holder))


def spans(ranks: Iterable[int], most: int = 8) -> str:
    """Ranks as people read them: ``0-3, 7``; beyond `most` pieces only how many more."""
    pieces: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if pieces and rank == pieces[-1][1] + 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in pieces]
    more = sum(high - low + 1 for low, high in pieces[most:])
    return ", ".join(texts[:most]) + (f" and {more} more" if more else "")


def _wrong(presence: Presence) -> str | None:
    """What is wrong with an entry, if anything is."""
    if not is_node_name(presence.node):
        return f"{presence.node[:140]!r} is not a node's name"
    if not 0 < len(presence.life) <= 64:
        return "the name of the process has 1 to 64 characters"
    if not 0 < len(presence.addresses) <= MAX_ADDRESSES or not all(_is_address(each) for each in presence.addresses):
        return f"'addresses' is not a list of 1 to {MAX_ADDRESSES} addresses"
    if presence.port > MAX_PORT:
        return f"port {presence.port} is beyond {MAX_PORT}"
    if presence.world_size > MAX_WORLD_SIZE:
        return f"a world of {presence.world_size} ranks; at most {MAX_WORLD_SIZE} are believed"
    if list(presence.ranks) != sorted(set(presence.ranks)):
        return "'ranks' is not ascending"
    if presence.ranks and presence.ranks[-1] >= presence.world_size:
        return f"rank {presence.ranks[-1]} is beyond its world of {presence.world_size}"
    return None


def _is_address(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= _MAX_ADDRESS_CHARACTERS and value.isascii() and value.isprintable()
