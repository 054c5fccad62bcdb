"""Reports a place that takes requests and does not answer, long before it is given up.

Every request to the run's place goes through here. A tier gives up a request only after a time in which a slow link
would have carried it; without a report until then no user knows what a save, a start or an eviction waits for.
"""

from __future__ import annotations

import asyncio
import builtins
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.errors import ObjectExistsError, ObjectMissingError, TierDeniedError, TierFullError
from surefoot.events import describe
from surefoot.host.clock import boot_s
from surefoot.tiers.base import Entry, Tier

SILENT_AFTER_S = 5.0
"""Without any sign of progress."""
_SLOWER = 2.0
"""Times the last wait for an answer of the same kind: a slow link is reported once, not at every save."""
_MOST_PATIENCE_S = 20.0
_SLOW_BYTES_PER_S = 10e6
"""Bytes under way may take, besides, as long as they do at this rate."""
_UNDER_WAY_BYTES = 64 << 20
"""Of a stream: the most bytes that were asked for and have not got through yet."""
_ANSWERS = (ObjectMissingError, ObjectExistsError, TierFullError, TierDeniedError)
"""Errors that the place itself sent. Any other may be its silence."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Silence:
    """What a place was asked and does not answer, or now has answered."""

    what: str
    """`read commits/…`."""
    seconds: float
    """How long there was no sign of it."""
    over: bool


@dataclass(slots=True, eq=False)
class _Request:
    """One that is under way."""

    verb: str
    key: str
    moved_s: float
    """When it got anywhere last."""
    size_bytes: int = 0
    ours: bool = False
    """It is for us to go on: the next chunk is being made."""
    timer: asyncio.TimerHandle | None = None

    @property
    def what(self) -> str:
        return f"{self.verb} {self.key}"


class Watched:
    """A tier that reports when it falls silent, and when it answers again.

    Args:
        tier: the place.
        told: called once in each silence, and once at its end.
    """

    def __init__(self, tier: Tier, told: Callable[[Silence], object]) -> None:
        self._tier = tier
        self.told = told
        self._waited_s: dict[str, float] = {}
        """By verb: for the last answer."""
        self._silent: _Request | None = None
        """The request that was reported."""

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def uri(self) -> str:
        return self._tier.uri

    def event_of(self, silence: Silence) -> dict[str, Any]:
        """As `surefoot.events` has it; `kind` is its name."""
        kind = "tier_answers" if silence.over else "tier_silent"
        about = {"tier": self.name, "place": self.uri, "what": silence.what}
        return {"kind": kind, **about, "seconds": round(silence.seconds, 1)}

    async def put_stream(self, key: str, chunks: AsyncIterator[memoryview], size_bytes: int) -> None:
        with self._watch("write", key, min(size_bytes, _UNDER_WAY_BYTES)) as request:
            await self._tier.put_stream(key, _Chunks(chunks, request, self._moved), size_bytes)

    async def put(self, key: str, data: bytes) -> None:
        await self._asked("put", key, self._tier.put(key, data))

    async def put_if_absent(self, key: str, data: bytes) -> None:
        await self._asked("create", key, self._tier.put_if_absent(key, data))

    async def get(self, key: str) -> bytes:
        return await self._asked("get", key, self._tier.get(key))

    async def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        await self._asked("read", key, self._tier.read_into(key, offset, buffer), len(buffer))

    async def size(self, key: str) -> int:
        return await self._asked("look at", key, self._tier.size(key))

    async def delete(self, keys: Sequence[str]) -> None:
        await self._asked("delete", keys[0] if keys else "", self._tier.delete(keys))

    async def free_bytes(self) -> int | None:
        return await self._tier.free_bytes()

    async def close(self) -> None:
        await self._tier.close()

    async def _asked(self, verb: str, key: str, answer: Awaitable[T], size_bytes: int = 0) -> T:
        with self._watch(verb, key, size_bytes):
            return await answer

    @contextmanager
    def _watch(self, verb: str, key: str, size_bytes: int) -> Iterator[_Request]:
        request = _Request(verb, key, boot_s(), size_bytes)
        self._look_after(request, self._patience_s(request))
        try:
            yield request
        except _ANSWERS:
            self._answered(request)
            raise
        else:
            self._answered(request)
        finally:
            assert request.timer is not None
            request.timer.cancel()

    def _patience_s(self, request: _Request) -> float:
        slower_s = min(_MOST_PATIENCE_S, _SLOWER * self._waited_s.get(request.verb, 0.0))
        return max(SILENT_AFTER_S + request.size_bytes / _SLOW_BYTES_PER_S, slower_s)

    def _look_after(self, request: _Request, within_s: float) -> None:
        request.timer = asyncio.get_running_loop().call_later(within_s, self._look, request)

    def _look(self, request: _Request) -> None:
        patience_s = self._patience_s(request)
        waited_s = 0.0 if request.ours else boot_s() - request.moved_s
        if waited_s >= patience_s and self._silent is None:
            self._silent = request
            self.told(Silence(request.what, waited_s, over=False))
        self._look_after(request, max(patience_s / 2, patience_s - waited_s))

    def _moved(self, request: _Request) -> None:
        if request is self._silent:
            self._is_over(request)
        request.moved_s = boot_s()

    def _answered(self, request: _Request) -> None:
        if self._silent is not None:
            self._is_over(self._silent)
        self._waited_s[request.verb] = boot_s() - request.moved_s

    def _is_over(self, silent: _Request) -> None:
        self._silent = None
        self.told(Silence(silent.what, boot_s() - silent.moved_s, over=True))

    # Last in the class: below it, `list` no longer names the built-in type.
    async def list(self, prefix: str) -> builtins.list[Entry]:
        return await self._asked("list", prefix, self._tier.list(prefix))


def spoken_of(tier: Tier) -> Watched:
    """Watch a place, and report its silence on standard error, as a kept log would."""
    place = Watched(tier, lambda silence: _print(**place.event_of(silence)))
    return place


def _print(kind: str, **fields: Any) -> None:
    print(f"surefoot: {describe({'event': kind, **fields})}", file=sys.stderr, flush=True)  # noqa: T201


class _Chunks:
    """A stream's chunks as they come. That another one is asked for is a sign that those before it get through."""

    def __init__(self, chunks: AsyncIterator[memoryview], request: _Request, moved: Callable[[_Request], None]) -> None:
        self._chunks = chunks
        self._request = request
        self._moved = moved

    def __aiter__(self) -> AsyncIterator[memoryview]:
        return self

    async def __anext__(self) -> memoryview:
        self._moved(self._request)
        self._request.ours = True
        try:
            return await self._chunks.__anext__()
        finally:
            self._request.ours = False
            self._request.moved_s = boot_s()
