"""The membership: connects the agents of all nodes of a round, and gathers their parts of common decisions.

A *round* is one set of trainers on all nodes; rank 0 draws its nonce, which reaches every agent through its own
trainers. The agents then find each other in the run's place. A node with all ranks is alone: it listens nowhere and
asks no other node.

Every agent keeps its parts of gatherings and its decisions for a while, and sends them again to each node that
connects, so a connection that broke, or an agent that replaces another, misses nothing. A node whose agent does not
come back is dead: gatherings that wait for it end with an error, and its end is reported once.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.presence import Presence
from surefoot.errors import AgentError, ObjectMissingError, SurefootError, TierError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body
from surefoot.mesh.channel import address_towards, is_loopback
from surefoot.mesh.discovery import announce, find, gather, places
from surefoot.mesh.exchange import Answer, Hear
from surefoot.mesh.mesh import Mesh
from surefoot.mesh.secret import round_key, run_secret
from surefoot.tiers.base import Tier

MEET_WITHIN_S = 60.0
"""The agents of one round find each other within this time."""
DEAD_AFTER_S = 10.0
"""Time from the loss of a node to its death: an agent that was killed is replaced soon, and training goes on
meanwhile."""
_LOOK_EVERY_S = 0.5
_ELSEWHERE = "192.0.2.1"
"""An address of a block that is never assigned (RFC 5737), so the route to it is the default route."""
_KEPT = 64
"""Number of this node's parts of gatherings that are kept for nodes that connect late."""
_KNOWN = 512
"""Number of gatherings that are remembered."""


class Membership:
    """One node's part of the membership. `spawn` runs a task that ends with the agent."""

    def __init__(
        self,
        tier: Tier,
        run: str,
        node: str,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        say: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        """`say` gets messages that a person should see, `note` messages that may help to understand a network."""
        self._tier = tier
        self._run = run
        self._spawn = spawn
        self._say = say
        self._mesh = Mesh(node, say=note)
        self._port = 0
        self._host = ""
        self._round = ""
        self._rounds = 0
        self._nodes: list[str] = [node]
        self._ranks: dict[int, str] = {}
        self._values: OrderedDict[str, dict[str, Body]] = OrderedDict()
        """By gathering and node: the node's part."""
        self._brought: OrderedDict[str, Body] = OrderedDict()
        self._latest: dict[str, Body] = {}
        """By operation: the message that is sent again to each node that connects."""
        self.leaving: set[str] = set()
        """Nodes whose end was announced; this one may be among them."""
        self._dead: set[str] = set()
        self._settled = asyncio.Event()
        self._settled.set()
        self._missed = ""
        self._changed = asyncio.Event()
        self.on_dead: Callable[[str], None] = lambda node: None
        """Called with a node that is gone for the rest of this round."""
        self._mesh.on_lost = lambda node: self._spawn_look(node)
        self._mesh.on_back = lambda node: say(f"node {node} is connected again")
        self._mesh.on_linked = self._linked
        self._mesh.hear("brought", self._receive_brought)

    # ------------------------------------------------------------------ the round

    @property
    def me(self) -> str:
        return self._mesh.me.node

    @property
    def nodes(self) -> list[str]:
        """All nodes of the round, in the order of their lowest ranks."""
        return list(self._nodes)

    def node_of(self, rank: int) -> str | None:
        """The node on which a rank of this round runs."""
        return self.me if self.alone else self._ranks.get(rank)

    @property
    def others(self) -> list[str]:
        return [node for node in self._nodes if node != self.me]

    @property
    def alone(self) -> bool:
        return len(self._nodes) == 1 and not self.apart

    @property
    def apart(self) -> bool:
        """True if this agent replaces one of a round of several nodes, and has not met the others yet.

        Until it has, nothing may be decided here as if this node were alone or the leader.
        """
        return not self._settled.is_set() or bool(self._missed)

    @property
    def round(self) -> str:
        """Nonce of the round; empty if this node is alone."""
        return "" if self.alone else self._round

    @property
    def leader(self) -> str:
        """The node that does the work which only one may do: that of rank 0, or the first connected one after it."""
        silent = self._dead.union(self._mesh.lost)
        return next((node for node in self._nodes if node not in silent), self.me)

    @property
    def leads(self) -> bool:
        return self.leader == self.me and not self.apart

    def replaces_one(self) -> None:
        """Note that this agent replaces one that was in a round with others: it is apart until it enters that round."""
        self._settled.clear()

    def miss(self, why: str) -> None:
        """Note that this agent will not meet the others. Tasks that wait for them get the reason."""
        self._missed = why
        self._settled.set()

    async def settled(self, within_s: float | None = None) -> None:
        """Wait until it is known whether this agent meets the others; at most that long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._settled.wait()

    async def enter(self, nonce: str, meet: str, ranks: Sequence[int], world_size: int, *, again: bool = False) -> None:
        """Meet the other nodes of a round.

        Args:
            nonce: the round.
            meet: a host name or address by which the others are reached; it determines the interface to listen on.
            ranks: global ranks of this node's trainers.
            world_size: ranks of all nodes.
            again: this agent replaces one that was in this round.

        Raises:
            AgentError: the other nodes did not come in time, or cannot be reached.
            SurefootError: the run's place has no good list of them.
        """
        if not again:
            self._forget()
        if len(ranks) == world_size:
            self._nodes = [self.me]
            self._settle()
            return
        await self._listen(meet)
        key = round_key(await run_secret(self._tier), self._run, nonce)
        mine = Presence(self.me, self._mesh.me.life, (self._host,), self._port, tuple(sorted(ranks)), world_size)
        await announce(self._tier, nonce, mine, instead=again)
        found = await gather(self._tier, nonce, MEET_WITHIN_S)
        self._round = nonce
        self._ranks = {rank: node for node, one in found.items() for rank in one.ranks}
        self._nodes = sorted((node for node, one in found.items() if one.ranks), key=lambda node: found[node].ranks)
        self._mesh.join(places(found.values()), key)
        await self._mesh.wait_linked(MEET_WITHIN_S)
        self._settle()

    def _settle(self) -> None:
        self._missed = ""
        self._settled.set()

    async def _listen(self, meet: str) -> None:
        if self._port:
            return
        self._host, self._port = await self._mesh.listen(await asyncio.to_thread(_own_address, meet))
        self._spawn(self._mesh.run())
        # The mesh begins to listen in that task.
        await asyncio.sleep(0)

    def _forget(self) -> None:
        self._rounds += 1
        self._changed.set()
        self._values.clear()
        self._brought.clear()
        self._latest.clear()
        self._dead.clear()

    # ------------------------------------------------------------------ telling and asking

    def hear(self, operation: str, handler: Hear) -> None:
        self._mesh.hear(operation, handler)

    def answer(self, operation: str, handler: Answer) -> None:
        self._mesh.answer(operation, handler)

    def tell(self, node: str, body: Body) -> None:
        """Send to one other node. The message is lost if the connection breaks just now."""
        self._mesh.tell(node, body)

    def tell_all(self, body: Body) -> None:
        """Send to every other node. A node whose connection breaks just now loses the message."""
        if not self.alone:
            self._mesh.tell_all(body)

    def tell_on(self, body: Body) -> None:
        """Send to every other node, and the last message of each operation to every node that connects later."""
        if not self.alone:
            self._latest[str(body["op"])] = body
            self._mesh.tell_all(body)

    async def ask(self, node: str, body: Body, within_s: float) -> Body:
        """The answer of one node.

        Raises:
            AgentError: no answer came in time, or the answer is an error.
        """
        return await self._mesh.ask(node, body, within_s)

    async def ask_all(self, body: Body, within_s: float) -> dict[str, Body]:
        """The answers of all other nodes; nodes that do not answer are left out, and the log names them."""
        answers = await asyncio.gather(
            *(self._mesh.ask(node, body, within_s) for node in self.others), return_exceptions=True
        )
        found: dict[str, Body] = {}
        for node, one in zip(self.others, answers, strict=True):
            if isinstance(one, SurefootError):
                self._say(f"{body.get('op')}: {one}")
            elif isinstance(one, BaseException):
                raise one
            else:
                found[node] = one
        return found

    # ------------------------------------------------------------------ coming to the same

    async def gather(self, what: str, mine: Body) -> list[Body]:
        """Send this node's part of a gathering; returns every node's part, in the order of nodes.

        Raises:
            AgentError: a node is gone, or this one could not come back to the others.
        """
        await self.settled()
        if self._missed:
            raise AgentError(self._missed)
        if self.alone:
            return [mine]
        self.bring(what, mine)
        await self._until(what, self._nodes)
        values = self._values[what]
        return [values[node] for node in self._nodes]

    def has_brought(self, node: str, what: str) -> bool:
        return node in self._values.get(what, {})

    def lacking(self, what: str) -> list[str]:
        """Nodes whose part of a gathering has not come."""
        return self._lacking(what, self._nodes)

    async def from_first(self, what: str) -> Body:
        """The part of a gathering from the node of rank 0.

        Raises:
            AgentError: it is gone.
        """
        return await self.brought_by(self._nodes[0], what)

    async def brought_by(self, node: str, what: str) -> Body:
        """The part of a gathering from one node.

        Raises:
            AgentError: it is gone.
        """
        await self._until(what, [node])
        return self._values[what][node]

    @property
    def is_first(self) -> bool:
        """True if this node has rank 0."""
        return self._nodes[0] == self.me

    def bring(self, what: str, mine: Body) -> None:
        """Send this node's part of a gathering, without waiting for the other nodes' parts."""
        self._brought[what] = mine
        while len(self._brought) > _KEPT:
            self._brought.popitem(last=False)
        self._note(what, self.me, mine)
        self.tell_all({"op": "brought", "what": what, "value": mine})

    async def _until(self, what: str, nodes: Iterable[str]) -> None:
        rounds = self._rounds
        while True:
            if rounds != self._rounds:
                raise AgentError("another round began")
            missing = self._lacking(what, nodes)
            if not missing:
                return
            gone = sorted(self._dead.intersection(missing))
            if gone:
                raise AgentError(f"node {', '.join(gone)} is gone")
            self._changed.clear()
            await self._changed.wait()

    def _lacking(self, what: str, nodes: Iterable[str]) -> list[str]:
        return [node for node in nodes if not self.has_brought(node, what)]

    def _receive_brought(self, node: str, body: Body) -> None:
        fields = Fields(body, "brought")
        # A part that comes twice is the same, or newer: an agent that replaces another sends its own.
        self._note(fields.text("what"), node, dict(fields.mapping("value")))

    def _note(self, what: str, node: str, value: Body) -> None:
        self._values.setdefault(what, {})[node] = value
        while len(self._values) > _KNOWN:
            self._values.popitem(last=False)
        self._changed.set()

    def _linked(self, node: str, _fresh: bool) -> None:
        for body in self._latest.values():
            self._mesh.tell(node, body)
        for what, value in self._brought.items():
            self._mesh.tell(node, {"op": "brought", "what": what, "value": value})

    # ------------------------------------------------------------------ who is gone

    def _spawn_look(self, node: str) -> None:
        self._say(f"the connection to node {node} is lost")
        self._spawn(self._look_for(node, self._round))

    async def _look_for(self, node: str, nonce: str) -> None:
        """Look for a lost node's agent, which may have been replaced and listen elsewhere; else the node is dead."""
        end_s = boot_s() + DEAD_AFTER_S
        while boot_s() < end_s:
            await asyncio.sleep(_LOOK_EVERY_S)
            await self._seek(node, nonce, end_s - boot_s())
            if nonce != self._round or node not in self._mesh.lost:
                return
        self.declare_dead(node)

    async def _seek(self, node: str, nonce: str, within_s: float) -> None:
        """Dial a node at the address in its newest entry. A place that does not answer must not keep a dead node
        alive."""
        looking = asyncio.ensure_future(find(self._tier, nonce, node))
        done, _ = await asyncio.wait((looking,), timeout=max(0.0, within_s))
        if not done:
            looking.cancel()
            return
        with suppress(ObjectMissingError, TierError):
            place = looking.result().place
            if nonce == self._round and node in self._mesh.lost:
                self._mesh.move(node, place)

    def declare_dead(self, node: str) -> None:
        """Declare that nothing more comes from that node in this round."""
        if node in self.others and node not in self._dead:
            self._dead.add(node)
            self._changed.set()
            self.on_dead(node)


def _own_address(meet: str) -> str:
    """The address at which the other nodes reach this machine."""
    try:
        mine = address_towards(meet)
    except OSError as error:
        raise AgentError(f"no way to {meet}, where the ranks meet: {error}") from error
    if is_loopback(mine) and not is_loopback(meet):
        # Many systems give their own name an address of the loopback interface, where no other machine reaches them.
        with suppress(OSError):
            mine = address_towards(_ELSEWHERE)
    return "127.0.0.1" if is_loopback(mine) else mine
