"""Frozen files: a rank's tensors that never change, kept once and named by the hash of the file's bytes.

    frozen/<hash>.safetensors    header and tensors, laid out like an image (`Plan.frozen_image`)

A rank's record names the file. Equal tensors make an equal file under any plan, so a script that has made its base
again needs nothing but the name to know that it is the one that was saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.layout import frozen_key, parse_frozen
from surefoot.core.manifest import Manifest
from surefoot.core.plan import Item, Plan, structure_leaves
from surefoot.errors import CorruptError

MIN_FROZEN_BYTES = 16 * 1024 * 1024
"""A rank whose frozen tensors are together smaller than this keeps them in its images like all others."""


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


def named_by(record: Mapping[str, Any]) -> FrozenFile | None:
    """The frozen file that a rank's record names; None if it names none.

    Raises:
        CorruptError: the name is not that of a file.
    """
    raw = record.get("frozen")
    return None if raw is None else FrozenFile.from_json(raw, "record: frozen")


def files_of(manifest: Manifest) -> tuple[FrozenFile, ...]:
    """The frozen files that a checkpoint needs, each once, in order.

    Raises:
        CorruptError: a record names something other than a file.
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
    """Hashes of frozen files that no manifest names and no trainer holds.

    Args:
        present: hashes of the files that are there.
        manifests: every one that may still be restored, those given up and not yet deleted too.
        held: hashes that trainers have announced.
    """
    named = {file.xxh3_128 for manifest in manifests for file in files_of(manifest)}
    return sorted(set(present) - named - set(held))
