"""A run, or one checkpoint of it, in detail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.core.documents import compact, parse_json
from surefoot.core.frozen import FrozenFile
from surefoot.core.manifest import Generation, Manifest, Parent
from surefoot.core.plan import Plan
from surefoot.inspect.checkpoints import Checkpoint, usable
from surefoot.inspect.frozen import needed_files
from surefoot.inspect.readable import leaves, readable
from surefoot.inspect.survey import Survey

_NOT_VALUES = (
    "boundary",
    "step",
    "epoch",
    "generation",
    "rank",
    "world_size",
    "trigger",
    "tag",
    "metrics",
    "values",
    "frozen",
)
"""Fields of a record that are shown elsewhere, and the values, which the plan's structure names."""


@dataclass(frozen=True, slots=True)
class RunDetail:
    """A run as a whole."""

    found: Survey
    newest: Checkpoint | None
    """Newest verified checkpoint on the lineage."""
    checkpoints: int
    """How many there are that count."""
    size_bytes: int
    """All shards of the run, given-up and unfinished ones too."""
    frozen_bytes: int
    """Its frozen files, each once."""
    newest_age_s: float | None
    """Seconds since the newest one was committed. What it holds is older by the time that copying and shipping took."""

    def to_json(self) -> dict[str, Any]:
        run = self.found.run
        return {
            "uri": self.found.uri,
            "run": run and run.run,
            "created": run and run.created,
            "generations": [
                _generation(self.found.generations[number], self.found) for number in sorted(self.found.generations)
            ],
            "newest": self.newest and self.newest.to_json(),
            "newest_age_s": self.newest_age_s,
            "checkpoints": self.checkpoints,
            "bytes": self.size_bytes,
            "frozen_bytes": self.frozen_bytes,
        }


@dataclass(frozen=True, slots=True)
class Value:
    """One plain value that is kept."""

    rank: int | None
    """None: the same on all ranks."""
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class StepDetail:
    """One checkpoint."""

    row: Checkpoint
    manifest: Manifest
    plan: Plan | None
    """None if it cannot be read."""

    def tensors(self) -> list[dict[str, Any]]:
        """What the plan keeps, biggest first. Without the plan: nothing."""
        items = sorted(self.plan.items, key=lambda i: (-i.box.size_bytes, i.box.name)) if self.plan is not None else []
        return [
            {
                "name": item.box.name,
                "dtype": item.box.dtype,
                "shape": list(item.box.shape),
                "bytes": item.box.size_bytes,
                "rank": item.rank,
                "spread": item.spread,
                "frozen": item.frozen,
            }
            for item in items
        ]

    def values(self) -> list[Value]:
        """Plain values in a readable form; those that are the same on all ranks once."""
        by_path: dict[str, dict[int, Any]] = {}
        for shard in self.manifest.shards:
            for path, leaf in _values(shard.id.rank, shard.record, self.plan):
                by_path.setdefault(path, {})[shard.id.rank] = leaf
        return [value for path, of in by_path.items() for value in _merged(path, of, self.manifest.world_size)]

    @property
    def frozen(self) -> tuple[FrozenFile, ...]:
        """The frozen files that it names."""
        return needed_files(self.manifest)

    def to_json(self) -> dict[str, Any]:
        manifest = self.manifest
        return {
            **self.row.to_json(),
            "launch": manifest.launch,
            "parent": _parent(manifest.parent),
            "retired": manifest.retired,
            "plan": manifest.plan,
            "tensors": self.tensors(),
            "values": [{"rank": v.rank, "path": v.path, "value": v.text} for v in self.values()],
            "shards": [
                {"rank": s.id.rank, "path": s.key, "bytes": s.size_bytes, "xxh3_128": s.xxh3_128}
                for s in manifest.shards
            ],
            "frozen": [{"path": f.key, "bytes": f.size_bytes, "xxh3_128": f.xxh3_128} for f in self.frozen],
        }


def run_detail(found: Survey, rows: list[Checkpoint], now: float) -> RunDetail:
    """The run as a whole.

    Args:
        found: the survey.
        rows: its checkpoints, newest first.
        now: seconds since the epoch.
    """
    live = usable(rows)
    newest = next((row for row in live if row.verified), None)
    age_s = None if newest is None or newest.created is None else max(0.0, now - newest.created)
    size_bytes = sum(found.attempts().values())
    return RunDetail(found, newest, len(live), size_bytes, sum(found.frozen.values()), age_s)


def _generation(generation: Generation, found: Survey) -> dict[str, Any]:
    cut = None if found.chain is None else found.chain.get(generation.number)
    return {
        "generation": generation.number,
        "parent": _parent(generation.parent),
        "launch": generation.launch,
        "node": generation.node,
        "world_size": generation.world_size,
        "time": generation.created,
        "on_lineage": None if found.chain is None else generation.number in found.chain,
        "counts_to_boundary": int(cut) if cut is not None and cut != float("inf") else None,
    }


def _parent(parent: Parent | None) -> dict[str, Any] | None:
    return None if parent is None else parent.to_json()


def _values(rank: int, record: Mapping[str, Any], plan: Plan | None) -> Iterator[tuple[str, Any]]:
    values = record.get("values")
    if type(values) is list:
        names = _names(plan.structure(rank)) if plan is not None and rank < plan.world_size else {}
        for index, value in enumerate(values):
            yield from leaves(value, names.get(index, f"value {index}"))
    for name, value in record.items():
        if name not in _NOT_VALUES:
            yield from leaves(value, name)


def _names(structure: str) -> dict[int, str]:
    """Where each value stands in a structure."""
    names: dict[int, str] = {}
    pending: list[tuple[str, Any]] = [("", parse_json(structure, "plan: a structure"))]
    while pending:
        path, node = pending.pop()
        if type(node) is not dict:
            continue
        if type(node.get("$value")) is int:
            names[node["$value"]] = path
        pending += [(_joined(path, key), child) for key, child in node.get("$dict", [])]
        pending += [(f"{path}[{index}]", child) for index, child in enumerate(node.get("$list", []))]
    return names


def _joined(path: str, key: Any) -> str:
    text = key if type(key) is str else str(key)
    return f"{path}.{text}" if path else text


def _merged(path: str, leaf_of_rank: Mapping[int, Any], world_size: int) -> list[Value]:
    # Compared whole: the text of a long value does not show all of it.
    if len(leaf_of_rank) == world_size and len({compact(leaf) for leaf in leaf_of_rank.values()}) == 1:
        return [Value(None, path, readable(leaf_of_rank[0]))]
    return [Value(rank, path, readable(leaf)) for rank, leaf in sorted(leaf_of_rank.items())]
