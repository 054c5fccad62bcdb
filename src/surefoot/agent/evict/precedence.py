"""Decides, the same on all nodes, whether an older upload is finished before an eviction's newest step.

Nodes that decided alone could each finish another step, and none would be whole. So each sends a report of its uploads
as soon as it has its part of the newest step, and decides from all reports by `core.eviction.unfit`.
"""

from __future__ import annotations

import asyncio

from surefoot.agent.journal import Journal
from surefoot.agent.nodes.membership import Membership
from surefoot.core.documents import Fields
from surefoot.core.eviction import UploadReport, unfit
from surefoot.core.layout import BoundaryId
from surefoot.errors import SurefootError
from surefoot.ipc.wire import Body

_REPORTED_WITHIN_S = 2.0
"""For the other nodes to have their parts of the newest step, too. The upload under way goes on meanwhile."""


async def goes_first(
    membership: Membership, journal: Journal, name: str, newest: BoundaryId, mine: UploadReport
) -> BoundaryId | None:
    """The step to finish before an eviction's newest; None if none, or if not all nodes report in time.

    A node that gets no answer in time takes the newest step first. It gives up what it interrupts, so that the others,
    should they have decided otherwise, go on to the newest step as well.

    Args:
        membership: the nodes.
        journal: of this node.
        name: of the newest step's upload, the same on all nodes.
        newest: that step.
        mine: what this node reports.
    """
    try:
        async with asyncio.timeout(_REPORTED_WITHIN_S):
            brought = await membership.gather(f"uploads beside {name}", _to_json(mine))
        found = unfit({node: _from_json(body) for node, body in zip(membership.nodes, brought, strict=True)})
    except (TimeoutError, SurefootError) as error:
        why = str(error) or "not all nodes have reported their uploads in time"
        journal.record("warning", what=f"{newest.label} goes first: {why}")
        return None
    if found is None:
        return None
    if found.slowest == membership.me:
        needed_s, left_s = round(found.needed_s, 3), round(found.left_s, 3)
        first = found.first and found.first.step
        journal.record("unfit", **newest.names, needed_s=needed_s, left_s=left_s, first=first)
    return found.first


def _to_json(uploads: UploadReport) -> Body:
    older = [{**at.to_json(), "left_s": left_s} for at, left_s in uploads.older_s.items()]
    return {"newest_s": uploads.newest_s, "left_s": uploads.left_s, "older": older}


def _from_json(body: Body) -> UploadReport:
    fields = Fields(body, "report of uploads")
    older = [Fields(one, "upload") for one in fields.items("older")]
    older_s = {BoundaryId.of(one): one.number("left_s") for one in older}
    return UploadReport(fields.optional_number("newest_s"), fields.optional_number("left_s"), older_s)
