"""What really lies in a run, read past Surefoot: own parser, own hash, own knowledge of what was sealed.

Takes the run as a mapping of keys to bytes, however they were fetched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash
from fake_trainer import content

At = tuple[int, int]
"""Step and generation."""


def of_directory(root: Path) -> dict[str, bytes]:
    """Everything in a directory at one moment of its retention: no manifest was given up while it was read."""
    while True:
        before = _read(root, root / "commits")
        found = _read(root, root)
        if _read(root, root / "commits") == before:
            return found


def _read(root: Path, directory: Path) -> dict[str, bytes]:
    found = {}
    for place, _directories, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # removed since the directory was listed
                found[str((Path(place) / name).relative_to(root))] = (Path(place) / name).read_bytes()
    return dict(sorted(found.items()))


def body_of(data: bytes) -> dict[str, Any]:
    """The body of a document whose hash is right."""
    document: dict[str, Any] = json.loads(data)
    text = data[data.index(b'"body":') + len(b'"body":') : -2]
    assert hashlib.blake2b(text, digest_size=16).hexdigest() == document["blake2b"], "a document with a wrong hash"
    body: dict[str, Any] = document["body"]
    return body


def checkpoints(objects: Mapping[str, bytes]) -> dict[At, dict[str, Any]]:
    """Every visible checkpoint, each proved whole; a torn one is an assertion's failure."""
    found: dict[At, dict[str, Any]] = {}
    for key, data in objects.items():
        if key.startswith("commits/") and not key.startswith("commits/+"):
            body = body_of(data)
            at = (body["boundary"], body["generation"])
            assert key == f"commits/{at[0]:08d}-g{at[1]:04d}.json"
            if "tombstone" in body or body["retired"] is not None:
                continue
            check_whole(body, objects)
            found[at] = body
    return found


def check_whole(manifest: dict[str, Any], objects: Mapping[str, bytes]) -> None:
    """Every shard of every rank is there, has its hash, and holds what was sealed at that boundary by that rank."""
    assert [shard["rank"] for shard in manifest["shards"]] == list(range(manifest["world_size"]))
    assert f"plans/{manifest['plan']}.json" in objects
    for shard in manifest["shards"]:
        assert shard["path"] in objects, f"{shard['path']} is missing"
        data = objects[shard["path"]]
        assert len(data) == shard["size_bytes"]
        assert xxhash.xxh3_128_hexdigest(data) == shard["xxh3_128"]
        at = (manifest["boundary"], manifest["generation"])
        record = shard["record"]
        assert (record["boundary"], record["generation"], record["rank"]) == (*at, shard["rank"])
        assert record["world_size"] == manifest["world_size"]
        _check_tensors(data, at, shard["rank"])


def _check_tensors(data: bytes, at: At, rank: int) -> None:
    (length,) = struct.unpack("<Q", data[:8])
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            leaf = name.split("@")[0]
            assert data[8 + length + start : 8 + length + end] == content(*at, leaf, rank, end - start), name
