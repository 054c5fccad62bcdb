"""Whatever bytes come to a listener or to a dialer: never let in, never the end of it, and members go on."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mesh_nodes import BOUND_S, KEY, Node, config, make_node, until

from surefoot.errors import WireError
from surefoot.mesh.channel import connect, enter
from surefoot.mesh.frames import PIECE, WHOLE
from surefoot.mesh.handshake import Me, dial

_HALF_A_SECOND = 0.5


@dataclass
class _Target:
    """Members "b" (attacked) and "c" (its witness), and what a member "a" once said to "b"."""

    loop: asyncio.AbstractEventLoop
    b: Node
    c: Node
    place: tuple[str, int]
    said: bytes
    answered: bytes
    tls: bool

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, BOUND_S))

    async def attack(self, pieces: list[bytes]) -> bytes:
        """Send bytes, then end; what came back."""
        reader, writer = await asyncio.open_connection(*self.place)
        back = b""
        with suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            writer.write_eof()
            back = await reader.read()
        writer.transport.abort()
        return back

    async def attack_inside(self, pieces: list[bytes]) -> None:
        """The same through TLS, where the listener speaks it."""
        channel = await enter(await connect(*self.place), tls=self.tls)
        with suppress(OSError):
            for piece in pieces:
                channel.writer.write(piece)
                await channel.writer.drain()
            channel.writer.close()
            await channel.writer.wait_closed()
        channel.abort()

    async def goes_on(self) -> None:
        """The members are connected to one another and to nobody else, and nothing was heard."""
        assert (await self.c.mesh.ask("b", {"op": "double", "number": 21}, BOUND_S)) == {"twice": 42}
        assert self.b.mesh.linked == ["c"]
        assert self.c.mesh.linked == ["b"]
        assert self.b.told == self.c.told == []
        await until(lambda: self.b.mesh.half_open == 0)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def target(request: pytest.FixtureRequest) -> Iterator[_Target]:
    loop = asyncio.new_event_loop()
    settings = config(tls=request.param, handshake_s=_HALF_A_SECOND)
    b, c = make_node("b", settings), make_node("c", settings)
    loop.run_until_complete(_start(b, c))
    assert b.mesh._door is not None
    place = b.mesh._door.address
    said, answered = loop.run_until_complete(_recorded(b, request.param))
    yield _Target(loop, b, c, place, said, answered, request.param)
    for node in (b, c):
        assert node.task is not None
        assert not node.task.done(), "an agent's task has ended"
        loop.run_until_complete(node.stop())
    loop.close()


async def _start(*nodes: Node) -> None:
    places = {node.name: await node.mesh.listen() for node in nodes}
    for node in nodes:
        node.task = asyncio.create_task(node.mesh.run())
        node.mesh.join({**places, "a": ("127.0.0.1", 1)}, KEY)
    await until(lambda: all(len(node.mesh.linked) == 1 for node in nodes))


async def _recorded(b: Node, tls: bool) -> tuple[bytes, bytes]:
    """What a dialer and this very listener say to each other, an order included."""
    assert b.mesh._door is not None
    channel = await enter(await connect(*b.mesh._door.address), tls=tls)
    said, answered = bytearray(), bytearray()
    write, feed = channel.writer.write, channel.reader.feed_data
    channel.writer.write = _tee(said, write)  # type: ignore[method-assign]
    channel.reader.feed_data = _tee(answered, feed)  # type: ignore[method-assign]
    session = await dial(channel, KEY, Me("a", "life"), "b")
    channel.writer.write(session.sealer.seal(WHOLE, b'{"tell":{"op":"note","number":1}}'))
    await until(lambda: b.told)
    channel.abort()
    await until(lambda: b.mesh.linked == ["c"])
    b.told.clear()
    return bytes(said), bytes(answered)


def _tee(into: bytearray, forward: Callable[[bytes], None]) -> Callable[[bytes], None]:
    def note(data: bytes) -> None:
        into.extend(data)
        forward(data)

    return note


def _parts(stream: bytes) -> list[bytes]:
    """A stream's frames."""
    parts = []
    while stream:
        (length,) = struct.unpack_from("<I", stream)
        parts.append(stream[: 4 + length])
        stream = stream[4 + length :]
    return parts


_framed = st.builds(
    lambda length, body: struct.pack("<I", len(body) if length is None else length) + body,
    st.none() | st.integers(0, 2**32 - 1),
    st.binary(max_size=1200) | st.text(max_size=300).map(str.encode),
)


@given(st.lists(st.binary(max_size=2000) | _framed, max_size=5))
def test_any_bytes_open_nothing(target: _Target, pieces: list[bytes]) -> None:
    """Random bytes, random frames, frames whose length lies: no word back but TLS's own, and the listener goes on."""
    target.run(target.attack_inside(pieces))
    back = target.run(target.attack(pieces))
    assert target.tls or back == b""
    assert b"nonce" not in back
    target.run(target.goes_on())


@given(st.data())
def test_a_recorded_conversation_in_any_disguise_opens_nothing(target: _Target, data: st.DataObject) -> None:
    """Cut, with a bit changed, its frames left out, doubled, swapped, mixed with the answers: nobody is let in."""
    frames = _parts(target.said) + _parts(target.answered)
    order = data.draw(st.lists(st.sampled_from(range(len(frames))), max_size=6) | st.just([0, 1, 2]))
    stream = bytearray(b"".join(frames[i] for i in order))
    if stream and data.draw(st.booleans()):
        bit = data.draw(st.integers(0, 8 * len(stream) - 1))
        stream[bit // 8] ^= 1 << bit % 8
    if stream and data.draw(st.booleans()):
        del stream[data.draw(st.integers(0, len(stream) - 1)) :]
    target.run(target.attack_inside([bytes(stream)]))
    back = target.run(target.attack([bytes(stream)]))
    # An unchanged old hello is answered by one frame; that is all that anybody gets.
    assert target.tls or len(_parts(back)) <= (1 if stream.startswith(frames[0]) else 0)
    target.run(target.goes_on())


@given(st.lists(st.tuples(st.sampled_from([WHOLE, PIECE]), st.binary(max_size=300)), max_size=4), st.booleans())
def test_a_member_gone_mad_harms_nobody_else(target: _Target, frames: list[tuple[int, bytes]], changed: bool) -> None:
    """One that knows the key sends random content, or breaks its frames: put out at most, and the others go on."""

    async def story() -> None:
        channel = await enter(await connect(*target.place), tls=target.tls)
        session = await dial(channel, KEY, Me("a", "life"), "b")
        for kind, content in frames:
            frame = bytearray(session.sealer.seal(kind, content))
            if changed:
                frame[-1] ^= 1
            channel.writer.write(bytes(frame))
        with suppress(OSError):
            await channel.writer.drain()
            if frames and changed:
                with pytest.raises(EOFError):
                    while True:
                        await session.opener.receive(channel.reader)
        channel.abort()
        await until(lambda: "a" not in target.b.mesh.linked)
        await target.goes_on()

    target.run(story())


@given(st.lists(st.binary(max_size=600) | _framed, max_size=4))
def test_whoever_listens_in_a_member_s_place_is_not_believed(pieces: list[bytes]) -> None:
    """A dialer that gets random bytes back fails by an error of its own kind, and has proved nothing."""

    async def story() -> None:
        heard = bytearray()

        async def rogue(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for piece in pieces:
                writer.write(piece)
            writer.write_eof()
            heard.extend(await reader.read())
            writer.close()

        server = await asyncio.start_server(rogue, "127.0.0.1", 0)
        channel = await enter(await connect(*server.sockets[0].getsockname()[:2]), tls=False)
        with pytest.raises((WireError, EOFError, OSError)):
            await dial(channel, KEY, Me("a", "life"), "b")
        channel.abort()
        await until(lambda: heard)
        assert len(_parts(bytes(heard))) == 1
        server.close()

    asyncio.run(asyncio.wait_for(story(), BOUND_S))


def test_an_oversized_frame_does_not_end_the_listener(target: _Target) -> None:
    """A length beyond what a stranger may say, and nothing else."""

    async def story() -> None:
        if target.tls:
            channel = await enter(await connect(*target.place), tls=True)
            reader, writer = channel.reader, channel.writer
        else:
            reader, writer = await asyncio.open_connection(*target.place)
        writer.write(struct.pack("<I", 1025))
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()
        await target.goes_on()

    target.run(story())
