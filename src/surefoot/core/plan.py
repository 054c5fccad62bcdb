"""The plan: which block of which tensor is kept by which rank.

Made from what every rank reports, by a pure function, once per structure; every agent that sees the same reports
makes the same plan. It is an object of the run (`plans/<hash>.json`) and stands in shared memory, so that an image
can be read without the bucket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, TypeVar, get_args

from surefoot.core.cover import cover_flaw
from surefoot.core.documents import Fields, compact, digest, parse_json
from surefoot.core.dtypes import ITEM_BYTES, SAFETENSORS_NAME
from surefoot.core.image import Box, Image, build_image, is_tensor_name
from surefoot.errors import CorruptError, UnsupportedStateError

Spread = Literal["replicated", "local", "sharded"]
"""`replicated`: equal on all ranks, kept once. `local`: each rank keeps its own. `sharded`: each rank has one block of
a larger tensor; blocks that several ranks have are kept once."""

MAX_DIMENSIONS = 64
_Name = TypeVar("_Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor as one rank reports it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: Spread
    digest: str = ""
    """Hash of its bytes, for what other ranks claim to have too: the claim is checked, not believed."""
    offset: tuple[int, ...] = ()
    """Of a sharded leaf: where its block begins in the whole tensor."""
    global_shape: tuple[int, ...] = ()
    """Of a sharded leaf: the whole tensor's shape."""
    frozen: bool = False
    """Never changes: kept once, outside the slots. It stays so only if every rank that has it reports it so."""

    def to_json(self) -> list[Any]:
        place = [list(self.offset), list(self.global_shape)]
        return [self.name, self.dtype, list(self.shape), self.spread, self.digest, *place, self.frozen]

    @classmethod
    def from_json(cls, data: Any) -> Leaf:
        if type(data) is not list or len(data) != 8:
            raise CorruptError("report: a leaf is not a list of eight fields")
        name, dtype, shape, spread, leaf_digest, offset, global_shape, frozen = data
        for lengths in (shape, offset, global_shape):
            _check_box("report", name, dtype, lengths)
        if spread not in get_args(Spread) or type(leaf_digest) is not str or type(frozen) is not bool:
            raise CorruptError(f"report: leaf {name!r} has spread {spread!r}, frozen {frozen!r}")
        return cls(name, dtype, tuple(shape), spread, leaf_digest, tuple(offset), tuple(global_shape), frozen)


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's registered state: its tensors, and the structure that holds them and the plain values."""

    leaves: tuple[Leaf, ...]
    structure: str
    """JSON text of the tree (see `surefoot.trainer.state.flatten`)."""

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
    frozen: bool = False
    """It lies in the rank's frozen file, not in its image."""


@dataclass(frozen=True, slots=True)
class _Shared:
    """What any of several ranks could keep for all of them."""

    leaf: Leaf
    spread: Spread
    holders: Sequence[int]


@dataclass(frozen=True)
class Plan:
    """Who keeps what. Immutable; identified by the hash of its body."""

    world_size: int
    items: tuple[Item, ...]
    structures: tuple[str, ...]
    """Distinct structures."""
    structure_of_rank: tuple[int, ...]
    mismatched: tuple[str, ...] = field(default=(), compare=False)
    """Leaves claimed to be the same on several ranks whose bytes differed: kept by each rank. Not part of the hash."""
    replicas: tuple[tuple[int, int], ...] = ()
    """A rank whose image has a second copy in memory, and the rank that keeps it (see `surefoot.core.replicas`)."""

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
            **({"frozen": frozen} if (frozen := [n for n, item in enumerate(self.items) if item.frozen]) else {}),
            **({"replicas": [list(pair) for pair in self.replicas]} if self.replicas else {}),
        }

    @cached_property
    def hash(self) -> str:
        return digest(compact(self.body))

    def image(self, rank: int) -> Image:
        """Layout of a rank's image; may hold no tensor at all. Laid out once."""
        if rank not in self._images:
            boxes = [item.box for item in self.kept_by(rank) if not item.frozen]
            self._images[rank] = build_image(boxes, self.hash, rank)
        return self._images[rank]

    def frozen_image(self, rank: int) -> Image | None:
        """Layout of a rank's frozen file; None if it has none.

        Its bytes name neither plan nor rank: the same tensors make the same file whatever is planned beside them.
        """
        boxes = [item.box for item in self.kept_by(rank) if item.frozen]
        return build_image(boxes, None, rank) if boxes else None

    def structure(self, rank: int) -> str:
        return self.structures[self.structure_of_rank[rank]]

    def sources(self, rank: int) -> dict[str, Item]:
        """For one rank, by leaf name: the item that holds that leaf for it. Sharded leaves are in `blocks`."""
        return {**self.replicated, **self.own(rank)}

    def kept_by(self, rank: int) -> Sequence[Item]:
        """What a rank keeps, for itself and for others, in the plan's order."""
        return self._by_rank.get(rank, ())

    def replicas_kept_by(self, holder: int) -> Sequence[int]:
        """The ranks of whose images a rank keeps a second copy, ascending."""
        return self._replicas_by_holder.get(holder, ())

    @cached_property
    def holders(self) -> dict[int, int]:
        """By rank, the rank that keeps a second copy of its image."""
        return dict(self.replicas)

    @cached_property
    def _replicas_by_holder(self) -> dict[int, list[int]]:
        by_holder: dict[int, list[int]] = {}
        for rank, holder in sorted(self.replicas):
            by_holder.setdefault(holder, []).append(rank)
        return by_holder

    def own(self, rank: int) -> dict[str, Item]:
        """What a rank keeps for itself only, by leaf name."""
        return {item.leaf: item for item in self.kept_by(rank) if item.spread == "local"}

    @cached_property
    def replicated(self) -> dict[str, Item]:
        """What is kept once for all ranks, by leaf name."""
        return {item.leaf: item for item in self.items if item.spread == "replicated"}

    @cached_property
    def _images(self) -> dict[int, Image]:
        return {}

    @cached_property
    def _by_rank(self) -> dict[int, list[Item]]:
        # Looked through once: a caller that asks for every rank's share would otherwise go through all items for each.
        by_rank: dict[int, list[Item]] = {}
        for item in self.items:
            by_rank.setdefault(item.rank, []).append(item)
        return by_rank

    @cached_property
    def blocks(self) -> dict[str, list[Item]]:
        """All blocks of each sharded leaf, by its name."""
        blocks: dict[str, list[Item]] = {}
        for item in self.items:
            if item.spread == "sharded":
                blocks.setdefault(item.leaf, []).append(item)
        return blocks

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
        frozen = set(fields.integers("frozen") if "frozen" in fields.body else ())
        items = tuple(
            _item_from_json(data, world_size, number in frozen, what)
            for number, data in enumerate(fields.items("items"))
        )
        if frozen and max(frozen) >= len(items):
            raise CorruptError(f"{what}: item {max(frozen)} is said to be frozen, there are {len(items)}")
        replicas = _replicas_from_json(fields.items("replicas") if "replicas" in fields.body else [], world_size, what)
        plan = cls(world_size, items, tuple(structures), of_rank, replicas=replicas)
        check_cover(plan, what)
        return plan


def make_plan(reports: Sequence[Report]) -> Plan:
    """The plan for `len(reports)` ranks; `reports[r]` is rank r's.

    What several ranks have gets one owner among them, largest first, always the rank with the fewest bytes so far:
    balanced and the same wherever it is computed.

    Raises:
        UnsupportedStateError: a leaf, named in the message, cannot be checkpointed, or its blocks do not make it up.
    """
    for rank, report in enumerate(reports):
        if repeated := _repeated(leaf.name for leaf in report.leaves):
            raise CorruptError(f"report of rank {rank}: {repeated[0]!r} is named twice")
    reports = _agree_frozen(reports)
    replicated, mismatched = _agree_replicated(reports)
    blocks, differing = _agree_blocks(reports)
    items: list[Item] = []
    # Weighed apart, so that the frozen files stay what they are when anything else is planned anew.
    load = {frozen: [0] * len(reports) for frozen in (False, True)}
    for rank, report in enumerate(reports):
        for leaf in report.leaves:
            if leaf.name not in replicated and leaf.name not in blocks:
                item = _item(leaf, rank, "local", len(reports))
                items.append(item)
                load[leaf.frozen][rank] += item.box.size_bytes
    shared = [_Shared(leaf, "replicated", range(len(reports))) for leaf in replicated.values()]
    shared += [_Shared(block.leaf, "sharded", block.holders) for of_leaf in blocks.values() for block in of_leaf]
    for one in sorted(shared, key=lambda one: (-_size_bytes(one.leaf), one.leaf.name, one.leaf.offset)):
        so_far = load[one.leaf.frozen]
        owner = min(one.holders, key=so_far.__getitem__)
        items.append(_item(one.leaf, owner, one.spread, len(reports)))
        so_far[owner] += _size_bytes(one.leaf)
    mismatched += differing
    structures = list(dict.fromkeys(report.structure for report in reports))
    numbers = {structure: number for number, structure in enumerate(structures)}
    of_rank = tuple(numbers[report.structure] for report in reports)
    plan = Plan(len(reports), tuple(items), tuple(structures), of_rank, tuple(sorted(mismatched)))
    if repeated := _kept_twice(plan):
        raise UnsupportedStateError(f"{repeated[0]!r}: a rank's own copy of another tensor is kept under this name")
    check_cover(plan, "plan")
    return plan


def check_cover(plan: Plan, what: str) -> None:
    """Every leaf of every rank is covered exactly: no hole, no overlap, no name used twice.

    Raises:
        CorruptError: with the leaf's name.
    """
    for item in plan.items:
        if item.spread != "sharded" and not _is_whole(item.box):
            raise CorruptError(f"{what}: {item.leaf!r} is not a whole tensor")
    for name, blocks in plan.blocks.items():
        if (flaw := cover_flaw([item.box for item in blocks])) is not None:
            raise CorruptError(f"{what}: {name!r}: {flaw}")
    if repeated := _kept_twice(plan):
        raise CorruptError(f"{what}: {repeated[0]!r} is kept twice")
    # A leaf that no rank keeps for all, each rank must keep for itself; looked up once per structure, not per rank.
    apart = [_not_for_all(plan, structure) for structure in plan.structures]
    for rank in range(plan.world_size):
        if names := apart[plan.structure_of_rank[rank]]:
            own = plan.own(rank)
            if missing := [name for name in names if name not in own]:
                raise CorruptError(f"{what}: no rank keeps {missing[0]!r} of rank {rank}")


def _not_for_all(plan: Plan, structure: str) -> list[str]:
    names = structure_leaves(structure)
    return [name for name in names if name not in plan.replicated and name not in plan.blocks]


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


def _is_whole(box: Box) -> bool:
    return box.offset == (0,) * len(box.shape) and box.shape == box.global_shape


def _kept_twice(plan: Plan) -> list[str]:
    # A leaf is kept once for all, or in blocks, or by each rank for itself.
    leaves = {spread: {item.leaf for item in plan.items if item.spread == spread} for spread in get_args(Spread)}
    mixed = leaves["replicated"] & leaves["local"] | leaves["sharded"] & (leaves["replicated"] | leaves["local"])
    # The blocks of one leaf share its name, each in a file of its own; nothing else shares one.
    blocks = [item for item in plan.items if item.spread == "sharded"]
    names = [item.box.name for item in plan.items if item.spread != "sharded"]
    names += [name for name, _leaf in {(item.box.name, item.leaf) for item in blocks}]
    in_one_file = _repeated((item.box.name, item.rank) for item in blocks)
    return [*_repeated(names), *(name for name, _rank in in_one_file), *sorted(mixed)]


def _repeated(names: Iterable[_Name]) -> list[_Name]:
    return [name for name, count in Counter(names).items() if count > 1]


def _agree_frozen(reports: Sequence[Report]) -> list[Report]:
    """The same reports, with a leaf frozen only if every rank that has it reports it so."""
    moving = {leaf.name for report in reports for leaf in report.leaves if not leaf.frozen}
    return [
        replace(
            report,
            leaves=tuple(
                replace(leaf, frozen=False) if leaf.frozen and leaf.name in moving else leaf for leaf in report.leaves
            ),
        )
        for report in reports
    ]


def _agree_replicated(reports: Sequence[Report]) -> tuple[dict[str, Leaf], list[str]]:
    first: Mapping[str, Leaf] = {leaf.name: leaf for leaf in reports[0].leaves if leaf.spread == "replicated"}
    agreed = dict(first)
    claimed = set(first)
    for report in reports[1:]:
        mine = {leaf.name: leaf for leaf in report.leaves if leaf.spread == "replicated"}
        claimed |= set(mine)
        agreed = {name: leaf for name, leaf in agreed.items() if mine.get(name) == leaf}
    return agreed, [name for name in claimed if name not in agreed]


def _agree_blocks(reports: Sequence[Report]) -> tuple[dict[str, list[_Shared]], list[str]]:
    """The blocks to keep of each sharded leaf, and the leaves of which ranks have different copies of one block."""
    found: dict[str, dict[tuple[Any, ...], list[tuple[int, Leaf]]]] = {}
    for rank, report in enumerate(reports):
        for leaf in report.leaves:
            if leaf.spread == "sharded":
                found.setdefault(leaf.name, {}).setdefault((leaf.offset, leaf.shape), []).append((rank, leaf))
    otherwise = {leaf.name for report in reports for leaf in report.leaves if leaf.spread != "sharded"}
    if mixed := sorted(otherwise & set(found)):
        raise UnsupportedStateError(f"{mixed[0]}: is sharded on some ranks, and not on others")
    differing = [name for name, blocks in found.items() if any(_differ(claims) for claims in blocks.values())]
    agreed = {name: _worth_keeping(name, blocks) for name, blocks in found.items() if name not in differing}
    return agreed, differing


def _differ(claims: list[tuple[int, Leaf]]) -> bool:
    # Without a hash there is no proof that several ranks have the same.
    first = claims[0][1]
    return len(claims) > 1 and prod(first.shape) > 0 and any(leaf != first or not leaf.digest for _rank, leaf in claims)


def _worth_keeping(name: str, blocks: Mapping[tuple[Any, ...], list[tuple[int, Leaf]]]) -> list[_Shared]:
    shared = [_Shared(claims[0][1], "sharded", [rank for rank, _leaf in claims]) for claims in blocks.values()]
    # An empty block is none, unless the whole is empty.
    worth = [one for one in shared if prod(one.leaf.shape)] or shared[:1]
    flaw = cover_flaw([_item(one.leaf, 0, "sharded", 1).box for one in worth])
    if flaw is not None:
        raise UnsupportedStateError(f"{name}: {flaw}: such a sharding cannot be checkpointed")
    return worth


def _item(leaf: Leaf, rank: int, spread: Spread, world_size: int) -> Item:
    if leaf.dtype not in ITEM_BYTES:
        raise UnsupportedStateError(f"{leaf.name}: tensors of type {leaf.dtype} cannot be checkpointed")
    if not is_tensor_name(leaf.name):
        raise UnsupportedStateError(f"{leaf.name!r} cannot be a tensor's name in a .safetensors file; rename it")
    offset, whole = ((0,) * len(leaf.shape), leaf.shape)
    if spread == "sharded":
        offset, whole = leaf.offset, leaf.global_shape
    name = _box_name(leaf.name, leaf.dtype, rank, spread, world_size)
    return Item(Box(name, leaf.dtype, leaf.shape, offset, whole), rank, spread, leaf.name, leaf.frozen)


def _box_name(leaf: str, dtype: str, rank: int, spread: Spread, world_size: int) -> str:
    """Marked with the rank where stock readers must not put blocks of one name together."""
    apart = spread == "local" or (spread == "sharded" and dtype not in SAFETENSORS_NAME)
    return f"{leaf}@rank{rank:05d}" if apart and world_size > 1 else leaf


def _size_bytes(leaf: Leaf) -> int:
    return ITEM_BYTES.get(leaf.dtype, 0) * prod(leaf.shape)


def _item_from_json(data: Any, world_size: int, frozen: bool, what: str) -> Item:
    if type(data) is not list or len(data) != 7:
        raise CorruptError(f"{what}: an item is not a list of seven fields")
    leaf, rank, spread, dtype, shape, offset, global_shape = data
    for lengths in (shape, offset, global_shape):
        _check_box(what, leaf, dtype, lengths)
    if type(rank) is not int or not 0 <= rank < world_size or spread not in get_args(Spread):
        raise CorruptError(f"{what}: item {leaf!r} names rank {rank!r}, spread {spread!r}")
    name = _box_name(leaf, dtype, rank, spread, world_size)
    return Item(Box(name, dtype, tuple(shape), tuple(offset), tuple(global_shape)), rank, spread, leaf, frozen)


def _replicas_from_json(data: list[Any], world_size: int, what: str) -> tuple[tuple[int, int], ...]:
    for pair in data:
        if type(pair) is not list or len(pair) != 2 or any(type(n) is not int or not 0 <= n < world_size for n in pair):
            raise CorruptError(f"{what}: a replica is {pair!r}, of {world_size} ranks")
    if any(rank == holder for rank, holder in data) or _repeated(rank for rank, _holder in data):
        raise CorruptError(f"{what}: a rank is its own replica's holder, or has two")
    return tuple((rank, holder) for rank, holder in data)


def _check_box(what: str, name: Any, dtype: Any, lengths: Any) -> None:
    good = type(name) is str and type(dtype) is str and dtype in ITEM_BYTES and type(lengths) is list
    if good and not is_tensor_name(name):
        raise CorruptError(f"{what}: {name!r} cannot be a tensor's name")
    if not good or len(lengths) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in lengths):
        raise CorruptError(f"{what}: {name!r} has type {dtype!r} and shape {lengths!r}")
