"""The handshake: both sides know the key, or neither gets anywhere; nothing old, foreign or reflected is believed."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from mesh_nodes import BOUND_S, KEY, OTHER_ROUND, OTHER_SECRET, config, make_node, running, until

from surefoot.core.documents import compact
from surefoot.errors import WireError
from surefoot.mesh.certificate import make_certificate
from surefoot.mesh.channel import PLAIN, Channel, accept, connect, enter
from surefoot.mesh.frames import WHOLE, plain, receive_plain
from surefoot.mesh.handshake import Me, NotWelcomeError, Session, answer, dial
from surefoot.mesh.secret import RoundKey

_A, _B = Me("a", "life of a"), Me("b", "life of b")


def _welcome(_node: str, _life: str) -> str | None:
    return None


@asynccontextmanager
async def _channels(*, names: tuple[str, str] = (PLAIN, PLAIN)) -> AsyncIterator[tuple[Channel, Channel]]:
    """Both ends of a TCP connection; `names` is what each takes the channel for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialing = asyncio.create_task(connect(*server.getsockname()[:2]))
        server.setblocking(False)
        sock, _ = await asyncio.get_running_loop().sock_accept(server)
        ends = (
            replace(await enter(await dialing, tls=False), name=names[0]),
            replace(await accept(sock, None), name=names[1]),
        )
        try:
            yield ends
        finally:
            for end in ends:
                end.abort()


async def _end_after(work: Awaitable[Session], channel: Channel) -> Session:
    """As the mesh does: whoever fails ends the connection."""
    try:
        return await work
    except BaseException:
        channel.abort()
        raise


async def _shake(
    dialer: Channel,
    listener: Channel,
    *,
    keys: tuple[RoundKey, RoundKey] = (KEY, KEY),
    us: tuple[Me, Me] = (_A, _B),
    to: str = "b",
    verdict: Callable[[str, str], str | None] = _welcome,
) -> list[Session | BaseException]:
    async with asyncio.timeout(BOUND_S):
        return await asyncio.gather(
            _end_after(dial(dialer, keys[0], us[0], to), dialer),
            _end_after(answer(listener, keys[1], us[1], verdict), listener),
            return_exceptions=True,
        )


def test_both_sides_learn_who_the_other_is() -> None:
    """Names and lives arrive; frames sealed by one are opened by the other, in both directions, in order."""

    async def story() -> None:
        async with _channels() as (dialer, listener):
            a, b = await _shake(dialer, listener)
            assert isinstance(a, Session)
            assert isinstance(b, Session)
            assert (a.node, a.life, b.node, b.life) == ("b", "life of b", "a", "life of a")
            for number in range(3):
                dialer.writer.write(a.sealer.seal(WHOLE, b"out %d" % number))
                listener.writer.write(b.sealer.seal(WHOLE, b"back %d" % number))
            for number in range(3):
                assert await b.opener.receive(listener.reader) == (WHOLE, b"out %d" % number)
                assert await a.opener.receive(dialer.reader) == (WHOLE, b"back %d" % number)

    asyncio.run(story())


@pytest.mark.parametrize("wrong", ["secret", "round", "to", "same name", "channel"])
def test_whoever_is_not_of_the_round_gets_no_answer(wrong: str) -> None:
    """Another secret, round, target or view of the channel, or the listener's own name: not a byte back."""
    keys = {"secret": (OTHER_SECRET, KEY), "round": (OTHER_ROUND, KEY)}.get(wrong, (KEY, KEY))

    async def story() -> None:
        names = ("what the one in the middle shows", "what the listener has") if wrong == "channel" else (PLAIN, PLAIN)
        async with _channels(names=names) as (dialer, listener):
            seen = _record(dialer)
            a, b = await _shake(
                dialer,
                listener,
                keys=keys,
                us=(_B if wrong == "same name" else _A, _B),
                to="c" if wrong == "to" else "b",
            )
            assert isinstance(a, EOFError | OSError)
            assert isinstance(b, WireError)
            assert bytes(seen) == b""

    asyncio.run(story())


def test_a_listener_that_does_not_know_the_key_is_found_out() -> None:
    """Somebody sits at a member's address and answers in good form: the dialer gives no proof and goes."""

    async def story() -> None:
        async with _channels() as (dialer, listener):
            dialing = asyncio.create_task(_end_after(dial(dialer, KEY, _A, "b"), dialer))
            hello = await receive_plain(listener.reader)
            # All that it has are the dialer's own words.
            listener.writer.write(plain({"life": "x", "nonce": hello["nonce"], "proof": hello["proof"]}))
            with pytest.raises(WireError, match="does not know the key"):
                await dialing
            assert await listener.reader.read() == b""

    asyncio.run(story())


def test_a_refusal_is_told_only_to_those_who_know_the_key() -> None:
    """The reason reaches the dialer in a frame under the connection's keys; both sides end."""

    async def story() -> None:
        async with _channels() as (dialer, listener):
            a, b = await _shake(dialer, listener, verdict=lambda node, life: f"no {node} with {life}")
            assert isinstance(a, NotWelcomeError)
            assert "node b refuses: no a with life of a" in str(a)
            assert isinstance(b, NotWelcomeError)

    asyncio.run(story())


def test_a_recorded_conversation_opens_nothing() -> None:
    """All that a dialer once said, said again: answered to the first word only, and not let in."""

    async def story() -> None:
        async with _channels() as (dialer, listener):
            said = _record(listener)
            a, _ = await _shake(dialer, listener)
            assert isinstance(a, Session)
            dialer.writer.write(a.sealer.seal(WHOLE, b"an order"))
            await asyncio.sleep(0)
        async with _channels() as (thief, listener):
            thief.writer.write(bytes(said))
            with pytest.raises(WireError, match="does not know the key"):
                await _end_after(answer(listener, KEY, _B, _welcome), listener)

    asyncio.run(story())


def test_words_sent_back_open_nothing() -> None:
    """Whoever sends a dialer's words back to it, or a listener's to the listener, is not believed."""

    async def story() -> None:
        async with _channels() as (dialer, mirror):
            dialing = asyncio.create_task(_end_after(dial(dialer, KEY, _A, "b"), dialer))
            mirror.writer.write(plain(await receive_plain(mirror.reader)))
            with pytest.raises(WireError):
                await dialing
        async with _channels() as (mirror, listener):
            answering = asyncio.create_task(_end_after(answer(listener, KEY, _B, _welcome), listener))
            first, _other = await _hello(KEY, "a", "b")
            mirror.writer.write(first)
            here = await receive_plain(mirror.reader)
            mirror.writer.write(plain({"proof": here["proof"]}))
            with pytest.raises(WireError, match="does not know the key"):
                await answering

    asyncio.run(story())


def test_two_listeners_cannot_be_played_against_each_other() -> None:
    """A hello meant for one node, passed on to another, is not answered there."""

    async def story() -> None:
        async with _channels() as (thief, listener):
            hello, _channel = await _hello(KEY, "a", "c")
            thief.writer.write(hello)
            with pytest.raises(WireError, match="a hello for node 'c' at node b"):
                await _end_after(answer(listener, KEY, _B, _welcome), listener)

    asyncio.run(story())


async def _hello(key: RoundKey, node: str, to: str) -> tuple[bytes, Channel]:
    """A genuine first word, cut off by a thief."""
    async with _channels() as (dialer, thief):
        dialing = asyncio.create_task(dial(dialer, key, Me(node, "life"), to))
        body = await receive_plain(thief.reader)
        dialing.cancel()
        return plain(body), thief


@pytest.mark.holds("loopback-or-tls")
@pytest.mark.parametrize("honest", [True, False], ids=["passes bytes on", "ends TLS itself"])
def test_nobody_stands_in_the_middle_of_tls(honest: bool) -> None:
    """A relay of bytes sees nothing and is harmless; one that ends the TLS of both sides is found out by both."""

    async def story() -> None:
        a, b = make_node("a", config(tls=True)), make_node("b", config(tls=True))
        async with running([a, b]) as places, _relay(places["b"], tls=not honest) as relay:
            for node in (a, b):
                node.mesh.join({**places, "b": relay.place}, KEY)
            if honest:
                await a.mesh.wait_linked(BOUND_S)
                assert (await a.mesh.ask("b", {"op": "double", "number": 2}, BOUND_S)) == {"twice": 4}
                assert b"double" not in relay.passed
            else:
                await until(lambda: any("cannot reach node b" in said for said in a.said))
                await until(lambda: relay.visits >= 3)
                assert b'"from":"a"' in relay.passed
                assert (a.mesh.linked, b.mesh.linked) == ([], [])

    asyncio.run(story())


def test_a_relay_on_loopback_can_listen_and_say_nothing() -> None:
    """Below plain TCP a relay passes a conversation on; the first bit that it changes ends it, unheard."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with running([a, b]) as places, _relay(places["b"], tls=False) as relay:
            for node in (a, b):
                node.mesh.join({**places, "b": relay.place}, KEY)
            await a.mesh.wait_linked(BOUND_S)
            await a.mesh.ask("b", {"op": "double", "number": 2}, BOUND_S)
            relay.flip = b"genuine"
            a.mesh.tell("b", {"op": "note", "text": "genuine"})
            await until(lambda: any("proof" in said for said in b.said))
            await until(lambda: relay.visits >= 2 and a.mesh.linked and b.mesh.linked)
            a.mesh.tell("b", {"op": "note", "text": "other"})
            await until(lambda: b.told)
            assert b.told == [("a", {"op": "note", "text": "other"})]

    asyncio.run(story())


def test_a_silent_connection_ends_in_time() -> None:
    """Whoever says nothing, or half a word, is put out after the bound; the listener goes on."""

    async def story() -> None:
        for tls in (False, True):
            b = make_node("b", config(tls=tls, handshake_s=0.2))
            async with running([b]) as places:
                b.mesh.join(places, KEY)
                for word in (b"", b"\x10", struct.pack("<I", 100) + b"{"):
                    sock = socket.create_connection(places["b"])
                    sock.setblocking(False)
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(sock, word)
                    async with asyncio.timeout(BOUND_S):
                        with suppress(ConnectionResetError):
                            assert await loop.sock_recv(sock, 100) == b""
                    sock.close()
                await until(lambda b=b: b.mesh.half_open == 0)

    asyncio.run(story())


def test_an_oversized_frame_is_refused_before_it_is_read() -> None:
    """The least length beyond what a stranger may say ends the connection, though none of the rest has come."""

    async def story() -> None:
        b = make_node("b", config(handshake_s=100 * BOUND_S))
        async with running([b]) as places:
            b.mesh.join(places, KEY)
            for length in (1025, 2**31, 2**32 - 1, 0, 1):
                reader, writer = await asyncio.open_connection(*places["b"])
                writer.write(struct.pack("<I", length))
                async with asyncio.timeout(BOUND_S):
                    assert await reader.read() == b""
                writer.close()

    asyncio.run(story())


def test_a_flood_of_half_open_connections_is_bounded_and_keeps_nobody_out() -> None:
    """Hundreds that say nothing: only so many places are taken, and a member still gets in at once."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b", config(half_open=16, handshake_s=BOUND_S))
        flood: list[socket.socket] = []
        async with running([a, b]) as places:
            b.mesh.join(places, KEY)
            try:
                for _ in range(300):
                    flood.append(socket.create_connection(places["b"]))
                    assert b.mesh.half_open <= 16
                    await asyncio.sleep(0)
                await until(lambda: b.mesh.half_open == 16)
                a.mesh.join(places, KEY)
                await a.mesh.wait_linked(BOUND_S)
                assert (await a.mesh.ask("b", {"op": "double", "number": 1}, BOUND_S)) == {"twice": 2}
                assert b.mesh.half_open <= 16
            finally:
                for sock in flood:
                    sock.close()
            await until(lambda: b.mesh.half_open == 0)

    asyncio.run(story())


def test_a_frame_out_of_turn_is_refused() -> None:
    """Repeated, swapped, sent back, of another connection, of another kind, cut, lengthened: each is refused."""

    async def story() -> None:
        async with _channels() as (dialer, listener), _channels() as (dialer2, listener2):
            a, b = await _shake(dialer, listener)
            a2, _b2 = await _shake(dialer2, listener2)
            assert isinstance(a, Session)
            assert isinstance(b, Session)
            assert isinstance(a2, Session)
            one, two = (a.sealer.seal(WHOLE, text)[4:] for text in (b"one", b"two"))
            back = b.sealer.seal(WHOLE, b"one")[4:]
            foreign = a2.sealer.seal(WHOLE, b"one")[4:]
            for wrong in (two, back, foreign, b"\x01" + one[1:], one[:-1], one + b"\0", one[:1] + one[2:]):
                with pytest.raises(WireError, match="without the proof"):
                    b.opener.open(wrong)
            assert b.opener.open(one) == (WHOLE, b"one")
            with pytest.raises(WireError, match="without the proof"):
                b.opener.open(one)
            assert b.opener.open(two) == (WHOLE, b"two")
            with pytest.raises(WireError, match="unknown kind 9"):
                b.opener.open(a.sealer.seal(9, b"")[4:])

    asyncio.run(story())


def test_each_connection_has_keys_of_its_own() -> None:
    """Between the same processes in the same round, no two connections and no two directions share one."""

    async def story() -> None:
        keys = []
        for _ in range(2):
            async with _channels() as ends:
                for session in await _shake(*ends):
                    assert isinstance(session, Session)
                    keys.append((session.sealer._key, session.opener._key))
        assert keys[0] == keys[1][::-1]
        assert keys[2] == keys[3][::-1]
        assert len({key for pair in keys for key in pair}) == 4

    asyncio.run(story())


def test_what_knows_the_key_and_breaks_the_form_is_put_out() -> None:
    """After a good handshake: pieces without end, no JSON, no object, unknown and odd messages. Others go on."""

    async def story() -> None:
        b, c = make_node("b"), make_node("c")
        async with running([b, c]) as places:
            for node in (b, c):
                node.mesh.join({**places, "a": ("127.0.0.1", 1)}, KEY)
            for content in (
                b"",
                b"[]",
                b"{",
                b"nan",
                b"[" * 60_000,
                compact({"what": 1}),
                compact({"beat": "1"}),
                compact({"beat": -1}),
                compact({"beat": 2**63}),
                compact({"tell": 1}),
                compact({"ask": 1}),
                compact({"ask": None, "body": {}}),
                compact({"answer": 1}),
                compact({"answer": "x", "body": {}}),
                b'{"beat":' + b"1" * 5000 + b"}",
            ):
                channel = await enter(await connect(*places["b"]), tls=False)
                session = await dial(channel, KEY, Me("a", "life"), "b")
                channel.writer.write(session.sealer.seal(WHOLE, content))
                async with asyncio.timeout(BOUND_S):
                    with pytest.raises(EOFError):
                        while True:
                            await session.opener.receive(channel.reader)
                channel.abort()
            await b.mesh.ask("c", {"op": "double", "number": 1}, BOUND_S)
            assert json.dumps(b.told + c.told) == "[]"

    asyncio.run(story())


def _record(channel: Channel) -> bytearray:
    """What this end receives from now on."""
    seen = bytearray()
    feed = channel.reader.feed_data

    def note(data: bytes) -> None:
        seen.extend(data)
        feed(data)

    channel.reader.feed_data = note  # type: ignore[method-assign]
    return seen


class _Relay:
    """Somebody between two nodes: passes on what it hears, and notes it down."""

    def __init__(self, behind: tuple[str, int], tls: bool) -> None:
        self.behind = behind
        self.tls = tls
        self.passed = bytearray()
        self.visits = 0
        self.flip = b""
        self.place = ("", 0)

    async def visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.visits += 1
        channel = await enter(await connect(*self.behind), tls=self.tls)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, channel.writer))
                both.create_task(self._pass(channel.reader, writer))
        except* (OSError, EOFError):
            pass
        finally:
            channel.abort()
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.passed += data
            if self.flip and self.flip in data:
                data, self.flip = data.replace(self.flip, bytes([self.flip[0] ^ 1]) + self.flip[1:]), b""
            writer.write(data)
            await writer.drain()
        raise EOFError


@asynccontextmanager
async def _relay(behind: tuple[str, int], *, tls: bool) -> AsyncIterator[_Relay]:
    relay = _Relay(behind, tls)
    context = make_certificate().context if tls else None
    server = await asyncio.start_server(relay.visit, "127.0.0.1", 0, ssl=context)
    relay.place = server.sockets[0].getsockname()[:2]
    try:
        yield relay
    finally:
        server.close()
