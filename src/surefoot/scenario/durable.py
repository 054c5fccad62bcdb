"""What a store holds, asked while nothing of the job runs."""

from __future__ import annotations

from collections.abc import Collection

from surefoot.core.layout import BoundaryId
from surefoot.records.records import Records
from surefoot.tiers.open import open_tier


async def newest_durable(uri: str, damaged: Collection[BoundaryId] = ()) -> int:
    """Newest committed step, 0 if there is none.

    Args:
        uri: the run.
        damaged: steps that do not count.
    """
    records = Records(open_tier(uri))
    try:
        for at in reversed(await records.commits()):
            if at not in damaged and (manifest := await records.manifest(at)) is not None:
                return manifest.at.step or 0
        return 0
    finally:
        await records.tier.close()
