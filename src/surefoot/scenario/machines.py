"""Where the nodes of a scenario are: namespaces of their own if this process is in a network of its own, else process
trees that share this machine's address."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from surefoot.scenario.job import Link
from surefoot.scenario.network import Host, Network, is_isolated
from surefoot.scenario.s3_server import S3Server, free_ports

_STORE = "store"
_MEETING_PORT = 29400


@dataclass(frozen=True, slots=True)
class Machines:
    """As many as there are nodes, and one for the store."""

    hosts: tuple[Host, ...] = ()
    """Empty: they share this machine's address."""
    store: Host | None = None
    port: int = _MEETING_PORT

    @property
    def meet(self) -> str:
        """Where the nodes' launchers meet."""
        return f"{self.hosts[0].name if self.hosts else '127.0.0.1'}:{self.port}"

    def command(self, number: int, command: Sequence[str]) -> list[str]:
        """What runs a command on that node."""
        return self.hosts[number].command(command) if self.hosts else list(command)

    def link(self, number: int) -> Link | None:
        """What joins that node to the others; None: it cannot be cut."""
        return self.hosts[number] if self.hosts else None

    @property
    def can_cut(self) -> bool:
        return bool(self.hosts)

    def server(self) -> S3Server:
        """An S3 server that every node reaches."""
        return S3Server() if self.store is None else S3Server(self.store.address, self.store.command([]))


@contextmanager
def machines(num_nodes: int) -> Iterator[Machines]:
    """Make them; they are gone afterwards."""
    if num_nodes == 1 or not is_isolated():
        (port,) = free_ports(1)
        yield Machines(port=port)
        return
    names = [f"node{number}" for number in range(num_nodes)]
    with Network([*names, _STORE]) as network:
        yield Machines(tuple(network.hosts[name] for name in names), network.hosts[_STORE])
