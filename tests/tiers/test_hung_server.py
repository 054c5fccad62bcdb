"""A bucket whose server takes connections and requests and answers nothing: SIGSTOP to a real one, then SIGCONT."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from contract import SEVERAL_CHUNKS, SHARD, aligned, chunked, noise, on
from plain_s3 import PlainS3

from surefoot.errors import ObjectExistsError, TierError
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.base import Tier
from surefoot.tiers.object_store import ObjectTier

_STALL_S = 0.5
_BOUND_S = 60.0
"""Far beyond what any request may take: nothing of it is a measurement."""
_READ_BYTES = 24 << 20

VERBS: dict[str, Callable[[Tier], Awaitable[Any]]] = {
    "get": lambda tier: tier.get("run.json"),
    "size": lambda tier: tier.size("run.json"),
    "read_into": lambda tier: tier.read_into(SHARD, 0, memoryview(bytearray(len(noise(_READ_BYTES))))),
    "list": lambda tier: tier.list("steps/"),
    "put": lambda tier: tier.put("other.json", b"{}"),
    "put_if_absent": lambda tier: tier.put_if_absent("third.json", b"{}"),
    "put_stream": lambda tier: tier.put_stream("a/b", chunked(aligned(noise(SEVERAL_CHUNKS))), SEVERAL_CHUNKS),
    "delete": lambda tier: tier.delete(["nothing.json"]),
}


class Bucket:
    """A prefix with a document and a shard in it."""

    def __init__(self, server: S3Server, prefix: str) -> None:
        self.server = server
        self._prefix = prefix
        self._plain = PlainS3(server)

    def open(self, stall_s: float = _BOUND_S) -> Tier:
        return ObjectTier.open("s3", "surefoot", self._prefix, stall_s=stall_s)

    def read(self, key: str) -> bytes | None:
        return self._plain.read(f"{self._prefix}/{key}")

    def keys(self) -> set[str]:
        return {key.removeprefix(f"{self._prefix}/") for key in self._plain.keys(f"{self._prefix}/")}

    @contextmanager
    def paused(self) -> Iterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.go_on()


@pytest.fixture
def bucket(s3_env: S3Server, request: pytest.FixtureRequest) -> Bucket:
    made = Bucket(s3_env, f"hung-{abs(hash(request.node.name)):x}")

    async def fill(tier: Tier) -> None:
        await tier.put("run.json", b"{}")
        await tier.put_stream(SHARD, chunked(aligned(noise(_READ_BYTES))), _READ_BYTES)

    on(made, fill)  # type: ignore[arg-type]
    return made


def _told(bucket: Bucket, verb: Callable[[Tier], Awaitable[Any]], stall_s: float = _STALL_S) -> TierError:
    async def story() -> TierError:
        tier = bucket.open(stall_s)
        try:
            async with asyncio.timeout(_BOUND_S):
                await verb(tier)
        except TierError as error:
            return error
        finally:
            await tier.close()
        raise AssertionError("no error")

    return asyncio.run(story())


@pytest.mark.parametrize("name", VERBS)
def test_no_request_waits_for_ever(bucket: Bucket, name: str) -> None:
    """Every kind of request is given up, with the place and what to look at in the error; nothing that was there is
    lost, and once the server goes on the same request is answered."""
    before = bucket.keys()
    with bucket.paused():
        error = _told(bucket, VERBS[name])
    assert type(error) is TierError
    assert f"s3://surefoot/{bucket._prefix}" in str(error)
    assert "check that the store works, and the network to it" in str(error)

    async def again(tier: Tier) -> None:
        async with asyncio.timeout(_BOUND_S):
            try:
                await VERBS[name](tier)
            except ObjectExistsError:
                # What was given up went through after all; it is what was to be written.
                assert await tier.get("third.json") == b"{}"

    on(bucket, again)  # type: ignore[arg-type]
    assert before <= bucket.keys()
    assert (bucket.read("run.json"), bucket.read(SHARD)) == (b"{}", noise(_READ_BYTES))


@pytest.mark.parametrize("name", VERBS)
def test_whoever_waits_is_answered(bucket: Bucket, name: str) -> None:
    """A server that goes on before a request is given up answers it as if nothing had been."""

    async def story(tier: Tier) -> None:
        asked = asyncio.ensure_future(VERBS[name](tier))
        done, _ = await asyncio.wait((asked,), timeout=0.3)
        assert not done
        bucket.server.go_on()
        async with asyncio.timeout(_BOUND_S):
            await asked

    with bucket.paused():
        on(bucket, story)  # type: ignore[arg-type]
    assert (bucket.read("run.json"), bucket.read(SHARD)) == (b"{}", noise(_READ_BYTES))


@pytest.mark.parametrize("so_far", [4 << 20, 40 << 20, 60 << 20], ids=["begin", "middle", "end"])
def test_an_upload_that_is_cut_short(bucket: Bucket, so_far: int) -> None:
    """The server stops in the middle of a large upload: given up, and whatever it does with what it has when it goes
    on, a part of the object is never seen; written again it is whole."""
    size = 60 << 20

    async def source() -> AsyncIterator[memoryview]:
        data = aligned(noise(size))
        for start in range(0, size, 4 << 20):
            if start == so_far:
                bucket.server.pause()
            yield data[start : start + (4 << 20)]
        if so_far == size:
            bucket.server.pause()

    try:
        error = _told(bucket, lambda tier: tier.put_stream("steps/x", source(), size))
    finally:
        bucket.server.go_on()
    assert "check that the store works" in str(error)
    assert bucket.read("steps/x") in (None, noise(size))
    on(bucket, lambda tier: tier.put_stream("steps/x", chunked(aligned(noise(size))), size))  # type: ignore[arg-type]
    assert bucket.read("steps/x") == noise(size)


def test_a_name_is_won_once(bucket: Bucket) -> None:
    """A write-if-absent was given up, and the server may do it all the same: whoever asks next wins or is refused,
    and what stands is one of the two, for good."""
    with bucket.paused():
        error = _told(bucket, lambda tier: tier.put_if_absent("commits/1.json", b"first"))
    assert not isinstance(error, ObjectExistsError)

    async def second(tier: Tier) -> bytes:
        try:
            await tier.put_if_absent("commits/1.json", b"second")
        except ObjectExistsError:
            return b"first"
        return b"second"

    won = on(bucket, second)  # type: ignore[arg-type]
    assert bucket.read("commits/1.json") == won
    assert on(bucket, lambda tier: tier.get("commits/1.json")) == won  # type: ignore[arg-type]
