"""The mesh over real sockets: messages, questions, rounds, losses; over plain TCP and over TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import replace
from typing import Any

import pytest
from mesh_nodes import BOUND_S, BOUNDS, KEY, OTHER_ROUND, OTHER_SECRET, SOON, config, joined, make_node, running, until

from surefoot.core.liveness import Bounds, View
from surefoot.errors import AgentError, ConfigError, UsageError
from surefoot.ipc.wire import Body
from surefoot.mesh.channel import Channel, address_towards, connect, enter, is_loopback
from surefoot.mesh.handshake import Me, dial
from surefoot.mesh.mesh import Mesh

_TLS = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


@_TLS
def test_what_is_told_arrives_as_it_was_told(tls: bool) -> None:
    """From each to each: every message, in order, equal in value, with its sender; long ones too."""

    async def story() -> None:
        nodes = [make_node(name, config(tls=tls)) for name in ("a", "b", "c")]
        async with joined(nodes):
            bodies: list[Body] = [{"op": "note", "number": i, "text": "é\n\0", "x": [1.5, None]} for i in range(50)]
            long: Body = {"op": "note", "number": 50, "text": "x" * 3_000_000}
            for node in nodes:
                for body in bodies:
                    assert node.mesh.tell_all(body) == []
                assert node.mesh.tell_all(long) == []
            await until(lambda: all(len(node.told) == 102 for node in nodes))
            for node in nodes:
                for other in {"a", "b", "c"} - {node.name}:
                    assert [body for sender, body in node.told if sender == other] == [*bodies, long]
                assert node.said == []
                assert [what for what, _ in node.happened] == ["first", "first"]

    asyncio.run(story())


@_TLS
def test_questions_are_answered(tls: bool) -> None:
    """An answer, many at once, an error of the handler, an unknown question, and one that takes too long."""

    async def story() -> None:
        a, b = make_node("a", config(tls=tls)), make_node("b", config(tls=tls))

        async def refuse(node: str, _body: Body) -> Body:
            raise ConfigError(f"not for {node}")

        async def sleep(_node: str, _body: Body) -> Body:
            await asyncio.Event().wait()
            return {}

        b.mesh.answer("refuse", refuse)
        b.mesh.answer("sleep", sleep)
        async with joined([a, b]):
            answers = await asyncio.gather(
                *(a.mesh.ask("b", {"op": "double", "number": i}, BOUND_S) for i in range(100)),
                *(b.mesh.ask("a", {"op": "double", "number": -i}, BOUND_S) for i in range(100)),
            )
            assert answers == [{"twice": 2 * i} for i in range(100)] + [{"twice": -2 * i} for i in range(100)]
            with pytest.raises(AgentError, match="node b: not for a"):
                await a.mesh.ask("b", {"op": "refuse"}, BOUND_S)
            with pytest.raises(AgentError, match="does not know the question 'what'"):
                await a.mesh.ask("b", {"op": "what"}, BOUND_S)
            with pytest.raises(AgentError, match=r"node b did not answer 'sleep' within 0.05 s"):
                await a.mesh.ask("b", {"op": "sleep"}, 0.05)
            with pytest.raises(UsageError, match="node c is not a member of this round; members: b"):
                await a.mesh.ask("c", {"op": "double", "number": 1}, BOUND_S)
            assert (await a.mesh.ask("b", {"op": "double", "number": 4}, BOUND_S)) == {"twice": 8}

    asyncio.run(story())


def test_more_questions_than_one_node_answers_at_once_are_refused() -> None:
    """Beyond the bound a question gets an error, and the others their answers."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        go = asyncio.Event()

        async def wait(_node: str, _body: Body) -> Body:
            await go.wait()
            return {"ok": True}

        b.mesh.answer("wait", wait)
        async with joined([a, b]):
            asked = [asyncio.create_task(a.mesh.ask("b", {"op": "wait"}, BOUND_S)) for _ in range(300)]
            await until(lambda: sum(each.done() for each in asked) == 44)
            go.set()
            results = await asyncio.gather(*asked, return_exceptions=True)
            assert results.count({"ok": True}) == 256
            assert sum("more than 256 questions" in str(result) for result in results) == 44

    asyncio.run(story())


def test_what_nobody_knows_is_said_and_harms_nothing() -> None:
    """A message of an unknown operation, or one that its handler refuses, is said by the receiver; the link stands."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")

        def refuse(_node: str, _body: Body) -> None:
            raise ConfigError("no such step")

        b.mesh.hear("step", refuse)
        async with joined([a, b]):
            a.mesh.tell("b", {"op": "what"})
            a.mesh.tell("b", {"no": "op"})
            a.mesh.tell("b", {"op": "step"})
            a.mesh.tell("b", {"op": "note"})
            await until(lambda: b.told)
            assert len(b.said) == 3
            assert [("what" in b.said[0]), ("operation" in b.said[1]), ("no such step" in b.said[2])] == [True] * 3
            assert (a.mesh.linked, b.mesh.linked) == (["b"], ["a"])

    asyncio.run(story())


def test_messages_wait_until_a_connection_stands() -> None:
    """Told and asked before the other side joins: delivered when it does."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with running([a, b]) as places:
            a.mesh.join(places, KEY)
            assert a.mesh.tell_all({"op": "note", "number": 1}) == []
            asked = asyncio.create_task(a.mesh.ask("b", {"op": "double", "number": 5}, BOUND_S))
            b.mesh.join(places, KEY)
            assert await asked == {"twice": 10}
            assert b.told == [("a", {"op": "note", "number": 1})]

    asyncio.run(story())


def test_a_notice_overtakes_a_report() -> None:
    """With tens of megabytes on their way to it, a node hears a short message told later first."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with joined([a, b]):
            a.mesh.tell("b", {"op": "note", "text": "x" * 40_000_000})
            await asyncio.sleep(0.02)
            a.mesh.tell("b", {"op": "note", "text": "notice"})
            await until(lambda: len(b.told) == 2)
            assert [len(body["text"]) for _, body in b.told] == [6, 40_000_000]

    asyncio.run(story())


def test_a_member_that_takes_nothing_is_cut_off_and_holds_up_nobody() -> None:
    """One member connects and never reads. Others go on hearing; what waits for it is bounded; the cut is said."""

    async def story() -> None:
        b, c = (make_node(name, config(waiting_bytes=2_000_000)) for name in ("b", "c"))
        async with running([b, c]) as places:
            for node in (b, c):
                node.mesh.join({**places, "a": ("127.0.0.1", 1)}, KEY)
            stuck = await enter(await connect(*places["b"]), tls=False)
            stuck.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await dial(stuck, KEY, Me("a", "life"), "b")
            stuck.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await until(lambda: b.mesh.linked == ["a", "c"])
            sent = 0
            while b.mesh.tell("a", {"op": "note", "text": "x" * 50_000}):
                assert b.mesh.tell("c", {"op": "note", "number": sent})
                sent += 1
                await asyncio.sleep(0)
            await until(lambda: len(c.told) == sent)
            assert [body["number"] for _, body in c.told] == list(range(sent))
            assert 40 <= sent < 1000
            assert "which takes none: cut off" in b.said[-1]
            assert b.mesh.linked == ["c"]
            stuck.abort()

    asyncio.run(story())


def test_connections_do_not_wait_for_full_packets() -> None:
    """Nagle's algorithm is off at both ends, over TLS too, and little waits in the kernel."""

    async def story() -> None:
        for tls in (False, True):
            seen: list[Channel] = []
            a, b = make_node("a", config(tls=tls)), make_node("b", config(tls=tls))
            a.mesh._serve = _spy(a.mesh, seen)  # type: ignore[method-assign]
            b.mesh._serve = _spy(b.mesh, seen)  # type: ignore[method-assign]
            async with joined([a, b]):
                socks = [channel.writer.get_extra_info("socket") for channel in seen]
                assert len(socks) == 2
                for sock in socks:
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0
                    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 128 * 1024

    asyncio.run(story())


def _spy(mesh: Mesh, seen: list[Channel]) -> Any:
    serve = mesh._serve

    async def served(member: Any, channel: Channel, session: Any) -> None:
        seen.append(channel)
        await serve(member, channel, session)

    return served


@_TLS
def test_whoever_does_not_know_the_key_is_never_connected(tls: bool) -> None:
    """Another secret, or another round of the same secret: never linked, while those who know it are."""

    async def story() -> None:
        a, b, c, d = nodes = [make_node(name, config(tls=tls)) for name in ("a", "b", "c", "d")]
        async with running(nodes) as places:
            for node, key in ((a, OTHER_SECRET), (b, KEY), (c, KEY), (d, OTHER_ROUND)):
                node.mesh.join(places, key)
            await until(lambda: any("cannot reach node b" in said for said in a.said))
            await until(lambda: any("cannot reach node d" in said for said in b.said))
            await b.mesh.ask("c", {"op": "double", "number": 1}, BOUND_S)
            assert [node.mesh.linked for node in nodes] == [[], ["c"], ["b"], []]
            assert "does not know" not in str(b.said + c.said)

    asyncio.run(story())


def test_a_new_round_ends_the_old_one() -> None:
    """When two of three enter a new round, the third is heard no more; questions of the old round fail at once."""

    async def story() -> None:
        nodes = [make_node(name, config(bounds=SOON)) for name in ("a", "b", "c")]
        a, b, c = nodes

        async def sleep(_node: str, _body: Body) -> Body:
            await asyncio.Event().wait()
            return {}

        b.mesh.answer("sleep", sleep)
        async with joined(nodes) as places:
            asked = asyncio.create_task(a.mesh.ask("b", {"op": "sleep"}, BOUND_S))
            await asyncio.sleep(0)
            for node in (a, b):
                node.mesh.join({name: places[name] for name in ("a", "b")}, OTHER_ROUND)
            with pytest.raises(AgentError, match="node b did not answer: the connection was cut"):
                await asked
            await a.mesh.wait_linked(BOUND_S)
            c.mesh.tell_all({"op": "note", "number": 1})
            a.mesh.tell_all({"op": "note", "number": 2})
            await until(lambda: b.told)
            await until(lambda: c.mesh.lost == ["a", "b"])
            assert b.told == [("a", {"op": "note", "number": 2})]
            assert (a.mesh.members, b.mesh.members, a.mesh.lost) == (["b"], ["a"], [])

    asyncio.run(story())


def test_nothing_of_an_old_round_is_heard_in_the_new_one() -> None:
    """A node that enters a new round in the middle of a burst hears none of the rest, though it has come."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        heard: list[int] = []
        async with joined([a, b]) as places:

            def last(_node: str, body: Body) -> None:
                heard.append(body["number"])
                if len(heard) == 3:
                    b.mesh.join(places, OTHER_ROUND)

            b.mesh.hear("burst", last)
            for number in range(200):
                a.mesh.tell("b", {"op": "burst", "number": number})
            await until(lambda: not a.mesh.linked)
            a.mesh.join(places, OTHER_ROUND)
            assert (await a.mesh.ask("b", {"op": "double", "number": 1}, BOUND_S)) == {"twice": 2}
            assert heard == [0, 1, 2]

    asyncio.run(story())


@pytest.mark.holds("round-keys")
def test_a_proof_of_an_old_round_does_not_open_the_new_one() -> None:
    """A node that enters a new round while a dialer proves itself in the old one does not take the connection."""

    async def story() -> None:
        b = make_node("b")
        async with running([b]) as places:
            members = {**places, "a": ("127.0.0.1", 1)}
            b.mesh.join(members, KEY)

            def enter_new_round(_node: str, _life: str) -> None:
                b.mesh.join(members, OTHER_ROUND)

            b.mesh._verdict = enter_new_round  # type: ignore[method-assign]
            channel = await enter(await connect(*places["b"]), tls=False)
            session = await dial(channel, KEY, Me("a", "life"), "b")
            with pytest.raises(EOFError):
                await session.opener.receive(channel.reader)
            channel.abort()
            assert (b.mesh.linked, b.happened) == ([], [])

    asyncio.run(story())


def test_a_member_that_ends_is_lost_and_comes_back() -> None:
    """An agent ends: lost after its window, nothing is queued for it; another one at its place: back, and new."""

    async def story() -> None:
        a, b, c = (make_node(name, config(bounds=SOON)) for name in ("a", "b", "c"))
        async with joined([a, b, c]) as places:
            await b.stop()
            await until(lambda: ("lost", "b") in a.happened and ("lost", "b") in c.happened)
            assert a.mesh.tell_all({"op": "note", "number": 1}) == ["b"]
            with pytest.raises(AgentError, match="node b is lost"):
                await a.mesh.ask("b", {"op": "double", "number": 1}, BOUND_S)
            again = make_node("b", config(bounds=SOON))
            await again.mesh.listen(*places["b"])
            again.task = asyncio.create_task(again.mesh.run())
            again.mesh.join(places, KEY)
            await until(lambda: ("back", "b") in a.happened and ("back", "b") in c.happened)
            a.mesh.tell_all({"op": "note", "number": 2})
            await until(lambda: again.told and len(c.told) == 2)
            assert again.told == [("a", {"op": "note", "number": 2})]
            for node in (a, c):
                assert [what for what, other in node.happened if other == "b"] == ["first", "lost", "first", "back"]
                assert [what for what, other in node.happened if other in "ac"] == ["first"]
            await again.stop()

    asyncio.run(story())


def test_a_successor_gets_nothing_that_was_meant_for_its_predecessor() -> None:
    """A message that waits while an agent is replaced, before it counts as lost, is dropped with the old process."""

    async def story() -> None:
        slow = Bounds(beat_s=0.1, stood_still_s=1.0, lost_after_s=50.0)
        a, b = make_node("a", config(bounds=slow)), make_node("b", config(bounds=slow))
        async with joined([a, b]) as places:
            await b.stop()
            await until(lambda: a.mesh.linked == [])
            assert a.mesh.tell("b", {"op": "note", "number": 1})
            again = make_node("b")
            # At another port: whoever looked it up says so.
            a.mesh.move("b", await again.mesh.listen())
            again.task = asyncio.create_task(again.mesh.run())
            again.mesh.join(places, KEY)
            await until(lambda: a.mesh.linked)
            a.mesh.tell("b", {"op": "note", "number": 2})
            await until(lambda: again.told)
            assert again.told == [("a", {"op": "note", "number": 2})]
            assert a.happened == [("first", "b"), ("first", "b")]
            await again.stop()

    asyncio.run(story())


def test_a_connection_that_breaks_is_made_again_without_a_loss() -> None:
    """Ended in the middle, from either side: made again to the same process, nobody was lost."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with joined([a, b]):
            for breaker, other in ((a, b), (b, a)):
                before = len(other.happened)
                link = breaker.mesh._members[other.name].link
                assert link is not None
                link.end()
                await until(lambda before=before, other=other: len(other.happened) > before)
                await until(lambda: a.mesh.linked and b.mesh.linked)
            assert (await a.mesh.ask("b", {"op": "double", "number": 1}, BOUND_S)) == {"twice": 2}
            assert {what for what, _ in a.happened + b.happened} == {"first", "again"}

    asyncio.run(story())


def test_two_processes_of_one_name_do_not_share_it() -> None:
    """A second process that speaks for a node is refused, and told why, while the first lives."""

    async def story() -> None:
        a, b, second = make_node("a"), make_node("b"), make_node("a")
        async with joined([a, b]) as places, running([second]):
            second.mesh.join(places, KEY)
            await until(lambda: any("another process speaks for a" in said for said in second.said))
            b.mesh.tell_all({"op": "note", "number": 1})
            await until(lambda: a.told)
            assert (second.mesh.linked, second.told, b.mesh.linked) == ([], [], ["a"])

    asyncio.run(story())


def test_who_is_gone_is_not_dialed_and_not_let_in() -> None:
    """After `gone` no connection to the node is made, from either side, and its silence is no loss."""

    async def story() -> None:
        a, b, c = (make_node(name, config(bounds=SOON)) for name in ("a", "b", "c"))
        async with joined([a, b, c]):
            a.mesh.gone("b")
            c.mesh.gone("b")
            await until(lambda: any("b is not a member" in said for said in b.said))
            await until(lambda: b.mesh.lost == ["a", "c"])
            assert (a.mesh.members, a.mesh.linked, a.mesh.lost) == (["c"], ["c"], [])
            assert ("lost", "b") not in a.happened + c.happened

    asyncio.run(story())


def test_a_new_round_may_begin_where_a_loss_is_heard() -> None:
    """Two are lost in one look, and the first loss is answered by a new round: nobody is lost in that one."""

    async def story() -> None:
        a, b, c = (make_node(name, config(bounds=SOON)) for name in ("a", "b", "c"))
        async with joined([a, b, c]) as places:

            def begin_anew(node: str) -> None:
                a.happened.append(("lost", node))
                a.mesh.join(places, OTHER_ROUND)

            a.mesh.on_lost = begin_anew
            await asyncio.gather(b.stop(), c.stop())
            # Both windows end with the same look, whenever the last beats came.
            await until(lambda: not a.mesh.linked)
            now_s = a.mesh._now_s()
            pulses = a.mesh._view.pulses
            a.mesh._view = View(now_s, {name: replace(pulses[name], since_s=now_s) for name in ("b", "c")})
            await until(lambda: ("lost", "b") in a.happened)
            assert [other for what, other in a.happened if what == "lost"] == ["b"]
            assert (a.mesh.lost, a.mesh.members) == ([], ["b", "c"])
            assert a.mesh.tell("c", {"op": "note"})

    asyncio.run(story())


def test_who_does_not_come_is_named() -> None:
    """Waiting for all connections ends with the names of the missing."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with running([a, b]) as places:
            for node in (a, b):
                node.mesh.join({**places, "c": ("127.0.0.1", 1)}, KEY)
            await until(lambda: a.mesh.linked == ["b"])
            with pytest.raises(AgentError, match=r"agents of c within 0.01 s"):
                await a.mesh.wait_linked(0.01)

    asyncio.run(story())


@pytest.mark.holds("loopback-or-tls")
def test_tls_is_on_wherever_the_machine_is_left() -> None:
    """On loopback plain TCP, elsewhere TLS 1.3 with a certificate of this process, which both ends see alike."""

    async def story() -> None:
        a, b = make_node("a"), make_node("b")
        async with running([a]) as inner, running([b], host="0.0.0.0") as outer:
            with pytest.raises(OSError):
                await enter(await connect("127.0.0.1", inner["a"][1]), tls=True)
            channel = await enter(await connect("127.0.0.1", outer["b"][1]), tls=True)
            tls: ssl.SSLObject = channel.writer.get_extra_info("ssl_object")
            assert tls.version() == "TLSv1.3"
            assert b.mesh._door is not None
            assert b.mesh._door._certificate is not None
            assert channel.name == b.mesh._door._certificate.fingerprint
            channel.abort()

    asyncio.run(story())


def test_addresses() -> None:
    """What is loopback and what is not; the interface towards a host is one of this machine."""
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "::", "fe80::1%eth0", "localhost.example", "")))
    assert address_towards("127.0.0.1") == "127.0.0.1"


def test_what_cannot_work_is_refused() -> None:
    """Names, ports and addresses that are none; running without listening."""

    async def story() -> None:
        for wrong in ({"half_open": 0}, {"handshake_s": -1.0}, {"waiting_bytes": 0}):
            with pytest.raises(ConfigError, match=next(iter(wrong))):
                config(**wrong)
        for name in ("", "a/b", "."):
            with pytest.raises(ConfigError, match="not a node's name"):
                Mesh(name)
        node = make_node("a")
        with pytest.raises(UsageError, match="listen"):
            await node.mesh.run()
        with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.1"):
            await node.mesh.listen("192.0.2.1")
        with pytest.raises(ConfigError, match="not a member"):
            node.mesh.join({"b": ("127.0.0.1", 0)}, KEY)
        async with running([node]) as places:
            with pytest.raises(ConfigError, match="cannot listen"):
                await make_node("b").mesh.listen(*places["a"])

    asyncio.run(story())


def test_this_machine_standing_still_is_no_loss() -> None:
    """A clock that jumps by an hour while nobody is heard (a suspended machine): said, and nobody is lost."""

    async def story() -> None:
        jump = [0.0]
        a, b = make_node("a"), make_node("b")
        began_s = asyncio.get_running_loop().time()
        a.mesh._now_s = lambda: asyncio.get_running_loop().time() - began_s + jump[0]
        async with joined([a, b]):
            jump[0] = 3600.0
            await until(lambda: a.said)
            assert "stood still for 360" in a.said[0]
            await a.mesh.ask("b", {"op": "double", "number": 1}, BOUND_S)
            assert a.happened == [("first", "b")]

    asyncio.run(story())


assert BOUNDS.lost_after_s < BOUND_S
