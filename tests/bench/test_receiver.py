"""The benchmark's own receiver: it takes what our tier sends as a store would, and nothing that changed on the way."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from obstore.store import S3Store

from benchmarks.receiver import Link, Receiver
from surefoot.errors import ObjectExistsError, ObjectMissingError
from surefoot.tiers.base import Entry
from surefoot.tiers.object_store import ObjectTier

_CHUNK = 8 << 20


@contextmanager
def _served() -> Iterator[int]:
    with Receiver(0.0) as receiver:
        thread = threading.Thread(target=receiver.serve_forever)
        thread.start()
        try:
            yield receiver.server_address[1]
        finally:
            receiver.shutdown()
            thread.join()


def _tier(port: int) -> ObjectTier:
    store = S3Store(
        "bench",
        config={
            "access_key_id": "a",
            "secret_access_key": "b",
            "region": "us-east-1",
            "endpoint": f"http://127.0.0.1:{port}",
            "virtual_hosted_style_request": False,
            "unsigned_payload": False,
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=60)},
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
    )
    return ObjectTier(store, "s3://bench/run", "run", 60.0)


async def _chunks(data: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), _CHUNK):
        yield memoryview(data)[start : start + _CHUNK]


def test_it_keeps_what_a_tier_sends() -> None:
    """Small objects come back byte for byte, large ones are listed with their size, conditions hold, and absence is an
    error."""

    async def use(tier: ObjectTier) -> None:
        await tier.put_stream("steps/large", _chunks(bytes(2 * _CHUNK + 5)), 2 * _CHUNK + 5)
        await tier.put_if_absent("a~b", b"first")
        with pytest.raises(ObjectExistsError):
            await tier.put_if_absent("a~b", b"second")
        assert await tier.get("a~b") == b"first"
        with pytest.raises(ObjectMissingError):
            await tier.get("nothing")
        assert await tier.list("") == [Entry("a~b", 5), Entry("steps/large", 2 * _CHUNK + 5)]
        assert await tier.size("steps/large") == 2 * _CHUNK + 5
        await tier.delete(["steps/large", "a~b"])
        assert await tier.list("steps/") == []

    with _served() as port:
        asyncio.run(use(_tier(port)))


@pytest.mark.parametrize(("claimed", "status"), [(b"the same", 200), (b"other", 400)])
def test_bytes_that_are_not_those_of_their_hash_are_refused(claimed: bytes, status: int) -> None:
    """Every body is hashed here and held against the hash that the request names."""
    with _served() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"x-amz-content-sha256": hashlib.sha256(claimed).hexdigest()}
        connection.request("PUT", "/bench/run/x", b"the same", headers)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        assert answer.status == status


def test_a_link_carries_no_more_than_its_speed() -> None:
    """Of all senders together."""
    link = Link(1e6)
    start_s = time.monotonic()
    senders = [threading.Thread(target=lambda: [link.take(10_000) for _ in range(10)]) for _ in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    # A lower bound by construction: 400 kB at 1 MB/s, less the burst that is allowed.
    assert time.monotonic() - start_s >= 0.39
