"""The wire: whole frames or an error, descriptors never lost or leaked, strangers refused."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import AgentError, WireError
from surefoot.ipc import wire
from surefoot.ipc.wire import MAX_FRAME_BYTES, Body, Frame, connect, peer_pid, receive, receive_async, send, send_async

_LENGTH = struct.Struct("<I")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection; a reader that waits for ever is a failure, not a hang."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    left.settimeout(60)
    right.settimeout(60)
    with left, right:
        yield left, right


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as threads:
        yield threads


def _receive_by(kind: str, sock: socket.socket) -> Frame | None:
    if kind == "blocking":
        return receive(sock)
    sock.setblocking(False)
    return asyncio.run(asyncio.wait_for(receive_async(sock), 60))


def _send_by(kind: str, sock: socket.socket, body: Body, fds: tuple[int, ...] = ()) -> None:
    if kind == "blocking":
        send(sock, body, fds)
    else:
        sock.setblocking(False)
        asyncio.run(asyncio.wait_for(send_async(sock, body, fds), 60))


_KINDS = ["blocking", "async"]
Pair = tuple[socket.socket, socket.socket]


def _open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("sender", _KINDS)
@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("size", [0, 1, 2**16, 3 * 2**20 + 1])
def test_a_frame_of_any_size_arrives(
    pair: Pair, pool: ThreadPoolExecutor, sender: str, receiver: str, size: int
) -> None:
    """From an empty object to some megabytes, blocking and asynchronous ends in any mixture."""
    body: Body = {"data": random.Random(size).randbytes(size // 2).hex(), "text": "é\n\0"} if size else {}
    sending = pool.submit(_send_by, sender, pair[0], body)
    assert _receive_by(receiver, pair[1]) == (body, [])
    sending.result()


@pytest.mark.parametrize("receiver", _KINDS)
def test_a_frame_in_single_bytes_arrives(pair: Pair, pool: ThreadPoolExecutor, receiver: str) -> None:
    """A peer that writes byte by byte, two frames in a row: both are whole."""
    data = b"".join(_LENGTH.pack(len(text)) + text for text in (b'{"a":1}', b'{"b":[2]}'))

    def drip() -> None:
        for place in range(len(data)):
            pair[0].send(data[place : place + 1])

    dripping = pool.submit(drip)
    assert [_receive_by(receiver, pair[1]) for _ in range(2)] == [({"a": 1}, []), ({"b": [2]}, [])]
    dripping.result()


@pytest.mark.parametrize("receiver", _KINDS)
def test_frames_sent_together_are_told_apart(pair: Pair, receiver: str) -> None:
    """Many frames in one write come out one by one, in order."""
    texts = [json.dumps({"n": number}).encode() for number in range(50)]
    pair[0].sendall(b"".join(_LENGTH.pack(len(text)) + text for text in texts))
    assert [_receive_by(receiver, pair[1]) for _ in range(50)] == [({"n": number}, []) for number in range(50)]


@pytest.mark.parametrize("receiver", _KINDS)
def test_the_end_of_the_stream_is_none(pair: Pair, receiver: str) -> None:
    """A connection that ends between two frames ends quietly."""
    send(pair[0], {"a": 1})
    pair[0].close()
    assert _receive_by(receiver, pair[1]) == ({"a": 1}, [])
    assert _receive_by(receiver, pair[1]) is None


@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("cut", [1, 3, 4, 5, 10])
def test_an_end_inside_a_frame_is_an_error(pair: Pair, receiver: str, cut: int) -> None:
    """A peer that dies in the length or in the body: `WireError`, never a shorter frame."""
    text = b'{"a":12345}'
    pair[0].sendall((_LENGTH.pack(len(text)) + text)[:cut])
    pair[0].close()
    with pytest.raises(WireError, match="ended inside a frame"):
        _receive_by(receiver, pair[1])


@pytest.mark.holds("same-user-only")
@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, 2**32 - 1])
def test_a_frame_that_is_too_long_is_refused_before_it_is_read(pair: Pair, receiver: str, length: int) -> None:
    """The length alone is enough to refuse: no memory is taken, nothing more is waited for."""
    pair[0].sendall(_LENGTH.pack(length))
    with pytest.raises(WireError, match=f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed"):
        _receive_by(receiver, pair[1])


@pytest.mark.parametrize("sender", _KINDS)
def test_a_frame_that_nobody_would_take_is_not_sent(pair: Pair, sender: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender refuses what the receiver would: the connection stays usable."""
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 100)
    with pytest.raises(WireError, match="at most 100 are allowed"):
        _send_by(sender, pair[0], {"data": "x" * 100})
    with pytest.raises(WireError, match="5 descriptors"):
        _send_by(sender, pair[0], {}, (0,) * 5)
    _send_by(sender, pair[0], {"data": "x"})
    assert receive(pair[1]) == ({"data": "x"}, [])


_GARBAGE = [
    b"",
    b"nope",
    b"[1]",
    b"1",
    b"null",
    b'"text"',
    b"{",
    b'{"a":1}x',
    b"\xff\xfe\xfd",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"a":' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("garbage", _GARBAGE, ids=lambda text: repr(text[:10]))
def test_a_frame_that_is_no_json_object_is_refused(
    pair: Pair, pool: ThreadPoolExecutor, receiver: str, garbage: bytes
) -> None:
    """Whatever a frame holds but an object: `WireError` alone, deep nesting and huge numbers included."""
    sending = pool.submit(pair[0].sendall, _LENGTH.pack(len(garbage)) + garbage)
    with pytest.raises(WireError, match="a frame that is not"):
        _receive_by(receiver, pair[1])
    sending.result()


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None, database=None, derandomize=True)
def test_noise_ends_in_frames_the_end_or_an_error(noise: bytes) -> None:
    """Random bytes on the socket: objects, `WireError` or the end of the stream; nothing else, and never a hang."""
    left, right = socket.socketpair()
    with left, right:
        right.settimeout(60)
        left.sendall(noise)
        left.close()
        try:
            while (frame := receive(right)) is not None:
                assert type(frame[0]) is dict
        except WireError:
            return


# --------------------------------------------------------------------------- descriptors


def _pipe_with(text: bytes) -> int:
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return reader


@pytest.mark.parametrize("sender", _KINDS)
@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("size", [0, 2**20])
def test_descriptors_arrive_with_their_frame(
    pair: Pair, pool: ThreadPoolExecutor, sender: str, receiver: str, count: int, size: int
) -> None:
    """Descriptors come with the frame that they were sent with, in order, and lead to the same files."""
    before = _open_fds()
    fds = tuple(_pipe_with(b"%d" % number) for number in range(count))
    body: Body = {"data": "x" * size}

    def send_all() -> None:
        _send_by(sender, pair[0], {"n": 1})
        _send_by(sender, pair[0], body, fds)
        _send_by(sender, pair[0], {"n": 3})

    sending = pool.submit(send_all)
    assert _receive_by(receiver, pair[1]) == ({"n": 1}, [])
    frame = _receive_by(receiver, pair[1])
    assert frame is not None
    assert frame[0] == body
    assert [os.read(fd, 10) for fd in frame[1]] == [b"%d" % number for number in range(count)]
    assert _receive_by(receiver, pair[1]) == ({"n": 3}, [])
    sending.result()
    for fd in (*fds, *frame[1]):
        os.close(fd)
    assert _open_fds() <= before


@pytest.mark.parametrize("receiver", _KINDS)
def test_received_descriptors_are_not_inherited(pair: Pair, receiver: str) -> None:
    """A program that is started later does not get them: it would keep memory or a lock alive."""
    fd = _pipe_with(b"x")
    send(pair[0], {}, [fd])
    frame = _receive_by(receiver, pair[1])
    assert frame is not None
    assert not os.get_inheritable(frame[1][0])
    for each in (fd, *frame[1]):
        os.close(each)


def _bad_frames() -> dict[str, tuple[bytes, bytes]]:
    return {
        "too long": (_LENGTH.pack(2**32 - 1), b""),
        "no json": (_LENGTH.pack(3), b"abc"),
        "no object": (_LENGTH.pack(2), b"[]"),
        "cut": (_LENGTH.pack(9), b"{}"),
        "cut in the length": (_LENGTH.pack(9)[:2], b""),
    }


@pytest.mark.parametrize("receiver", _KINDS)
@pytest.mark.parametrize("kind", _bad_frames())
def test_descriptors_of_a_bad_frame_are_closed(pair: Pair, receiver: str, kind: str) -> None:
    """A frame that is refused leaves nothing open, however often a peer tries."""
    header, rest = _bad_frames()[kind]
    fd = _pipe_with(b"x")
    socket.send_fds(pair[0], [header], [fd] * 3)
    pair[0].sendall(rest)
    pair[0].close()
    os.close(fd)
    before = _open_fds()
    with pytest.raises(WireError):
        _receive_by(receiver, pair[1])
    assert _open_fds() <= before


@pytest.mark.parametrize("receiver", _KINDS)
def test_more_descriptors_than_allowed_are_refused_and_closed(pair: Pair, receiver: str) -> None:
    """A frame with too many descriptors is an error, not a frame with some of them."""
    fd = _pipe_with(b"x")
    socket.send_fds(pair[0], [_LENGTH.pack(2)], [fd] * 5)
    pair[0].sendall(b"{}")
    os.close(fd)
    before = _open_fds()
    with pytest.raises(WireError, match="more descriptors than 4"):
        _receive_by(receiver, pair[1])
    assert _open_fds() <= before


def test_descriptors_that_were_not_announced_with_a_frame_are_closed(pair: Pair) -> None:
    """Descriptors hidden in the middle of a frame are dropped by the kernel, and the frame is read as it is."""
    fd = _pipe_with(b"x")
    pair[0].sendall(_LENGTH.pack(7))
    socket.send_fds(pair[0], [b'{"a":1}'], [fd])
    before = _open_fds()
    assert receive(pair[1]) == ({"a": 1}, [])
    assert _open_fds() <= before
    os.close(fd)


def test_a_reader_that_is_cancelled_inside_a_frame_keeps_no_descriptor(pair: Pair) -> None:
    """Cancelling an asynchronous reader closes what had come already."""

    async def cancelled() -> None:
        reading = asyncio.create_task(receive_async(pair[1]))
        while _open_fds() <= before:  # noqa: ASYNC110 - nothing tells when the reader has got so far
            await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    pair[1].setblocking(False)
    fd = _pipe_with(b"x")
    socket.send_fds(pair[0], [_LENGTH.pack(9)], [fd])
    os.close(fd)
    loop = asyncio.new_event_loop()
    before = _open_fds()
    loop.run_until_complete(asyncio.wait_for(cancelled(), 60))
    assert _open_fds() <= before
    loop.close()


def test_a_full_socket_is_waited_for_with_descriptors_too(pair: Pair, pool: ThreadPoolExecutor) -> None:
    """An asynchronous sender whose peer does not read yet waits, and loses neither bytes nor descriptors."""
    pair[0].setblocking(False)
    filler = _LENGTH.pack(7) + b'{"f":1}'
    sent = b""
    try:
        while True:
            chunk = filler * 100
            count = pair[0].send(chunk)
            sent += chunk[:count]
    except BlockingIOError:
        pass
    missing = len(filler) - len(sent) % len(filler)
    fd = _pipe_with(b"x")

    async def send_late() -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(pair[0], filler[-missing:] if missing < len(filler) else b"")
        await send_async(pair[0], {"late": True}, (fd,))

    sending = pool.submit(lambda: asyncio.run(asyncio.wait_for(send_late(), 60)))
    count = -(-len(sent) // len(filler))
    assert [receive(pair[1]) for _ in range(count)] == [({"f": 1}, [])] * count
    late = receive(pair[1])
    sending.result()
    assert late is not None
    assert late[0] == {"late": True}
    assert os.read(late[1][0], 5) == b"x"
    for each in (fd, *late[1]):
        os.close(each)


# --------------------------------------------------------------------------- who is there


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user can enter; sockets in it can be reached by anybody."""
    path = Path(tempfile.mkdtemp(prefix="sf-wire-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def test_a_process_of_the_same_user_is_let_in(open_directory: Path) -> None:
    """Both sides see the other's process id."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(open_directory / "s"))
        listener.listen()
        with connect(str(open_directory / "s"), 60) as ours:
            theirs, _address = listener.accept()
            with theirs:
                assert peer_pid(theirs) == peer_pid(ours) == os.getpid()
                assert ours.gettimeout() is None


def test_nobody_there_is_a_connection_error(open_directory: Path) -> None:
    """No socket, or one that nobody listens on: an `OSError`, and no descriptor is kept."""
    socket.socket(socket.AF_UNIX).bind(str(open_directory / "dead"))
    before = _open_fds()
    for name in ("absent", "dead"):
        with pytest.raises(OSError, match=r"No such file|refused"):
            connect(str(open_directory / name), 1)
    assert _open_fds() <= before


_BECOMES = (
    "import os,socket,sys; user=int(sys.argv[2]); os.setgroups([]); os.setgid(user); os.setuid(user); "
    "s=socket.socket(socket.AF_UNIX); "
)
_CONNECTS = _BECOMES + "s.connect(sys.argv[1]); sys.stdin.read()"
_LISTENS = _BECOMES + ("s.bind(sys.argv[1]); s.listen(); print('up',flush=True); sys.stdin.read()")


def _as_user(user: int, script: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-I", "-c", script, str(path), str(user)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.mark.holds("same-user-only")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("user", [65534, 2**32 - 2])
def test_another_user_is_refused_when_it_connects(open_directory: Path, user: int) -> None:
    """A process of another user that reaches the socket is named and refused, numbers above 2³¹ included."""
    path = open_directory / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o777)
        listener.listen()
        listener.settimeout(60)
        child = _as_user(user, _CONNECTS, path)
        try:
            theirs, _address = listener.accept()
            with theirs, pytest.raises(AgentError, match=f"process {child.pid} of user {user} is at the other end"):
                peer_pid(theirs)
        finally:
            _end(child)


@pytest.mark.holds("same-user-only")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_another_user_is_refused_when_it_listens(open_directory: Path) -> None:
    """A socket that another user laid in our place is not talked to, and its descriptor is not kept."""
    open_directory.chmod(0o777)
    child = _as_user(65534, _LISTENS, open_directory / "s")
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        before = _open_fds()
        with pytest.raises(AgentError, match="of user 65534 is at the other end"):
            connect(str(open_directory / "s"), 60)
        assert _open_fds() <= before
    finally:
        _end(child)


@pytest.mark.parametrize("seed", range(3))
def test_two_sides_that_talk_at_once_understand_each_other(pair: Pair, seed: int) -> None:
    """A blocking and an asynchronous side, both sending and receiving random frames: all arrive, in order."""
    rng = random.Random(seed)
    said: list[list[Body]] = [
        [{"n": number, "x": "y" * rng.choice([0, 10, 100_000])} for number in range(60)] for _ in range(2)
    ]
    heard: list[list[Any]] = [[], []]

    def blocking() -> None:
        writer = threading.Thread(target=lambda: [send(pair[0], body) for body in said[0]])
        writer.start()
        heard[0] = [receive(pair[0]) for _ in said[1]]
        writer.join()

    async def asynchronous() -> None:
        async def speak() -> None:
            for body in said[1]:
                await send_async(pair[1], body)

        async with asyncio.TaskGroup() as group:
            group.create_task(speak())
            heard[1] = [await receive_async(pair[1]) for _ in said[0]]

    pair[1].setblocking(False)
    run: Callable[[], None] = lambda: asyncio.run(asyncio.wait_for(asynchronous(), 60))  # noqa: E731
    with ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(blocking), threads.submit(run)]:
            future.result()
    assert heard == [[(body, []) for body in said[1]], [(body, []) for body in said[0]]]
