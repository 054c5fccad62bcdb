"""Frozen tensors, the trainer's part: hashed behind the training, shown to the agent in pieces, compared at a start.

One thread does it all, and gives way to those that train. Nothing larger than the agent's window is ever copied.

A record names the file if both of these hold:

1. the bytes were hashed, and no version counter has moved since before that: every boundary looks at the counters;
2. they were hashed again, and were the same: one more step later, or at the boundary of an image that must count.

Then they are hashed again every few minutes, and before a last step or a save with a tag. A leaf whose bytes changed
although its counter stood still is given up; the event `frozen_changed` has the time at which they were last right.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, needed_by
from surefoot.core.plan import Item, Plan
from surefoot.errors import AgentError, CorruptError
from surefoot.host.clock import boot_s, wall_s
from surefoot.host.priority import give_way
from surefoot.ipc.wire import Body
from surefoot.trainer.frozen.bytes import Contents, Hashed, Placed
from surefoot.trainer.frozen.leaves import FrozenLeaves, Stamp, stamp
from surefoot.trainer.state.flatten import Flat, NamedTensor, dtype_name

AGAIN_EVERY_S = 300.0
_CONFIRM_AT_LOOK = 2
"""Between two looks lies a whole step, in which the script does everything that it does per step."""


class _Closed(Exception):  # noqa: N818 - not an error: the way out of a long reading
    """The run is being left."""


class Frozen:
    """One trainer's frozen tensors."""

    def __init__(
        self, warn: Callable[[str], None], tell: Callable[[Body], None], again_every_s: float = AGAIN_EVERY_S
    ) -> None:
        self._warn = warn
        self._tell = tell
        self._again_every_s = again_every_s
        self._leaves = FrozenLeaves(warn)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._all: dict[str, NamedTensor] = {}
        """Every leaf, while a checkpoint is being chosen."""
        self._offered: dict[int, Contents] = {}
        """Files of the checkpoint that is being looked at, by saved rank."""
        self._torn: set[str] = set()
        """Leaves into which a copy was written that has not proved good."""
        self._digests: dict[str, tuple[Stamp, str]] = {}
        self._replacing = threading.Lock()
        """Held to replace the contents together with their hashes, which belong to them."""
        self._contents: Contents | None = None
        self._hashed: Hashed | None = None
        """The hashes of the contents; None until the contents were read through."""
        self._right_s = 0.0
        """Wall time at which the contents were last seen to match their hash."""
        self._confirmed: Hashed | None = None
        """The hashes that a second reading confirmed."""
        self._looks = 0
        """Boundaries since the contents were hashed at which no counter had moved."""
        self._identified = threading.Event()
        self._identified.set()
        self._vouched: FrozenFile | None = None

    # ------------------------------------------------------------------ called by the training thread

    def open(self, flat: Flat) -> None:
        """Take the state as the script made it, for the agent's questions until `begin`."""
        self._all = {named.name: named for named in flat.tensors}

    @property
    def found(self) -> dict[str, Any]:
        """The leaves as the script made them, by name, until `begin`."""
        return {name: named.tensor for name, named in self._all.items()}

    def refuse_torn(self, plan: Plan | None, of_rank: int) -> None:
        """Check, after loading, that every leaf into which a damaged copy was written was replaced.

        Raises:
            CorruptError: a leaf was not replaced; the script's own bytes are gone.
        """
        if plan is not None:
            frozen = {item.leaf for item in needed_by(plan, of_rank)}
            self._torn -= {item.leaf for item in plan.items if item.leaf not in frozen}
        if self._torn:
            raise CorruptError(
                f"{sorted(self._torn)[0]}: a damaged copy was written over it, and the checkpoint that was taken "
                "instead does not have it: start again"
            )

    def begin(self) -> None:
        """Forget the state that the script made: loading is done."""
        self._all, self._offered = {}, {}
        self._leaves.forget()

    def mark(self, flat: Flat, resting: frozenset[int]) -> Flat:
        """The state with its frozen leaves marked; looks at their counters."""
        # Read before the look: hashes that another thread finishes after it have not been looked at.
        hashed, confirmed = self._hashed, self._confirmed
        marked = self._leaves.mark(flat, resting)
        stands = hashed is not None and self._leaves.stand(hashed.stamps)
        self._vouched = hashed.file if hashed is not None and stands and confirmed is hashed else None
        self._looks = self._looks + 1 if stands else 0
        if self._looks == _CONFIRM_AT_LOOK and self._vouched is None:
            self._submit(self._hash_again)
        return marked

    def before_save(self, *, kept: bool) -> None:
        """Find, before `mark` is called for an image that must count, the leaves that were written to without moving a
        counter; `mark` gives them up.

        Args:
            kept: hash again even if the bytes were hashed twice already.
        """
        if self._hashed is not None and (kept or self._confirmed is not self._hashed):
            self._hash_now()

    def digest(self, named: NamedTensor) -> str:
        """Digest of a frozen leaf, to compare it between ranks."""
        now = stamp(named.tensor)
        known = self._digests.get(named.name)
        if known is None or known[0] != now:
            known = self._digests[named.name] = now, Placed(named.name, 0, named.tensor).digest()
        return known[1]

    def planned(self, plan: Plan, rank: int) -> None:
        """Take a new plan: hash this rank's frozen file, behind the training, and announce it to the agent."""
        image = plan.frozen_image(rank)
        coming, hashed = not self._identified.is_set(), self._hashed
        if image is not None and self._contents is not None and self._contents.header == image.header:
            if hashed is not None:
                self._tell(_announcement(hashed))
            if hashed is not None or coming:
                return
        contents = None
        if image is not None:
            leaf_of = {item.box.name: item.leaf for item in plan.items if item.rank == rank and item.frozen}
            leaves = [(leaf_of[box.name], start) for box, start in image.places]
            places = tuple(Placed(leaf, start, self._leaves.live[leaf]) for leaf, start in leaves)
            contents = Contents(image.header, image.size_bytes, places)
        with self._replacing:
            self._contents, self._hashed, self._vouched, self._looks = contents, None, None, 0
            if contents is None:
                self._identified.set()
            else:
                self._identified.clear()
        if contents is not None:
            self._submit(partial(self._identify, contents))

    def named(self, *, wait: bool) -> dict[str, Any] | None:
        """The name of this rank's frozen file for a record; None if there is no file, or it is not certain yet.

        Args:
            wait: wait until the file is known, because the image must count.
        """
        if wait and self._vouched is None:
            self._identified.wait()
            hashed = self._hashed
            if hashed is not None and self._leaves.stand(hashed.stamps):
                self._hash_now()
                sure = hashed is self._hashed and hashed is self._confirmed
                self._vouched = hashed.file if sure and self._leaves.stand(hashed.stamps) else None
        return self._vouched.to_json() if self._vouched is not None else None

    def close(self) -> None:
        """End the thread; bounded by a few MiB of work."""
        self._closing.set()
        self._jobs.put(lambda: None)

    # ------------------------------------------------------------------ called by the watcher thread

    def pushed(self, body: Body, fds: list[int]) -> bool:
        """Take a request of the agent's. False if it is not about frozen tensors."""
        if body.get("op") != "frozen_ask":
            return False
        window = memoryview(b"")
        for fd in fds:
            window = memoryview(mmap.mmap(fd, 0))
            os.close(fd)
        self._submit(partial(self._answer, body, window))
        return True

    def news(self) -> list[Body]:
        """The messages that an agent which replaces another needs."""
        hashed = self._hashed
        return [_announcement(hashed)] if hashed is not None else []

    # ------------------------------------------------------------------ the thread

    def _submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="surefoot-frozen", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        give_way()
        due_s = boot_s() + self._again_every_s
        while not self._closing.is_set():
            with suppress(queue.Empty):
                self._do(self._jobs.get(timeout=max(0.0, due_s - boot_s())))
            if boot_s() >= due_s:
                self._do(self._hash_again)
                due_s = boot_s() + self._again_every_s

    def _do(self, job: Callable[[], None]) -> None:
        try:
            job()
        except _Closed:
            return
        except Exception as error:  # noqa: BLE001 - logged; nothing that names the file is committed
            self._warn(f"frozen tensors: {type(error).__name__}: {error}")

    def _go_on(self, _data: memoryview) -> None:
        if self._closing.is_set():
            raise _Closed

    def _hash_now(self) -> None:
        done = threading.Event()
        self._submit(self._hash_again)
        self._submit(done.set)
        done.wait()

    def _identify(self, contents: Contents) -> None:
        right_s, hashed = wall_s(), None
        try:
            hashed = self._read_through(contents)
        finally:
            with self._replacing:
                if contents is self._contents:
                    self._right_s, self._hashed = right_s, hashed
                    self._identified.set()
        if hashed is self._hashed:
            self._tell(_announcement(hashed))

    def _hash_again(self) -> None:
        contents, hashed = self._contents, self._hashed
        if contents is None or hashed is None:
            return
        right_s = wall_s()
        changed = [place for place in contents.places if place.digest(self._go_on) != hashed.digests[place.leaf]]
        if hashed is not self._hashed:
            return
        # `mark` handles a leaf whose counter moved.
        silent = [place.leaf for place in changed if stamp(place.tensor) == hashed.stamps[place.leaf]]
        if silent:
            self._hashed = None
            self._give_up(silent, hashed.file)
        elif not changed:
            self._right_s, self._confirmed = right_s, hashed
            self._tell(_announcement(hashed))

    def _give_up(self, leaves: list[str], file: FrozenFile) -> None:
        for leaf in leaves:
            self._leaves.suspect(leaf)
        fields = {"object": file.key, "tensors": leaves, "since": self._right_s}
        self._tell({"op": "event", "event": "frozen_changed", "fields": fields})

    def _read_through(self, contents: Contents) -> Hashed:
        hashed = contents.hash(self._go_on)
        self._digests |= {leaf: (hashed.stamps[leaf], digest) for leaf, digest in hashed.digests.items()}
        return hashed

    # ------------------------------------------------------------------ what the agent asks

    def _answer(self, body: Body, window: memoryview) -> None:
        answer: Body = {"op": "frozen_done", "ticket": body["ticket"], "error": None}
        try:
            fields = Fields(body, "frozen_ask")
            if body["what"] == "compare":
                answer["differs"] = self._compare(fields)
            elif body["what"] == "read":
                self._read(fields, window)
            else:
                self._write(fields, window)
        except _Closed:
            raise
        except Exception as error:  # noqa: BLE001 - the agent gets it, and reports it
            answer["error"] = f"{type(error).__name__}: {error}"
        self._tell(answer)

    def _compare(self, fields: Fields) -> list[int]:
        """Saved ranks whose file this one wants: the script made other tensors, or has only some of the file's."""
        plan = Plan.from_body(fields.mapping("plan"))
        items = needed_by(plan, fields.integer("of_rank"))
        self._offered = {}
        differs = []
        for rank, data in fields.items("files"):
            contents = self._contents_of(plan, rank, [item for item in items if item.rank == rank])
            if contents.places:
                self._offered[rank] = contents
                file = FrozenFile.from_json(data, "frozen_ask")
                if not contents.is_whole or self._read_through(contents).file != file:
                    differs.append(rank)
        return differs

    def _contents_of(self, plan: Plan, rank: int, items: list[Item]) -> Contents:
        """A saved rank's frozen file as this rank has it. A tensor that does not fit is left out: this rank does not
        need it, or its module refuses it, with a better message."""
        image = plan.frozen_image(rank)
        assert image is not None
        starts = {box.name: start for box, start in image.places}
        mine = sorted((starts[item.box.name], item.leaf) for item in items if _is_like(self._all.get(item.leaf), item))
        places = (Placed(leaf, start, self._all[leaf].tensor) for start, leaf in mine)
        return Contents(image.header, image.size_bytes, tuple(places))

    def _read(self, fields: Fields, window: memoryview) -> None:
        contents, hashed = self._contents, self._hashed
        if contents is None or hashed is None or hashed.file.xxh3_128 != fields.text("xxh3_128"):
            raise AgentError("the rank has another frozen file by now")
        contents.copy_out(fields.integer("start"), window[: fields.integer("bytes")])

    def _write(self, fields: Fields, window: memoryview) -> None:
        """Write a piece. The pieces come in order; the agent sends the last one only if the whole has the saved
        hash."""
        contents = self._offered[fields.integer("rank")]
        start, stop = fields.integer("start"), fields.integer("start") + fields.integer("bytes")
        leaves = {place.leaf for place in contents.places}
        self._torn |= leaves
        contents.copy_in(start, window[: stop - start])
        if stop == contents.size_bytes:
            self._torn -= leaves


def _announcement(hashed: Hashed) -> Body:
    return {"op": "frozen", **hashed.file.to_json()}


def _is_like(named: NamedTensor | None, item: Item) -> bool:
    """True if the live tensor of an item's name can hold it."""
    if named is None:
        return False
    shape = tuple(named.tensor.shape)
    offset = named.place.offset if named.place is not None else (0,) * len(shape)
    return (dtype_name(named.tensor.dtype), shape, offset) == (item.box.dtype, item.box.shape, item.box.offset)
