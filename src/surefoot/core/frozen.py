"""Frozen files: tensors that never change, kept once and named by the hash of the file's bytes.

    frozen/<hash>.safetensors    header and tensors, laid out like an image (`Plan.frozen_image`)
    frozen/<hash>.json           the index: size, and the digest of each tensor, in the file's order

The index is put as soon as the contents are known, before the first image that names them is committed; the file may
follow minutes later. So live tensors can be compared with what was recorded without the file, one by one.

A tensor's digest is the xxh3-128 of the xxh3-64 of each of its blocks (`BLOCK_BYTES`), each as 8 bytes big-endian:
one pass over the bytes gives it and what a later sample is compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields, compact, digest, seal, unseal
from surefoot.core.layout import frozen_index_key, frozen_key, parse_frozen
from surefoot.core.manifest import Manifest
from surefoot.core.plan import Item, Plan, structure_leaves
from surefoot.errors import CorruptError

MIN_FROZEN_BYTES = 16 * 1024 * 1024
"""A rank whose frozen tensors are smaller than this together keeps them in its images like all others."""

BLOCK_BYTES = 256 * 1024
"""What is hashed by itself, and compared as one sample."""


@dataclass(frozen=True, order=True, slots=True)
class FrozenFile:
    """A frozen file by name."""

    xxh3_128: str
    size_bytes: int

    @property
    def key(self) -> str:
        return frozen_key(self.xxh3_128)

    def to_json(self) -> dict[str, Any]:
        return {"xxh3_128": self.xxh3_128, "size_bytes": self.size_bytes}

    @classmethod
    def from_json(cls, data: Any, what: str) -> FrozenFile:
        fields = Fields(data, what)
        file = cls(fields.text("xxh3_128"), fields.integer("size_bytes"))
        # It becomes part of a key.
        if parse_frozen(file.key) != file.xxh3_128:
            raise CorruptError(f"{what}: {file.xxh3_128!r} is not 32 hex digits")
        return file


@dataclass(frozen=True, slots=True)
class FrozenIndex:
    """What is in a frozen file."""

    file: FrozenFile
    tensors: tuple[tuple[str, str], ...]
    """Name and digest of each tensor, in the file's order."""

    @property
    def key(self) -> str:
        return frozen_index_key(self.file.xxh3_128)

    def to_json(self) -> dict[str, Any]:
        return {**self.file.to_json(), "tensors": [list(tensor) for tensor in self.tensors]}

    def to_bytes(self) -> bytes:
        return seal(self.to_json())

    @classmethod
    def from_json(cls, data: Any, what: str) -> FrozenIndex:
        tensors = Fields(data, what).items("tensors")
        if any(type(pair) is not list or [type(part) for part in pair] != [str, str] for pair in tensors):
            raise CorruptError(f"{what}: its tensors are not pairs of name and digest")
        return cls(FrozenFile.from_json(data, what), tuple((name, of) for name, of in tensors))

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> FrozenIndex:
        index = cls.from_json(unseal(data, what), what)
        if index.key != what:
            raise CorruptError(f"{what}: holds the index of {index.file.key}")
        return index

    def fits(self, plan: Plan, rank: int) -> bool:
        """True if it describes the frozen file that a plan gives a rank."""
        image = plan.frozen_image(rank)
        names = [box.name for box, _start in image.places] if image is not None else []
        size_bytes = image.size_bytes if image is not None else 0
        return [name for name, _digest in self.tensors] == names and self.file.size_bytes == size_bytes


def contents_key(header: bytes, digests: Iterable[str]) -> str:
    """Equal for frozen files of equal contents, without a pass over them: header, and each tensor's digest in order."""
    return digest(compact([digest(header), list(digests)]))


def named_by(record: Mapping[str, Any]) -> FrozenFile | None:
    """The frozen file that a rank's record names; None if it names none.

    Raises:
        CorruptError: what it names is no file.
    """
    raw = record.get("frozen")
    return None if raw is None else FrozenFile.from_json(raw, "record: frozen")


def files_of(manifest: Manifest) -> tuple[FrozenFile, ...]:
    """The frozen files that a checkpoint needs, each once, in order.

    Raises:
        CorruptError: a record names something else than a file.
    """
    named = (named_by(shard.record) for shard in manifest.shards)
    return tuple(sorted({file for file in named if file is not None}))


def frozen_ranks(plan: Plan) -> list[int]:
    """Ranks that have a frozen file under a plan."""
    return sorted({item.rank for item in plan.items if item.frozen})


def needed_by(plan: Plan, rank: int) -> list[Item]:
    """The frozen items that a rank's structure refers to, in its order: of a sharded leaf all blocks, since only the
    rank itself knows which one is its own."""
    mine = plan.sources(rank)
    items: list[Item] = []
    for name in structure_leaves(plan.structure(rank)):
        found = plan.blocks.get(name) or ([mine[name]] if name in mine else [])
        items += [item for item in found if item.frozen]
    return items


def unnamed(present: Iterable[str], manifests: Iterable[Manifest], held: Iterable[str]) -> Sequence[str]:
    """Hashes of frozen files that no manifest names and nobody holds.

    Args:
        present: hashes of the files and indexes that are there.
        manifests: every one that may still be restored, those given up and not yet deleted too.
        held: hashes that trainers have announced.
    """
    named = {file.xxh3_128 for manifest in manifests for file in files_of(manifest)}
    return sorted(set(present) - named - set(held))
