"""What every tier promises, looked at beside the interface. Subclass `TierContract` and give it a `place`."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from typing import Protocol, TypeVar

import pytest

from surefoot.errors import ObjectExistsError, ObjectMissingError, TierError
from surefoot.tiers.base import Entry, Tier

T = TypeVar("T")

SHARD = "steps/00000012-g0001/rank-00001-a3f2.safetensors"
CHUNK_BYTES = 4 << 20
SEVERAL_CHUNKS = 5 * CHUNK_BYTES + 4097
"""More than one part of a multipart upload, and a tail that fills no page."""

UNSAFE_KEYS = ("", "/x", "x/", "../x", "a/../x", "a/./x", "a//x", "a b", "a%20b", "a?b", "\u00fc", "a\\b", "+x", "x\n")


class Place(Protocol):
    """Where a tier keeps its bytes, seen past the tier."""

    def open(self) -> Tier:
        """A new tier on this place."""

    def read(self, key: str) -> bytes | None:
        """The bytes under a key, or None."""

    def everything(self) -> list[str]:
        """Names of whatever lies there: objects, temporary files, unfinished uploads."""

    def seed(self, keys: list[str]) -> None:
        """Put an object of one byte under each key, past the tier."""


def aligned(data: bytes) -> memoryview:
    """`data` at the start of a mapping of its own, so at a page boundary."""
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


@cache
def noise(size_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size_bytes)


async def chunked(data: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def on(place: Place, story: Callable[[Tier], Awaitable[T]]) -> T:
    """Run a story on a new tier and close it."""

    async def told() -> T:
        tier = place.open()
        try:
            return await story(tier)
        finally:
            await tier.close()

    return asyncio.run(told())


class SourceError(Exception):
    """What a test's source of chunks raises."""


class TierContract:
    """Subclasses provide the fixture `place`."""

    @pytest.mark.parametrize("size_bytes", [0, 1, 4095, 4096, 4097, CHUNK_BYTES, SEVERAL_CHUNKS])
    def test_stream_arrives(self, place: Place, size_bytes: int) -> None:
        """Every byte of a stream is under its key, and nothing else is left."""
        data = noise(size_bytes)
        on(place, lambda tier: tier.put_stream(SHARD, chunked(aligned(data)), size_bytes))
        assert place.read(SHARD) == data
        assert place.everything() == [SHARD]

    def test_unaligned_memory_arrives(self, place: Place) -> None:
        """Chunks that start anywhere in memory are written all the same."""
        data = noise(SEVERAL_CHUNKS + 1)
        on(place, lambda tier: tier.put_stream(SHARD, chunked(aligned(data)[1:]), SEVERAL_CHUNKS))
        assert place.read(SHARD) == data[1:]

    def test_chunk_memory_is_the_callers_again(self, place: Place) -> None:
        """A source that fills one and the same buffer for every chunk is uploaded right."""
        buffer = aligned(bytes(CHUNK_BYTES))

        async def refilled() -> AsyncIterator[memoryview]:
            for number in range(8):
                buffer[:] = bytes([number + 1]) * CHUNK_BYTES
                yield buffer
                buffer[:] = bytes(CHUNK_BYTES)

        on(place, lambda tier: tier.put_stream(SHARD, refilled(), 8 * CHUNK_BYTES))
        assert place.read(SHARD) == b"".join(bytes([number + 1]) * CHUNK_BYTES for number in range(8))

    @pytest.mark.parametrize("size_bytes", [1, SEVERAL_CHUNKS])
    def test_overwrite(self, place: Place, size_bytes: int) -> None:
        """A stream replaces an older object whole, be it longer or shorter; so does a small put."""
        data = noise(size_bytes, seed=1)

        async def story(tier: Tier) -> None:
            await tier.put(SHARD, b"older, and of another length")
            await tier.put_stream(SHARD, chunked(aligned(data)), size_bytes)

        on(place, story)
        assert place.read(SHARD) == data
        on(place, lambda tier: tier.put(SHARD, b"newest"))
        assert place.read(SHARD) == b"newest"

    def test_small_objects(self, place: Place) -> None:
        """put, get and size agree with each other and with what lies there."""
        data = noise(70_000)

        async def story(tier: Tier) -> tuple[bytes, int]:
            await tier.put("run.json", data)
            return await tier.get("run.json"), await tier.size("run.json")

        assert on(place, story) == (data, len(data))
        assert place.read("run.json") == data

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 1), (0, SEVERAL_CHUNKS), (4095, 2), (4096, 3 << 20), (8191, 9 << 20), (SEVERAL_CHUNKS - 1, 1)],
    )
    def test_ranges(self, place: Place, offset: int, length: int) -> None:
        """read_into fills a buffer with just the bytes asked for, at any offset."""
        data = noise(SEVERAL_CHUNKS)
        buffer = aligned(bytes(length))

        async def story(tier: Tier) -> None:
            await tier.put_stream(SHARD, chunked(aligned(data)), len(data))
            await tier.read_into(SHARD, offset, buffer)

        on(place, story)
        assert buffer == data[offset : offset + length]

    @pytest.mark.parametrize(("offset", "length"), [(10, 1), (9, 2), (4096, 4096), (0, 2 << 20)])
    def test_reading_past_the_end(self, place: Place, offset: int, length: int) -> None:
        """An object that ends too early is a fault, and is not said to be missing."""

        async def story(tier: Tier) -> None:
            await tier.put(SHARD, bytes(10))
            await tier.read_into(SHARD, offset, aligned(bytes(length)))

        with pytest.raises(TierError) as caught:
            on(place, story)
        assert not isinstance(caught.value, ObjectMissingError)

    def test_empty_buffer(self, place: Place) -> None:
        """Nothing can be read from an object that is there, not from one that is absent."""
        place.seed([SHARD])
        on(place, lambda tier: tier.read_into(SHARD, 0, memoryview(bytearray())))
        with pytest.raises(ObjectMissingError):
            on(place, lambda tier: tier.read_into("run.json", 0, memoryview(bytearray())))

    def test_missing(self, place: Place) -> None:
        """Reads of an absent key say that it is missing, in a new place as in a used one."""
        for _ in range(2):
            with pytest.raises(ObjectMissingError):
                on(place, lambda tier: tier.get("commits/x.json"))
            with pytest.raises(ObjectMissingError):
                on(place, lambda tier: tier.size("commits/x.json"))
            with pytest.raises(ObjectMissingError):
                on(place, lambda tier: tier.read_into("commits/x.json", 0, memoryview(bytearray(1))))
            place.seed(["commits/y.json"])

    def test_put_if_absent(self, place: Place) -> None:
        """The first one stays, the second is told."""
        on(place, lambda tier: tier.put_if_absent("commits/x.json", b"first"))
        with pytest.raises(ObjectExistsError):
            on(place, lambda tier: tier.put_if_absent("commits/x.json", b"second"))
        assert place.read("commits/x.json") == b"first"
        assert place.everything() == ["commits/x.json"]

    def test_sixteen_racers(self, place: Place) -> None:
        """Of sixteen at once exactly one wins, and its bytes are the ones that stay."""

        async def story() -> list[int]:
            tiers = [place.open() for _ in range(4)]
            start = asyncio.Event()

            async def racer(number: int) -> bool:
                await start.wait()
                try:
                    await tiers[number % 4].put_if_absent("generations/g0001.json", b"%d" % number)
                except ObjectExistsError:
                    return False
                return True

            racers = [asyncio.create_task(racer(number)) for number in range(16)]
            start.set()
            won = [number for number, wins in enumerate(await asyncio.gather(*racers)) if wins]
            for tier in tiers:
                await tier.close()
            return won

        winners = asyncio.run(story())
        assert len(winners) == 1
        assert place.read("generations/g0001.json") == b"%d" % winners[0]
        assert place.everything() == ["generations/g0001.json"]

    @pytest.mark.parametrize("older", [None, b"older"])
    def test_failing_source(self, place: Place, older: bytes | None) -> None:
        """A source that fails half-way leaves nothing visible or lying about, and an older object intact."""
        data = aligned(noise(SEVERAL_CHUNKS))

        async def failing() -> AsyncIterator[memoryview]:
            for start in range(0, 3 * CHUNK_BYTES, CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]
            raise SourceError

        self._is_refused(place, older, failing(), SourceError)

    @pytest.mark.parametrize("surplus", [-1, 1, -SEVERAL_CHUNKS, CHUNK_BYTES])
    def test_wrong_length(self, place: Place, surplus: int) -> None:
        """A source that yields less or more than was announced is refused, and leaves nothing."""
        data = aligned(noise(SEVERAL_CHUNKS + surplus))
        self._is_refused(place, None, chunked(data), TierError)
        self._is_refused(place, b"older", chunked(data), TierError)

    def test_wrong_length_of_a_small_stream(self, place: Place) -> None:
        """Likewise where everything fits into one request."""
        for got in (0, 9, 11):
            with pytest.raises(TierError):
                on(place, lambda tier, got=got: tier.put_stream(SHARD, chunked(aligned(bytes(got))), 10))
        assert place.everything() == []

    @pytest.mark.parametrize("older", [None, b"older"])
    def test_cancellation(self, place: Place, older: bytes | None) -> None:
        """A stream that is cancelled half-way leaves nothing, and an older object intact."""
        data = aligned(noise(SEVERAL_CHUNKS))

        async def story(tier: Tier) -> None:
            half_way = asyncio.Event()

            async def stuck() -> AsyncIterator[memoryview]:
                for start in range(0, 3 * CHUNK_BYTES, CHUNK_BYTES):
                    yield data[start : start + CHUNK_BYTES]
                half_way.set()
                await asyncio.Event().wait()

            if older is not None:
                await tier.put(SHARD, older)
            putting = asyncio.create_task(tier.put_stream(SHARD, stuck(), SEVERAL_CHUNKS))
            await half_way.wait()
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting

        on(place, story)
        assert place.read(SHARD) == older
        assert place.everything() == ([SHARD] if older else [])

    def test_list(self, place: Place) -> None:
        """A listing has every object under its prefix with its size, sorted, and nothing beside the prefix."""
        keys = ["steps/b/2", "steps/b/1", "steps/a", "stepsx/a", "run.json", "steps/b/c/3", "steps/b.x/4"]
        place.seed(keys)

        async def story(tier: Tier) -> list[list[str]]:
            await tier.put("steps/b/1", b"12345")
            assert Entry("steps/b/1", 5) in await tier.list("steps/")
            prefixes = ("steps/", "steps/b/", "steps/b/c/", "step/", "nothing/at/all/", "")
            return [[entry.key for entry in await tier.list(prefix)] for prefix in prefixes]

        assert on(place, story) == [
            ["steps/a", "steps/b.x/4", "steps/b/1", "steps/b/2", "steps/b/c/3"],
            ["steps/b/1", "steps/b/2", "steps/b/c/3"],
            ["steps/b/c/3"],
            [],
            [],
            sorted(keys),
        ]

    def test_list_of_a_new_place(self, place: Place) -> None:
        """Where nothing was ever written a listing is empty."""
        assert on(place, lambda tier: tier.list("")) == []
        assert on(place, lambda tier: tier.list("commits/")) == []

    def test_long_list(self, place: Place) -> None:
        """A listing is complete also where a server gives it in pages."""
        keys = [f"commits/{number:08d}-g0001.json" for number in range(1_003)]
        place.seed(keys)
        assert on(place, lambda tier: tier.list("commits/")) == [Entry(key, 1) for key in keys]

    def test_delete(self, place: Place) -> None:
        """What is deleted is gone, the rest stays; an absent key is no error, nor is no key at all."""
        place.seed(["steps/x/1", "steps/x/2", "steps/y/3"])

        async def story(tier: Tier) -> None:
            await tier.delete(["steps/x/1", "steps/none", "steps/x/2", "none/none"])
            await tier.delete(["steps/x/1"])
            await tier.delete([])

        on(place, story)
        assert place.everything() == ["steps/y/3"]
        on(place, lambda tier: tier.put("steps/x/1", b"again"))
        assert place.read("steps/x/1") == b"again"

    @pytest.mark.parametrize("key", UNSAFE_KEYS)
    def test_unsafe_keys(self, place: Place, key: str) -> None:
        """A key that could lead elsewhere, or that stores understand differently, is refused by every verb."""
        place.seed([SHARD])
        verbs: list[Callable[[Tier], Awaitable[object]]] = [
            lambda tier: tier.put(key, b""),
            lambda tier: tier.put_if_absent(key, b""),
            lambda tier: tier.put_stream(key, chunked(aligned(b"")), 0),
            lambda tier: tier.get(key),
            lambda tier: tier.size(key),
            lambda tier: tier.read_into(key, 0, memoryview(bytearray(1))),
            lambda tier: tier.delete([SHARD, key]),
            lambda tier: tier.list(f"{key}/"),
        ]
        for verb in verbs:
            with pytest.raises(TierError, match="unsafe"):
                on(place, verb)
        assert place.everything() == [SHARD]

    def test_closed(self, place: Place) -> None:
        """Closing twice is fine; a closed tier says so."""

        async def story() -> None:
            tier = place.open()
            await tier.put("run.json", b"1")
            await tier.close()
            await tier.close()
            with pytest.raises(TierError, match="closed"):
                await tier.get("run.json")

        asyncio.run(story())

    def test_free_bytes(self, place: Place) -> None:
        """The space left is a positive number or not known, also before the first write."""
        free = on(place, lambda tier: tier.free_bytes())
        assert free is None or free > 0

    def _is_refused(
        self, place: Place, older: bytes | None, source: AsyncIterator[memoryview], error: type[Exception]
    ) -> None:
        async def story(tier: Tier) -> None:
            if older is not None:
                await tier.put(SHARD, older)
            with pytest.raises(error):
                await tier.put_stream(SHARD, source, SEVERAL_CHUNKS)

        on(place, story)
        assert place.read(SHARD) == older
        assert place.everything() == ([SHARD] if older else [])
