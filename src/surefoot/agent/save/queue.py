"""Queues uploads: the steps on their way to being durable, the choice of the next one, and how each ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from surefoot.agent.memory.memory import ImageSet
from surefoot.core.documents import Fields
from surefoot.core.layout import BoundaryId
from surefoot.core.manifest import Shard
from surefoot.ipc.segment import Segment
from surefoot.ipc.wire import Body

_URGENCY = {"emergency": 0, "agent": 1, "final": 2, "manual": 2, "periodic": 3}
_PREEMPTS = 1
"""Urgency up to which an upload does not wait for an older, less urgent one."""
_ASKED_FOR = 2
"""Urgency of a save that the user asked for: none of those is given up for another."""
_OUTCOMES_KEPT = 32

Part = tuple[Segment, int, int]
"""Segment, slot, seq."""


@dataclass(slots=True, eq=False)
class Upload:
    """One step on its way to being durable."""

    at: BoundaryId
    trigger: str
    tag: str | None
    num_parts: int
    """Ranks of this node that take part."""
    name: str
    """The same on all nodes, and of no other upload."""
    parts: dict[int, Part] = field(default_factory=dict)
    """By rank."""
    shipped: dict[int, Shard] = field(default_factory=dict)
    """By rank: what lies on the tier, acknowledged."""
    attempt: int = 0
    not_before_s: float = 0.0
    committed: bool = False
    """What is left to do (copies, retention) must not make it be shipped again."""
    sending: tuple[float, int] | None = None
    """When the upload under way began, and with how many bytes to go."""

    @classmethod
    def of(cls, images: ImageSet, trigger: str, name: str) -> Upload:
        """An upload of images that are all here."""
        parts = {part.segment.rank: (part.segment, part.sealed.slot, part.sealed.seq) for part in images.parts}
        return cls(images.at, trigger, None, len(parts), name, parts)

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.num_parts

    @property
    def whole_here(self) -> bool:
        """Nothing is left to be done for it on this node, but to commit."""
        return len(self.shipped) == self.num_parts

    def left_s(self, bytes_per_s: float, now_s: float) -> float:
        """Until all of it is uploaded from here, over a link of that speed.

        A tier takes bytes before it has sent them, and does not report how many it has sent: the upload under way is
        assumed to be as far as the link could have carried it.
        """
        left_s = self.unshipped_bytes() / bytes_per_s
        if self.sending is None:
            return left_s
        begun_s, size_bytes = self.sending
        return min(left_s, max(0.0, size_bytes / bytes_per_s - (now_s - begun_s)))

    def unshipped_bytes(self) -> int:
        parts = [part for rank, part in self.parts.items() if rank not in self.shipped]
        return sum(segment.geometry.image_bytes for segment, _slot, _seq in parts)

    @property
    def preempts(self) -> bool:
        """It belongs to an eviction."""
        return _URGENCY[self.trigger] <= _PREEMPTS


@dataclass(frozen=True, slots=True)
class Order:
    """The step that one node has chosen for all nodes to ship."""

    at: BoundaryId
    plan: str
    trigger: str
    name: str
    replicas: tuple[tuple[int, str], ...] = ()
    """Ranks whose own machine does not answer, and the node that ships its second copy."""

    def to_json(self) -> Body:
        replicas = [list(pair) for pair in self.replicas]
        return {
            **self.at.to_json(),
            "plan": self.plan,
            "trigger": self.trigger,
            "name": self.name,
            "replicas": replicas,
        }

    @classmethod
    def from_json(cls, body: Body) -> Order:
        fields = Fields(body, "order to ship")
        replicas = tuple((int(rank), str(node)) for rank, node in fields.items("replicas"))
        return cls(BoundaryId.of(fields), fields.text("plan"), fields.text("trigger"), fields.text("name"), replicas)


class UploadQueue:
    """Those that wait, and the one that is worked on."""

    def __init__(self) -> None:
        self._waiting: list[Upload] = []
        self._favoured: BoundaryId | None = None
        self.running: Upload | None = None

    @property
    def waiting(self) -> list[Upload]:
        return list(self._waiting)

    def all(self) -> list[Upload]:
        running = [self.running] if self.running is not None else []
        return [*running, *self._waiting]

    def add(self, upload: Upload) -> None:
        self._waiting.append(upload)

    def remove(self, upload: Upload) -> None:
        """It waits no more, if it did."""
        if upload in self._waiting:
            self._waiting.remove(upload)

    def next(self) -> Upload | None:
        """The favoured one, else the most urgent whole one; of equally urgent ones the newest.

        Of those that somebody asked for the oldest: each needs every node's part, and if one node worked on it
        while another worked on an earlier one, both would wait for ever. All nodes have them in the same order.
        """
        ready = [upload for upload in self._waiting if upload.complete]
        return min(ready, key=self._turn, default=None)

    def _turn(self, upload: Upload) -> tuple[bool, int, int]:
        urgency, number = _URGENCY[upload.trigger], upload.at.boundary
        return upload.at != self._favoured, urgency, number if urgency == _ASKED_FOR else -number

    def favour(self, at: BoundaryId) -> None:
        """That step comes before all others, until it has failed once."""
        self._favoured = at

    def failed(self, upload: Upload) -> None:
        """It waits to be tried again, as urgent as its like."""
        if upload.at == self._favoured:
            self._favoured = None
        self.add(upload)

    def overtaken(self, newer: Upload) -> list[Upload]:
        """Whole periodic ones that wait while a newer one is whole: they would only hold slots that training needs,
        and keep other nodes, which may be at work on them, waiting. What gives way to an eviction's is decided by all
        nodes together (`core.eviction.unfit`)."""
        if newer.preempts:
            return []
        older = [d for d in self._waiting if d.trigger == "periodic" and d.at < newer.at]
        return [upload for upload in older if upload.complete and not upload.committed]

    def urgent(self) -> bool:
        """True if one that belongs to an eviction waits."""
        return any(upload.preempts and upload.complete for upload in self._waiting)

    def incomplete(self, at: BoundaryId, trigger: str) -> Upload | None:
        """The one that still lacks ranks' images of that step."""
        found = (d for d in self._waiting if d.at == at and d.trigger == trigger and not d.complete)
        return next(found, None)

    def uploading(self, at: BoundaryId) -> bool:
        return any(upload.at == at for upload in self.all())


class Outcomes:
    """By step: None if it was committed, or why it was not."""

    def __init__(self) -> None:
        self._known: dict[BoundaryId, str | None] = {}
        self._waiters: dict[BoundaryId, list[asyncio.Future[str | None]]] = {}

    def of(self, at: BoundaryId) -> str | None:
        """How the last uploads of a step ended that nobody is at work on any more."""
        return self._known.get(at, f"{at.label} is not being saved")

    def wait(self, at: BoundaryId) -> asyncio.Future[str | None]:
        """Resolve when that step's upload, which is under way, ends."""
        future: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(at, []).append(future)
        return future

    def resolve(self, at: BoundaryId, outcome: str | None) -> None:
        self._known[at] = outcome
        for old in list(self._known)[:-_OUTCOMES_KEPT]:
            del self._known[old]
        for future in self._waiters.pop(at, []):
            if not future.done():
                future.set_result(outcome)
