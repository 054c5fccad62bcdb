"""A program that writes to one tier after another and is killed at every system call of it.

    python killed_writer.py ROOT STORY

For n = 0, 1, 2, … and for "before" and "after" the call a child process works in ROOT/n-before or ROOT/n-after, where
an older object lies already, and ends at its n-th call. Stops at the n that no child reaches; prints it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from contract import SHARD, aligned, chunked, noise
from faulty_syscalls import DeadlySyscalls

from surefoot.tiers.base import Tier
from surefoot.tiers.disk import DiskTier

NEW = noise(9_000_001, seed=7)
OLD = noise(5_000, seed=8)
NEW_RECORD = b"new"
RECORD = "generations/g0002.json"


async def overwrite(tier: Tier) -> None:
    await tier.put_stream(SHARD, chunked(aligned(NEW)), len(NEW))


async def claim(tier: Tier) -> None:
    await tier.put_if_absent(RECORD, NEW_RECORD)


STORIES = {"overwrite": overwrite, "claim": claim}


def killed(root: Path, story: str, number: int, *, done: bool) -> bool:
    """Whether a child that works in `root` reached its `number`-th call, and so died there."""
    (root / SHARD).parent.mkdir(parents=True)
    (root / SHARD).write_bytes(OLD)
    child = os.fork()
    if not child:
        asyncio.run(STORIES[story](DiskTier(root, syscalls=DeadlySyscalls(number, done=done))))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def main(root: Path, story: str) -> None:
    number = 0
    while all(
        [
            killed(root / f"{number}-before", story, number, done=False),
            killed(root / f"{number}-after", story, number, done=True),
        ]
    ):
        number += 1
    print(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
