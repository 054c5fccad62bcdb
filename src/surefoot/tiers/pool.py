"""Runs a tier's blocking calls in a small bounded set of threads of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from surefoot.errors import TierError
from surefoot.host.priority import give_way

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """Runs functions in at most `num_threads` threads; never in the loop's default executor."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=give_way)
        self._closed = False

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The function's result. A cancellation is raised only when the thread has come back.

        A thread cannot be stopped, and it may be reading or filling the caller's memory: the caller must not
        get that memory back while it does.
        """
        if self._closed:
            raise TierError(f"{self._name} is closed")
        future = self._executor.submit(function, *args, **kwargs)
        waiter = asyncio.wrap_future(future)
        try:
            return await asyncio.shield(waiter)
        except asyncio.CancelledError:
            await _until_done(waiter)
            raise

    def close(self) -> None:
        """Take no more work. Threads end when their present call does."""
        self._closed = True
        self._executor.shutdown(wait=False)


async def _until_done(waiter: asyncio.Future[T]) -> None:
    """Wait, whatever comes: a second cancellation changes nothing about the thread. The first one is
    re-raised."""
    while not waiter.done():
        try:
            await asyncio.wait([waiter])
        except asyncio.CancelledError:
            continue
    if not waiter.cancelled():
        waiter.exception()  # looked at, so that asyncio does not report it as lost: the cancellation wins
