"""A run's files, found and remade."""

from __future__ import annotations

from pathlib import Path

from surefoot.core.layout import BoundaryId, parse_commit
from surefoot.core.manifest import Generation, Parent


def commits(run: Path) -> list[BoundaryId]:
    found = [parse_commit(str(path.relative_to(run))) for path in run.glob("commits/*.json")]
    return sorted(at for at in found if at is not None)


def first(run: Path, pattern: str) -> Path:
    return sorted(run.glob(pattern))[0]


def shard_of(run: Path, step: int) -> Path:
    return first(run, f"steps/{BoundaryId(step, 1)}/*.safetensors")


def resealed(run: Path, number: int, parent_step: int | None) -> None:
    """Write the record of a generation that went on from a step of the first, or from scratch."""
    parent = None if parent_step is None else Parent(1, parent_step, committed=True)
    generation = Generation(number, "another", parent, 1, "elsewhere", 2.0)
    (run / generation.key).write_bytes(generation.to_bytes())
