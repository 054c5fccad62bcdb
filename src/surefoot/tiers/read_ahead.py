"""Reads ahead: yields the pieces of an object in order, and reads the next ones while one is used."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

from surefoot.core.ranges import Range

_Read = TypeVar("_Read")


@asynccontextmanager
async def read_ahead(
    read: Callable[[Range], Awaitable[_Read]], pieces: Iterable[Range], at_once: int
) -> AsyncIterator[AsyncIterator[tuple[Range, _Read]]]:
    """Each piece with what `read` returned for it; no read is under way any more when the context is left.

    Args:
        read: may be called again before it has returned.
        pieces: in the order in which they are given out.
        at_once: pieces that are being read or used, together. As many buffers are enough.
    """
    under_way: deque[tuple[Range, asyncio.Future[_Read]]] = deque()

    async def in_order() -> AsyncIterator[tuple[Range, _Read]]:
        for piece in pieces:
            if len(under_way) == at_once:
                yield under_way[0][0], await under_way[0][1]
                under_way.popleft()
            under_way.append((piece, asyncio.ensure_future(read(piece))))
        while under_way:
            yield under_way[0][0], await under_way[0][1]
            under_way.popleft()

    try:
        yield in_order()
    finally:
        for _piece, future in under_way:
            future.cancel()
        await asyncio.gather(*(future for _piece, future in under_way), return_exceptions=True)
