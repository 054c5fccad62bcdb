"""The plan: which block of which tensor is kept by which rank.

Made from what every rank reports, by a pure function, once per structure; every agent that sees the same reports
makes the same plan. It is an object of the run (`plans/<hash>.json`) and stands in shared memory, so that an image
can be read without the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, Literal, get_args

from surefoot.core.documents import Fields, compact, digest, parse_json
from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.image import Box, Image, build_image, is_tensor_name
from surefoot.errors import CorruptError, UnsupportedStateError

Spread = Literal["replicated", "local"]
"""`replicated`: equal on all ranks, kept once. `local`: each rank keeps its own."""

MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor as one rank reports it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: Spread
    digest: str = ""
    """Hash of its bytes, for a leaf claimed to be replicated: the claim is checked, not believed."""

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), self.spread, self.digest]

    @classmethod
    def from_json(cls, data: Any) -> Leaf:
        if type(data) is not list or len(data) != 5:
            raise CorruptError("report: a leaf is not a list of five fields")
        name, dtype, shape, spread, leaf_digest = data
        _check_box("report", name, dtype, shape)
        if spread not in get_args(Spread) or type(leaf_digest) is not str:
            raise CorruptError(f"report: leaf {name!r} has spread {spread!r}")
        return cls(name, dtype, tuple(shape), spread, leaf_digest)


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank registered: its tensors, and the structure in which they and the plain values stand."""

    leaves: tuple[Leaf, ...]
    structure: str
    """JSON text of the tree (see `surefoot.trainer.flatten`)."""

    def to_json(self) -> dict[str, Any]:
        return {"leaves": [leaf.to_json() for leaf in self.leaves], "structure": self.structure}

    @classmethod
    def from_json(cls, data: Any) -> Report:
        fields = Fields(data, "report")
        return cls(tuple(Leaf.from_json(leaf) for leaf in fields.items("leaves")), fields.text("structure"))


@dataclass(frozen=True, slots=True)
class Item:
    """One box and the rank that keeps it."""

    box: Box
    rank: int
    spread: Spread
    leaf: str
    """Name of the leaf as reported: the box's name without the rank's mark."""


@dataclass(frozen=True)
class Plan:
    """Who keeps what. Immutable; identified by the hash of its body."""

    world_size: int
    items: tuple[Item, ...]
    structures: tuple[str, ...]
    """Distinct structures."""
    structure_of_rank: tuple[int, ...]
    mismatched: tuple[str, ...] = field(default=(), compare=False)
    """Leaves claimed to be replicated whose bytes differed between ranks: kept by each rank. Not part of the hash."""

    @cached_property
    def body(self) -> dict[str, Any]:
        return {
            "world_size": self.world_size,
            "items": [
                [
                    i.leaf,
                    i.rank,
                    i.spread,
                    i.box.dtype,
                    list(i.box.shape),
                    list(i.box.offset),
                    list(i.box.global_shape),
                ]
                for i in self.items
            ],
            "structures": list(self.structures),
            "structure_of_rank": list(self.structure_of_rank),
        }

    @cached_property
    def hash(self) -> str:
        return digest(compact(self.body))

    def image(self, rank: int) -> Image:
        """Layout of a rank's image; may hold no tensor at all."""
        return build_image([item.box for item in self.items if item.rank == rank], self.hash, rank)

    def structure(self, rank: int) -> str:
        return self.structures[self.structure_of_rank[rank]]

    def sources(self, rank: int) -> dict[str, Item]:
        """For one rank, by leaf name: the item that holds that leaf for it."""
        mine: dict[str, Item] = {}
        for item in self.items:
            if item.spread == "replicated" or item.rank == rank:
                mine[item.leaf] = item
        return mine

    @classmethod
    def from_body(cls, body: Any, what: str = "plan") -> Plan:
        fields = Fields(body, what)
        world_size = fields.integer("world_size", minimum=1)
        structures = fields.items("structures")
        of_rank = fields.integers("structure_of_rank")
        if len(of_rank) != world_size or any(index >= len(structures) for index in of_rank):
            raise CorruptError(f"{what}: structures do not fit a world size of {world_size}")
        if any(type(text) is not str for text in structures):
            raise CorruptError(f"{what}: a structure is not text")
        items = tuple(_item_from_json(data, world_size, what) for data in fields.items("items"))
        plan = cls(world_size, items, tuple(structures), of_rank)
        check_cover(plan, what)
        return plan


def make_plan(reports: Sequence[Report]) -> Plan:
    """The plan for `len(reports)` ranks; `reports[r]` is rank r's.

    Replicated leaves get one owner each, largest first, always to the rank with the fewest bytes so far: balanced
    and the same wherever it is computed.
    """
    for rank, report in enumerate(reports):
        if repeated := _repeated(leaf.name for leaf in report.leaves):
            raise CorruptError(f"report of rank {rank}: {repeated[0]!r} is named twice")
    replicated, mismatched = _agree_replicated(reports)
    items: list[Item] = []
    load = [0] * len(reports)
    for rank, report in enumerate(reports):
        for leaf in report.leaves:
            if leaf.name not in replicated:
                box = _box(f"{leaf.name}@rank{rank:05d}" if len(reports) > 1 else leaf.name, leaf)
                items.append(Item(box, rank, "local", leaf.name))
                load[rank] += box.size_bytes
    for leaf in sorted(replicated.values(), key=lambda leaf: (-_size_bytes(leaf), leaf.name)):
        owner = min(range(len(reports)), key=lambda rank: (load[rank], rank))
        items.append(Item(_box(leaf.name, leaf), owner, "replicated", leaf.name))
        load[owner] += _size_bytes(leaf)
    structures = list(dict.fromkeys(report.structure for report in reports))
    of_rank = tuple(structures.index(report.structure) for report in reports)
    if repeated := _repeated(item.box.name for item in items):
        raise UnsupportedStateError(f"{repeated[0]!r}: a rank's own copy of another tensor is kept under this name")
    plan = Plan(len(reports), tuple(items), tuple(structures), of_rank, tuple(sorted(mismatched)))
    check_cover(plan, "plan")
    return plan


def check_cover(plan: Plan, what: str) -> None:
    """Every leaf of every rank is covered exactly: no hole, no overlap, no name used twice.

    Raises:
        CorruptError: with the leaf's name.
    """
    # Blocks are whole tensors so far; a block of a part must bring a check of its own here.
    for item in plan.items:
        if item.box.offset != (0,) * len(item.box.shape) or item.box.shape != item.box.global_shape:
            raise CorruptError(f"{what}: {item.leaf!r} is not a whole tensor")
    # A leaf is either kept once for all, or by each rank for itself.
    shared = {item.leaf for item in plan.items if item.spread == "replicated"}
    repeated = _repeated(item.box.name for item in plan.items)
    repeated += [item.leaf for item in plan.items if item.spread == "local" and item.leaf in shared]
    if repeated:
        raise CorruptError(f"{what}: {repeated[0]!r} is kept twice")
    for rank in range(plan.world_size):
        kept = plan.sources(rank)
        for name in structure_leaves(plan.structure(rank)):
            if name not in kept:
                raise CorruptError(f"{what}: no rank keeps {name!r} of rank {rank}")


def structure_leaves(structure: str) -> list[str]:
    """Names of the tensors that a structure refers to, in order, each once."""
    names: dict[str, None] = {}
    pending = [parse_json(structure, "plan: a structure")]
    while pending:
        node = pending.pop()
        if type(node) is dict:
            if type(node.get("$tensor")) is str:
                names[node["$tensor"]] = None
            else:
                pending.extend(reversed(node.values()))
        elif type(node) is list:
            pending.extend(reversed(node))
    return list(names)


def _repeated(names: Iterable[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _agree_replicated(reports: Sequence[Report]) -> tuple[dict[str, Leaf], list[str]]:
    first: Mapping[str, Leaf] = {leaf.name: leaf for leaf in reports[0].leaves if leaf.spread == "replicated"}
    agreed = dict(first)
    claimed = set(first)
    for report in reports[1:]:
        mine = {leaf.name: leaf for leaf in report.leaves if leaf.spread == "replicated"}
        claimed |= set(mine)
        agreed = {name: leaf for name, leaf in agreed.items() if mine.get(name) == leaf}
    return agreed, [name for name in claimed if name not in agreed]


def _box(name: str, leaf: Leaf) -> Box:
    if leaf.dtype not in ITEM_BYTES:
        raise UnsupportedStateError(f"{leaf.name}: tensors of type {leaf.dtype} cannot be kept")
    if not is_tensor_name(leaf.name):
        raise UnsupportedStateError(f"{leaf.name!r} cannot be a tensor's name in a .safetensors file; rename it")
    return Box(name, leaf.dtype, leaf.shape, (0,) * len(leaf.shape), leaf.shape)


def _size_bytes(leaf: Leaf) -> int:
    return ITEM_BYTES.get(leaf.dtype, 0) * prod(leaf.shape)


def _item_from_json(data: Any, world_size: int, what: str) -> Item:
    if type(data) is not list or len(data) != 7:
        raise CorruptError(f"{what}: an item is not a list of seven fields")
    leaf, rank, spread, dtype, shape, offset, global_shape = data
    for lengths in (shape, offset, global_shape):
        _check_box(what, leaf, dtype, lengths)
    if type(rank) is not int or not 0 <= rank < world_size or spread not in get_args(Spread):
        raise CorruptError(f"{what}: item {leaf!r} names rank {rank!r}, spread {spread!r}")
    name = f"{leaf}@rank{rank:05d}" if spread == "local" and world_size > 1 else leaf
    return Item(Box(name, dtype, tuple(shape), tuple(offset), tuple(global_shape)), rank, spread, leaf)


def _check_box(what: str, name: Any, dtype: Any, lengths: Any) -> None:
    good = type(name) is str and type(dtype) is str and dtype in ITEM_BYTES and type(lengths) is list
    if good and not is_tensor_name(name):
        raise CorruptError(f"{what}: {name!r} cannot be a tensor's name")
    if not good or len(lengths) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in lengths):
        raise CorruptError(f"{what}: {name!r} has type {dtype!r} and shape {lengths!r}")
