"""What waits for a member: bounded, short messages first, long ones whole again at the other side."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import WireError
from surefoot.mesh.frames import LAST_PIECE, MAX_CONTENT_BYTES, PIECE, WHOLE
from surefoot.mesh.outbox import SHORT_BYTES, Joiner, Outbox


async def _drain(outbox: Outbox, joiner: Joiner) -> list[bytes]:
    arrived = []
    while outbox.waiting_bytes:
        kind, content = await outbox.take()
        assert len(content) <= MAX_CONTENT_BYTES
        message = joiner.add(kind, content)
        if message is not None:
            arrived.append(message)
    return arrived


_sizes = st.sampled_from([1, SHORT_BYTES, SHORT_BYTES + 1, MAX_CONTENT_BYTES, MAX_CONTENT_BYTES + 1, 200_000])


@given(st.lists(_sizes, max_size=12))
def test_every_message_arrives_whole_and_in_the_order_of_its_kind(sizes: list[int]) -> None:
    """Whatever lengths wait: the short ones come first, then the long ones, each kind in its order, byte for byte."""

    async def story() -> None:
        outbox = Outbox(100, 10**9)
        messages = [bytes([i]) * size for i, size in enumerate(sizes)]
        assert all(outbox.put(message) for message in messages)
        assert outbox.waiting_bytes == sum(sizes)
        short = [message for message in messages if len(message) <= SHORT_BYTES]
        long = [message for message in messages if len(message) > SHORT_BYTES]
        assert await _drain(outbox, Joiner(10**9)) == short + long

    asyncio.run(story())


def test_a_short_message_waits_for_one_piece_at_most() -> None:
    """Put while a long message is under way, it is the next to be taken."""

    async def story() -> None:
        outbox = Outbox(100, 10**9)
        outbox.put(b"L" * 300_000)
        assert await outbox.take() == (PIECE, b"L" * MAX_CONTENT_BYTES)
        outbox.put(b"notice")
        assert await outbox.take() == (WHOLE, b"notice")
        kinds = [(await outbox.take())[0] for _ in range(4)]
        assert kinds == [PIECE, PIECE, PIECE, LAST_PIECE]
        assert outbox.waiting_bytes == 0

    asyncio.run(story())


def test_there_is_no_room_beyond_the_bounds() -> None:
    """Refused by number and by bytes, and what is in stays; room comes back as messages are taken."""

    async def story() -> None:
        outbox = Outbox(2, 100)
        assert [outbox.put(b"x" * 60), outbox.put(b"y" * 41), outbox.put(b"z" * 40), outbox.put(b"")] == [
            True,
            False,
            True,
            False,
        ]
        assert await outbox.take() == (WHOLE, b"x" * 60)
        assert outbox.put(b"y" * 41)
        outbox.clear()
        assert outbox.waiting_bytes == 0
        assert outbox.put(b"w")
        assert await outbox.take() == (WHOLE, b"w")

    asyncio.run(story())


def test_a_long_message_begins_anew_on_a_new_connection() -> None:
    """Broken off in mid-message: the next connection brings it whole, and the bytes that wait are counted right."""

    async def story() -> None:
        outbox = Outbox(10, 10**9)
        outbox.put(b"L" * 200_000)
        await outbox.take()
        outbox.rewind()
        assert outbox.waiting_bytes == 200_000
        assert await _drain(outbox, Joiner(10**9)) == [b"L" * 200_000]
        outbox.rewind()
        assert outbox.waiting_bytes == 0

    asyncio.run(story())


def test_pieces_without_end_are_refused() -> None:
    """A message is put together up to a bound, and no further."""
    joiner = Joiner(100)
    assert joiner.add(PIECE, b"x" * 60) is None
    assert joiner.add(WHOLE, b"between") == b"between"
    with pytest.raises(WireError, match="more than 100 bytes"):
        joiner.add(LAST_PIECE, b"x" * 41)
