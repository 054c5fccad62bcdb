"""Block sums: what stands in a document, and what they are sums of."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
import xxhash
from core_samples import damaged, shard
from hypothesis import given
from hypothesis import strategies as st

from surefoot.core.block_sums import BlockSums
from surefoot.core.documents import seal, unseal
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Shard
from surefoot.errors import CorruptError
from surefoot.records.image_hash import ImageHash

_AT = BoundaryId(5, 1)


@given(st.binary(max_size=400), st.integers(1, 50), st.lists(st.integers(1, 120), max_size=9))
def test_sums_and_whole_do_not_depend_on_the_pieces(data: bytes, block_bytes: int, lengths: list[int]) -> None:
    """Fed in pieces of any length: the hash of all bytes, and that of each block, the last one short."""
    hashing, rest = ImageHash(block_bytes), memoryview(data)
    for length in [*lengths, len(data)]:
        hashing.update(rest[:length])
        rest = rest[length:]
    blocks = [data[start : start + block_bytes] for start in range(0, len(data), block_bytes)]
    assert hashing.hexdigest() == xxhash.xxh3_128_hexdigest(data)
    assert hashing.sums() == BlockSums(block_bytes, tuple(xxhash.xxh3_64_intdigest(block) for block in blocks))


def test_a_shard_s_sums_come_back_through_its_documents() -> None:
    """Big-endian, eight bytes a block, base64; a shard without sums has none and says nothing of them."""
    with_sums = replace(shard(_AT, 0), size_bytes=21, blocks=BlockSums(10, (1, 2**64 - 1, 7)))
    packed = base64.b64decode(with_sums.to_json()["blocks"]["xxh3_64"])
    assert packed == bytes(7) + b"\1" + b"\xff" * 8 + bytes(7) + b"\7"
    assert Shard.from_ack(with_sums.ack_bytes(), with_sums.ack) == with_sums
    bare = shard(_AT, 0)
    assert "blocks" not in bare.to_json()
    assert Shard.from_ack(bare.ack_bytes(), bare.ack).blocks is None


@pytest.mark.parametrize("blocks", [{"bytes": 10}, {"bytes": 0, "xxh3_64": ""}, {"bytes": 10, "xxh3_64": "AAAA"}])
def test_sums_that_do_not_fit_are_refused(blocks: dict[str, object]) -> None:
    """Too few, without text, or of blocks of no length."""
    body = unseal(shard(_AT, 0).ack_bytes(), "x")
    body["shard"]["blocks"] = blocks
    with pytest.raises(CorruptError, match=r"blocks|sums"):
        Shard.from_ack(seal(body), shard(_AT, 0).ack)


@given(st.data())
def test_damaged_sums_are_read_or_refused(data: st.DataObject) -> None:
    """Whatever stands there: a shard, or an error that says so."""
    good = replace(shard(_AT, 0), size_bytes=21, blocks=BlockSums(10, (1, 2, 7)))
    body = unseal(good.ack_bytes(), "x")
    body["shard"]["blocks"] = data.draw(damaged(body["shard"]["blocks"]))
    try:
        read = Shard.from_ack(seal(body), good.ack)
    except CorruptError:
        return
    assert read.blocks is not None
    assert len(read.blocks.sums) == -(-21 // read.blocks.block_bytes)
