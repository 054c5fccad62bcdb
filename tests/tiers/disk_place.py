"""Directories, seen past the disk tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.tiers.base import Tier
from surefoot.tiers.open import open_disks


class DiskPlace:
    """One or several drives."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    def open(self) -> Tier:
        tier = open_disks(self.roots)
        assert tier is not None
        return tier

    def read(self, key: str) -> bytes | None:
        found = [root / key for root in self.roots if (root / key).exists()]
        assert len(found) < 2
        return found[0].read_bytes() if found else None

    def everything(self) -> list[str]:
        return sorted(
            str(path.relative_to(root))
            for root in self.roots
            for path in root.rglob("*")
            if not path.is_dir() or path.is_symlink()
        )

    def seed(self, keys: list[str]) -> None:
        for key in keys:
            path = self.roots[0] / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"1")
