"""Runs a node's part of the mesh: listens, keeps one connection to each other node, and reports lost nodes.

Of each pair the node with the smaller name dials, until it learns that the other is gone. Messages to a node wait
while there is no connection, up to a bound. They arrive at most once and in order (short and long ones apart); a
message on its way when a connection ended is lost, so a caller that must be sure asks, or sends again from `on_linked`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields

from surefoot.core import liveness
from surefoot.core.layout import is_node_name
from surefoot.core.liveness import Bounds, View
from surefoot.core.presence import MAX_PORT
from surefoot.errors import AgentError, ConfigError, UsageError, WireError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body
from surefoot.mesh.channel import DEFAULT_HANDSHAKE_S, Channel, connect, enter, is_loopback
from surefoot.mesh.door import Door
from surefoot.mesh.exchange import Answer, Handlers, Hear
from surefoot.mesh.handshake import Me, Session, answer, dial, new_life
from surefoot.mesh.member import Member, Place
from surefoot.mesh.outbox import Outbox
from surefoot.mesh.secret import RoundKey

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_DIALS_AT_ONCE = 4
"""When many nodes start at once on busy machines, a few handshakes at a time end in time; all at once would not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshConfig:
    """Bounds of one mesh. Holds no secret."""

    bounds: Bounds = field(default_factory=Bounds)
    tls: bool | None = None
    """None: on every interface but loopback. All nodes must agree."""
    connect_s: float = 3.0
    """Until a node that is dialed has taken the connection."""
    handshake_s: float = DEFAULT_HANDSHAKE_S
    """From then on until both sides are sure of each other."""
    half_open: int = 256
    """Connections that have proved nothing yet."""
    waiting_messages: int = 4096
    """Messages that wait for one member; one more, and the connection is cut off."""
    waiting_bytes: int = 2 * MAX_MESSAGE_BYTES
    redial_first_s: float = 0.05
    redial_most_s: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("bounds", "tls") and not value > 0:
                raise ConfigError(f"{each.name} is {value}: give a number above 0")


def _nothing(_node: str) -> None:
    pass


def _nothing_linked(_node: str, _fresh: bool) -> None:
    pass


class Mesh:
    """`listen`, then `run` in a task of the owner's group; `join` and everything else from the same event loop.

    `on_lost`, `on_back` and `on_linked` are called where connections are read: they must not wait.
    """

    def __init__(
        self,
        node: str,
        config: MeshConfig | None = None,
        *,
        now_s: Callable[[], float] = boot_s,
        say: Callable[[str], None] = _nothing,
    ) -> None:
        """`say` gets one line for each fault, never with a secret in it."""
        if not is_node_name(node):
            raise ConfigError(f"not a node's name: {node[:140]!r}; up to 128 letters, digits, '.', '_' and '-'")
        self.me = Me(node, new_life())
        self.on_lost: Callable[[str], None] = _nothing
        """Called with a node whose counter did not change for too long."""
        self.on_back: Callable[[str], None] = _nothing
        """Called with a node that was lost and sends again."""
        self.on_linked: Callable[[str, bool], None] = _nothing_linked
        """Called with a node to which a connection now stands, and whether it is the first to that process."""
        self._config = config or MeshConfig()
        self._now_s = now_s
        self._say = say
        self._handlers = Handlers()
        self._members: dict[str, Member] = {}
        self._key: RoundKey | None = None
        self._view = View(now_s())
        self._counter = 0
        self._door: Door | None = None
        self._group: asyncio.TaskGroup | None = None
        self._changed = asyncio.Event()
        self._random = random.Random()
        self._gates = {silent: asyncio.Semaphore(_DIALS_AT_ONCE) for silent in (False, True)}

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Place:
        """Listen, and return the address. A connection that comes before `join` is turned away unread.

        Raises:
            ConfigError: this machine has no such address, or the port is taken.
        """
        self._door = await Door.open(host, port, self._config.tls, self._config.half_open, self._config.handshake_s)
        return self._door.address

    async def run(self) -> None:
        """For ever; cancelled by the owner. All tasks of the mesh live and end in here."""
        if self._door is None:
            raise UsageError("the mesh does not listen yet: call listen() before run()")
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for member in self._members.values():
                    self._keep(member)
                group.create_task(self._door.serve(group, self._prove, self._enter, self._say))
                group.create_task(self._keep_time())
        finally:
            self._group = None
            self._door.close()
            for member in self._members.values():
                member.cut()

    def hear(self, operation: str, handler: Hear) -> None:
        """Set the handler of one-way messages whose `op` is `operation`. It must not wait."""
        self._handlers.hear(operation, handler)

    def answer(self, operation: str, handler: Answer) -> None:
        """How to answer bodies asked whose `op` is `operation`."""
        self._handlers.answer(operation, handler)

    def join(self, members: Mapping[str, Place], key: RoundKey) -> None:
        """Enter a round: its nodes and where they listen (this one may be among them), and its key.

        A round before it ends at once: its connections, its messages, its questions.
        """
        for node, (_host, port) in members.items():
            if not is_node_name(node) or not 0 < port <= MAX_PORT:
                raise ConfigError(f"not a member: node {node[:140]!r} at port {port}")
        for node in list(self._members):
            self._drop(node)
        self._key = key
        others = {node: place for node, place in members.items() if node != self.me.node}
        self._view = liveness.begin(others, self._now_s())
        for node, place in others.items():
            self._members[node] = Member(node, place, self._outbox(), self._handlers, self._beaten, self._say)
            self._keep(self._members[node])
        self._note_change()

    def gone(self, node: str) -> None:
        """The node left the round for good: no more dialing, no connection, no word about it."""
        if node in self._members:
            self._drop(node)
            self._view = liveness.without(self._view, node)
            self._note_change()

    def move(self, node: str, place: Place) -> None:
        """The node's agent listens elsewhere from now on."""
        self._member(node).place = place

    def tell(self, node: str, body: Body) -> bool:
        """Queue a message; False if the node is lost, or does not take what waits for it.

        Raises:
            UsageError: the node is not a member of the round.
        """
        return self._member(node).post({"tell": body})

    def tell_all(self, body: Body) -> list[str]:
        """Queue a message to every member; the nodes for which it could not be queued."""
        return [node for node, member in self._members.items() if not member.post({"tell": body})]

    async def ask(self, node: str, body: Body, within_s: float) -> Body:
        """The node's answer.

        Raises:
            AgentError: none came in time, the node is lost, the connection ended, or the answer is an error.
            UsageError: the node is not a member of the round.
        """
        questions = self._member(node).questions
        number, answered = questions.begin()
        try:
            if not self._member(node).post({"ask": number, "body": body}):
                raise AgentError(f"node {node} is lost, or takes no messages")
            async with asyncio.timeout(within_s):
                return await answered
        except TimeoutError:
            raise AgentError(f"node {node} did not answer {body.get('op')!r} within {within_s:g} s") from None
        finally:
            questions.end(number)

    @property
    def members(self) -> list[str]:
        return sorted(self._members)

    @property
    def linked(self) -> list[str]:
        """Members to which a connection stands."""
        return sorted(node for node, member in self._members.items() if member.link is not None)

    @property
    def lost(self) -> list[str]:
        return self._view.names("lost")

    @property
    def half_open(self) -> int:
        """Connections that have proved nothing yet."""
        return self._door.half_open if self._door is not None else 0

    async def wait_linked(self, within_s: float) -> None:
        """Until connections to all members stand.

        Raises:
            AgentError: they do not within `within_s`; names the missing.
        """
        try:
            async with asyncio.timeout(within_s):
                while len(self.linked) < len(self._members):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            missing = sorted(set(self._members) - set(self.linked))
            raise AgentError(
                f"no connection to the agents of {', '.join(missing)} within {within_s:g} s: "
                "do they run, and do firewalls let these nodes reach one another?"
            ) from None

    def _member(self, node: str) -> Member:
        member = self._members.get(node)
        if member is None:
            raise UsageError(f"node {node} is not a member of this round; members: {', '.join(self.members)}")
        return member

    def _outbox(self) -> Outbox:
        return Outbox(self._config.waiting_messages, self._config.waiting_bytes)

    def _keep(self, member: Member) -> None:
        if self._group is not None and self.me.node < member.node:
            member.dialing = self._group.create_task(self._keep_dialed(member))

    def _drop(self, node: str) -> None:
        member = self._members.pop(node)
        if member.dialing is not None:
            member.dialing.cancel()
        member.cut()

    def _note_change(self) -> None:
        self._changed.set()

    # Connections.

    async def _keep_dialed(self, member: Member) -> None:
        pause_s = self._config.redial_first_s
        while True:
            try:
                channel, session = await self._dial(member)
            except (OSError, EOFError) as error:
                member.silent = isinstance(error, TimeoutError)
                member.say_once(f"cannot reach node {member.node} at {member.place[0]}: {_words(error)}")
            else:
                pause_s = self._config.redial_first_s
                member.silent = False
                await self._serve(member, channel, session)
            # Spread, so that many nodes do not all come at the same moment.
            await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self._config.redial_most_s)

    async def _dial(self, member: Member) -> tuple[Channel, Session]:
        assert self._key is not None
        host, port = member.place
        tls = self._config.tls if self._config.tls is not None else not is_loopback(host)
        # Nodes that do not answer hold up only their like: they have a gate of their own.
        async with self._gates[member.lost or member.silent]:
            async with asyncio.timeout(self._config.connect_s):
                sock = await connect(host, port)
            async with asyncio.timeout(self._config.handshake_s):
                channel = await enter(sock, tls, self._config.handshake_s)
                try:
                    return channel, await dial(channel, self._key, self.me, member.node)
                except BaseException:
                    channel.abort()
                    raise

    async def _prove(self, channel: Channel) -> Session:
        if self._key is None:
            raise WireError("this node is in no round yet")
        return await answer(channel, self._key, self.me, self._verdict)

    def _verdict(self, node: str, life: str) -> str | None:
        member = self._members.get(node)
        if member is None:
            return f"{node} is not a member of this round"
        if self.me.node < node:
            return f"{self.me.node} dials {node}, not the other way round"
        if member.link is not None and member.life != life and not member.lost:
            return f"another process speaks for {node}: give each node a name of its own"
        return None

    async def _enter(self, channel: Channel, session: Session) -> None:
        member = self._members.get(session.node)
        # Another round may have begun while the two proved themselves.
        if member is not None and self._key is not None and session.round_nonce == self._key.round_nonce:
            await self._serve(member, channel, session)

    async def _serve(self, member: Member, channel: Channel, session: Session) -> None:
        assert self._group is not None
        fresh = session.life != member.life

        def linked() -> None:
            member.post({"beat": self._counter})
            self._note_change()
            self.on_linked(member.node, fresh)
            if self._members.get(member.node) is member:
                # Its proof was made just now: a process that has sent nothing before has begun to live.
                self._beaten(member.node, session.life, liveness.NO_BEAT)

        await member.serve(self._group, channel, session, MAX_MESSAGE_BYTES, linked)

    # Liveness.

    async def _keep_time(self) -> None:
        bounds = self._config.bounds
        while True:
            await asyncio.sleep(bounds.beat_s)
            self._counter += 1
            self._beat(member for member in list(self._members.values()) if member.link is not None)
            looked = liveness.look(self._view, bounds, self._now_s())
            self._view = looked.view
            if looked.stood_still_s:
                self._say(f"this agent stood still for {looked.stood_still_s:.1f} s: nobody is judged by that time")
            for member in [self._members[node] for node in looked.lost]:
                # A callback may have entered a new round, or have called others gone.
                if self._members.get(member.node) is member:
                    self._lose(member)

    def _beat(self, members: Iterable[Member]) -> None:
        for member in members:
            member.post({"beat": self._counter})

    def _lose(self, member: Member) -> None:
        member.lost = True
        member.cut()
        self.on_lost(member.node)

    def _beaten(self, node: str, life: str, counter: int) -> None:
        self._view, back = liveness.hear(self._view, node, life, counter, self._now_s())
        if back:
            self._members[node].lost = False
            self.on_back(node)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
