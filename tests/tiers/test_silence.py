"""Silence of the run's place: said once while it lasts, and once when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import surefoot.tiers.silence as silence_module
from surefoot.errors import ObjectMissingError, TierError
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.object_store import ObjectTier
from surefoot.tiers.silence import Silence, Watched

_BOUND_S = 60.0
_SHARD_BYTES = 40 << 20


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence_module, "SILENT_AFTER_S", 0.2)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_BOUND_S):
        while not condition():  # noqa: ASYNC110 - seen from another thread
            await asyncio.sleep(0.01)


@contextmanager
def _paused(server: S3Server) -> Iterator[None]:
    server.pause()
    try:
        yield
    finally:
        server.go_on()


def _on_bucket(
    story: Callable[[Watched, list[Silence]], Awaitable[None]], prefix: str, stall_s: float = _BOUND_S
) -> list[Silence]:
    """What was told of a bucket in which `run.json` lies."""

    async def played() -> list[Silence]:
        told: list[Silence] = []
        place = Watched(ObjectTier.open("s3", "surefoot", prefix, stall_s=stall_s), told.append)
        await place.put("run.json", b"here")
        told.clear()
        async with asyncio.timeout(_BOUND_S):
            await story(place, told)
        await place.close()
        return told

    return asyncio.run(played())


def test_a_silence_is_said_once_and_its_end_once(s3_env: S3Server) -> None:
    """Three requests to a server that stands still, and all of them answered once it goes on."""

    async def story(place: Watched, told: list[Silence]) -> None:
        with _paused(s3_env):
            asked = [asyncio.ensure_future(place.get("run.json")) for _ in range(3)]
            await until(lambda: bool(told))
            assert [one.done() for one in asked] == [False] * 3
        assert await asyncio.gather(*asked) == [b"here"] * 3

    begun, ended = _on_bucket(story, "said-once")
    assert (begun.what, begun.over, ended.what, ended.over) == ("get run.json", False, "get run.json", True)
    assert 0.2 <= begun.seconds <= ended.seconds


def test_a_request_that_is_given_up_ends_no_silence(s3_env: S3Server) -> None:
    """It is said once for all tries; the first answer ends it, also one that says that there is nothing."""

    async def story(place: Watched, told: list[Silence]) -> None:
        with _paused(s3_env):
            for _ in range(2):
                with pytest.raises(TierError, match="no answer in time"):
                    await place.put("other.json", b"x")
            assert [one.over for one in told] == [False]
        with pytest.raises(ObjectMissingError):
            await place.get("nothing.json")

    assert [one.over for one in _on_bucket(story, "given-up", stall_s=0.5)] == [False, True]


def test_an_upload_that_gets_on_is_not_silent(s3_env: S3Server) -> None:
    """A stream falls silent in its middle, gets on and is said to, and falls silent again before its end."""

    async def story(place: Watched, told: list[Silence]) -> None:
        handed = 0

        async def chunks() -> AsyncIterator[memoryview]:
            nonlocal handed
            while handed < _SHARD_BYTES:
                handed += 4 << 20
                yield memoryview(bytes(4 << 20))

        stalled = [0.0]
        s3_env.pause()
        try:
            writing = asyncio.ensure_future(place.put_stream("a/b.safetensors", chunks(), _SHARD_BYTES))
            await until(lambda: bool(told))
            stalled[0] = handed
        finally:
            s3_env.go_on()
        await writing
        assert stalled[0] < handed == _SHARD_BYTES

    begun, ended = _on_bucket(story, "stream")
    assert (begun.what, begun.over, ended.over) == ("write a/b.safetensors", False, True)


def test_what_takes_us_long_is_no_silence(tmp_path: Path) -> None:
    """While the next chunk is being made, by a bandwidth cap say, nobody waits for the place."""

    class Looked(Watched):
        looks = 0

        def _look(self, request: silence_module._Request) -> None:
            self.looks += 1
            super()._look(request)

    async def story() -> list[Silence]:
        told: list[Silence] = []
        place = Looked(DiskTier(tmp_path, direct=False), told.append)

        async def chunks() -> AsyncIterator[memoryview]:
            await until(lambda: place.looks >= 3)
            yield memoryview(b"late")

        async with asyncio.timeout(_BOUND_S):
            await place.put_stream("a/b.safetensors", chunks(), 4)
        assert await place.get("a/b.safetensors") == b"late"
        return told

    assert asyncio.run(story()) == []


def test_a_slow_place_is_spoken_of_less(s3_env: S3Server) -> None:
    """What was answered slowly may take twice as long the next time; it is no silence then."""

    async def story(place: Watched, told: list[Silence]) -> None:
        with _paused(s3_env):
            asked = asyncio.ensure_future(place.get("run.json"))
            await until(lambda: bool(told))
        await asked
        with place._watch("get", "x", 0) as again, place._watch("put", "x", 0) as other:
            assert place._patience_s(again) >= 2 * told[0].seconds
            assert place._patience_s(other) == 0.2

    _on_bucket(story, "slow")
