"""Reads a run's frozen files: which ones a checkpoint needs, and whether their bytes match their names."""

from __future__ import annotations

from surefoot.core.frozen import FrozenFile, files_of
from surefoot.core.image import Image
from surefoot.core.manifest import Manifest
from surefoot.core.plan import Plan
from surefoot.errors import CorruptError
from surefoot.inspect.progress import Progress
from surefoot.inspect.shards import check_bytes
from surefoot.tiers.base import Tier


def needed_files(manifest: Manifest) -> tuple[FrozenFile, ...]:
    """The frozen files that a checkpoint needs; none if its records are unreadable, which is reported elsewhere."""
    try:
        return files_of(manifest)
    except CorruptError:
        return ()


def image_of(file: FrozenFile, manifest: Manifest, plan: Plan | None) -> Image | None:
    """The layout that a checkpoint's plan gives a frozen file; None if that is unknown."""
    if plan is None or plan.world_size != manifest.world_size:
        return None
    of_rank = (shard.id.rank for shard in manifest.shards if shard.record.get("frozen") == file.to_json())
    rank = next(of_rank, None)
    return None if rank is None else plan.frozen_image(rank)


async def check_frozen(tier: Tier, file: FrozenFile, image: Image | None, progress: Progress) -> None:
    """Read a frozen file through.

    Raises:
        CorruptError: with what is wrong.
        ObjectMissingError: it is not there.
        TierError: the tier failed to answer.
    """
    if image is not None and image.size_bytes != file.size_bytes:
        raise CorruptError(f"has {file.size_bytes} bytes, its plan needs {image.size_bytes}")
    header = image.header if image is not None else b""
    await check_bytes(tier, file.key, file.size_bytes, file.xxh3_128, header, progress)
