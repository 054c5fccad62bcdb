"""Frozen tensors, the trainer's part: hashed behind the training, sent when the agent asks, compared at a start.

One thread hashes, one more each sends; neither holds more than a few MiB. Nothing is copied whole. A file's identity is
the hash of its bytes; a record names it only if the tensors were looked at since it was known (`named`).
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from surefoot import wire
from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, FrozenIndex, contents_key, needed_by
from surefoot.core.image import Image
from surefoot.core.plan import Plan
from surefoot.errors import CorruptError, SurefootError, WireError
from surefoot.tensor_hash import TensorHash
from surefoot.trainer.flatten import Flat, NamedTensor, dtype_name
from surefoot.trainer.frozen_bytes import CHUNK_BYTES, beside_the_training, chunks, write
from surefoot.trainer.frozen_leaves import FrozenLeaves
from surefoot.wire import Body


class _Closed(Exception):  # noqa: N818 - not an error: the way out of a long reading
    """The run is being left."""


@dataclass(frozen=True, slots=True)
class Contents:
    """A rank's frozen file, as it can be written at any moment."""

    plan: str
    image: Image
    leaves: tuple[tuple[str, torch.Tensor], ...]
    """In the file's order."""
    index: FrozenIndex

    def announcement(self) -> Body:
        return {"op": "frozen", "plan": self.plan, "index": self.index.to_json()}


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A tensor as a checkpoint's frozen file has it."""

    leaf: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    digest: str

    @classmethod
    def from_json(cls, data: Any) -> _Wanted:
        leaf, dtype, shape, offset, digest = data
        return cls(leaf, dtype, tuple(shape), tuple(offset), digest)

    def is_like(self, named: NamedTensor | None) -> bool:
        """True if the live tensor of this name can hold it."""
        if named is None:
            return False
        shape = tuple(named.tensor.shape)
        offset = named.place.offset if named.place is not None else (0,) * len(shape)
        return (dtype_name(named.tensor.dtype), shape, offset) == (self.dtype, self.shape, self.offset)


class Frozen:
    """One trainer's frozen tensors."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._leaves = FrozenLeaves(warn)
        self._tell: Callable[[Body], None]
        self._connect: Callable[[], socket.socket]
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._socks: set[socket.socket] = set()
        self._all: dict[str, NamedTensor] = {}
        """Every leaf, while a checkpoint is being chosen."""
        self._files: dict[str, FrozenFile] = {}
        """Of contents that were seen, by their key: a pass over the bytes is saved."""
        self._torn: set[str] = set()
        """Leaves into which a damaged copy was written."""
        self._surveyed = threading.Event()
        self._surveyed.set()
        self._identified = threading.Event()
        self._identified.set()
        self._plan: str | None = None
        self._contents: Contents | None = None
        self._vouched: FrozenFile | None = None

    def attach(self, tell: Callable[[Body], None], connect: Callable[[], socket.socket]) -> None:
        """Give it the agent: to tell something, and to open a connection beside the watcher's."""
        self._tell = tell
        self._connect = connect
        # A forked child (a data loader's worker) must not hold a connection open after the trainer's death.
        os.register_at_fork(after_in_child=self._forget)

    # ------------------------------------------------------------------ called by the training thread

    def mark(self, flat: Flat, resting: frozenset[int]) -> Flat:
        """The state with its frozen leaves marked, and looked at."""
        # Before the look: what becomes known after it has not been looked at.
        contents = self._contents
        marked = self._leaves.mark(flat, resting)
        self._vouched = contents.index.file if contents is not None else None
        return marked

    def open(self, flat: Flat) -> None:
        """The state as the script made it, for the agent's questions until `begin`."""
        self._all = {named.name: named for named in flat.tensors}

    @property
    def found(self) -> dict[str, torch.Tensor]:
        """The leaves as the script made them, by name, until `begin`."""
        return {name: named.tensor for name, named in self._all.items()}

    def begin(self, *, several: bool) -> None:
        """What was to be loaded is loaded. With several ranks, hash what will have to be shown to be equal."""
        self._all = {}
        if several and self._leaves.live:
            self._surveyed.clear()
            self._submit(self._survey)

    def digest(self, named: NamedTensor) -> str:
        """Digest of a frozen leaf, to compare it between ranks. Waits for the hashing that is under way."""
        self._surveyed.wait()
        known = self._leaves.known(named.name)
        return (known or self._leaves.hash(named.name, named.tensor)).digest

    def planned(self, plan: Plan, rank: int) -> None:
        """A plan stands: find out, behind the training, what this rank's frozen file is, and tell the agent."""
        image = plan.frozen_image(rank)
        self._plan, self._contents, self._vouched = plan.hash, None, None
        if image is None:
            return
        leaf_of = {item.box.name: item.leaf for item in plan.items if item.rank == rank and item.frozen}
        leaves = tuple((name := leaf_of[box.name], self._leaves.live[name]) for box, _start in image.places)
        self._identified.clear()
        self._submit(lambda: self._identify(plan.hash, image, leaves))

    def named(self, *, wait: bool) -> dict[str, Any] | None:
        """What a record says of this rank's frozen file; None if there is none, or its hash is not known yet.

        Args:
            wait: until it is known, because the image is one that must count.
        """
        if wait and self._vouched is None:
            self._identified.wait()
            contents = self._contents
            if contents is not None and self._leaves.look_again():
                self._vouched = contents.index.file
        return self._vouched.to_json() if self._vouched is not None else None

    def refuse_torn(self, plan: Plan | None, of_rank: int) -> None:
        """After loading: what a damaged copy was written into must have been replaced.

        Raises:
            CorruptError: it was not; the script's own bytes are gone.
        """
        if plan is not None:
            frozen = {item.leaf for item in needed_by(plan, of_rank)}
            self._torn -= {item.leaf for item in plan.items if item.leaf not in frozen}
        if self._torn:
            raise CorruptError(
                f"{sorted(self._torn)[0]}: a damaged copy was written over it, and the checkpoint that was taken "
                "instead does not have it: start again"
            )

    def close(self) -> None:
        """End the threads; bounded by a few MiB of work."""
        self._closing.set()
        self._surveyed.set()
        self._identified.set()
        for sock in list(self._socks):
            # Wakes whoever waits on it; it is closed by whoever opened it.
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._jobs.put(lambda: None)

    # ------------------------------------------------------------------ called by the watcher thread

    def pushed(self, body: Body) -> bool:
        """Something that the agent asks. False if it is none of these."""
        operation = body.get("op")
        if operation == "frozen_check":
            self._submit(lambda: self._check(body))
        elif operation == "frozen_load":
            self._submit(lambda: self._load(body))
        elif operation == "frozen_send":
            # By itself: it lasts as long as the tier takes, and a new plan must be hashed meanwhile.
            threading.Thread(target=self._send, args=(body,), name="surefoot-frozen-send", daemon=True).start()
        elif operation == "frozen_again":
            self._again()
        else:
            return False
        return True

    def news(self) -> list[Body]:
        """What an agent that replaces another must hear."""
        contents = self._contents
        return [contents.announcement()] if contents is not None else []

    # ------------------------------------------------------------------ the thread that hashes

    def _submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="surefoot-frozen", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while not self._closing.is_set():
            job = self._jobs.get()
            try:
                job()
            except _Closed:
                return
            except Exception as error:  # noqa: BLE001 - said in the log; nothing that names the file is committed
                self._warn(f"frozen tensors: {type(error).__name__}: {error}")
                self._surveyed.set()
                self._identified.set()

    def _survey(self) -> None:
        for name, tensor in self._leaves.live.items():
            if self._leaves.known(name) is None:
                self._leaves.hash(name, tensor, self._go_on)
        self._surveyed.set()

    def _go_on(self, _data: memoryview) -> None:
        if self._closing.is_set():
            raise _Closed

    def _identify(self, plan: str, image: Image, leaves: tuple[tuple[str, torch.Tensor], ...]) -> None:
        known = [self._leaves.known(name) for name, _tensor in leaves]
        digests = [one.digest for one in known if one is not None]
        file = self._files.get(contents_key(image.header, digests)) if len(digests) == len(leaves) else None
        if file is None:
            file, digests = self._read_through(image, leaves)
        boxes = [box.name for box, _start in image.places]
        contents = Contents(plan, image, leaves, FrozenIndex(file, tuple(zip(boxes, digests, strict=True))))
        if plan == self._plan:
            self._contents = contents
            self._tell(contents.announcement())
            self._identified.set()

    def _read_through(self, image: Image, leaves: tuple[tuple[str, torch.Tensor], ...]) -> tuple[FrozenFile, list[str]]:
        whole = xxhash.xxh3_128(image.header)

        def also(data: memoryview) -> None:
            self._go_on(data)
            whole.update(data)

        digests = [self._leaves.hash(name, tensor, also).digest for name, tensor in leaves]
        file = FrozenFile(whole.hexdigest(), image.size_bytes)
        self._files[contents_key(image.header, digests)] = file
        return file, digests

    def _again(self) -> None:
        """What was sent was not what was announced: read it once more. A leaf that changed is given up then."""
        contents, self._contents = self._contents, None
        if contents is not None:
            self._files.clear()
            self._identified.clear()
            self._submit(lambda: self._identify_anew(contents))

    def _identify_anew(self, contents: Contents) -> None:
        self._read_through(contents.image, contents.leaves)
        self._identify(contents.plan, contents.image, contents.leaves)

    # ------------------------------------------------------------------ at a start

    def _check(self, body: Body) -> None:
        """Which of a checkpoint's frozen tensors are other than the script's own?"""
        answer: Body = {"op": "frozen_checked", "ticket": body["ticket"]}
        try:
            self._tell({**answer, "differs": self._differing(body)})
        except Exception as error:
            self._tell({**answer, "error": f"{type(error).__name__}: {error}"})
            raise

    def _differing(self, body: Body) -> list[int]:
        wanted = [_Wanted.from_json(data) for data in body["wanted"]]
        for key, file in body["files"]:
            self._files[str(key)] = FrozenFile.from_json(file, "frozen_check")
        differs = []
        for number, one in enumerate(wanted):
            named = self._all.get(one.leaf)
            # What does not fit is no business of this rank's, or refused by its module, in better words.
            if named is not None and one.is_like(named) and self._digest_now(named) != one.digest:
                differs.append(number)
        return differs

    def _digest_now(self, named: NamedTensor) -> str:
        known = self._leaves.known(named.name)
        return (known or self._leaves.hash(named.name, named.tensor, self._go_on)).digest

    def _load(self, body: Body) -> None:
        """Write what the agent sends over the script's own bytes."""
        wanted = {int(number): _Wanted.from_json(data) for number, data in body["wanted"]}
        good: set[int] = set()
        buffer = memoryview(bytearray(CHUNK_BYTES))
        with self._side(body) as sock:
            while True:
                frame = wire.receive(sock)
                if frame is None or frame[0].get("end"):
                    break
                number = Fields(frame[0], "frozen_load").integer("number")
                if self._receive(sock, wanted[number], buffer):
                    good.add(number)
            if frame is not None:
                wire.send(sock, {"bad": sorted(wanted.keys() - good)})

    def _receive(self, sock: socket.socket, wanted: _Wanted, buffer: memoryview) -> bool:
        tensor = self._all[wanted.leaf].tensor
        self._torn.add(wanted.leaf)
        hashing = TensorHash()
        for start in range(0, tensor.nbytes, len(buffer)):
            part = buffer[: min(len(buffer), tensor.nbytes - start)]
            _fill(sock, part)
            self._go_on(part)
            write(tensor, start, part)
            hashing.update(part)
        good = self._leaves.learn(wanted.leaf, tensor, hashing, anew=True).digest == wanted.digest
        if good:
            self._torn.discard(wanted.leaf)
        return good

    # ------------------------------------------------------------------ sending

    def _send(self, body: Body) -> None:
        """Stream the file to the agent. What breaks off is seen there, and asked for again."""
        contents = self._contents
        if contents is None or contents.index.file.xxh3_128 != body.get("xxh3_128"):
            self._tell({"op": "frozen_gone", "ticket": body["ticket"]})
            return
        try:
            with self._side(body) as sock:
                sock.sendall(contents.image.header)
                for _name, tensor in contents.leaves:
                    with beside_the_training(tensor):
                        for chunk in chunks(tensor):
                            self._go_on(chunk)
                            sock.sendall(chunk)
                # The agent's last word: everything has arrived, or what has gone wrong is known there.
                wire.receive(sock)
        except (_Closed, OSError, SurefootError):
            return

    @contextmanager
    def _side(self, body: Body) -> Iterator[socket.socket]:
        """A connection for one ticket of the agent's."""
        sock = self._connect()
        self._socks.add(sock)
        try:
            wire.send(sock, {"role": "frozen", "ticket": body["ticket"]})
            yield sock
        finally:
            self._socks.discard(sock)
            sock.close()

    def _forget(self) -> None:
        # Runs in a forked child: its copies of the descriptors go, the parent's stay.
        for sock in list(self._socks):
            sock.close()


def _fill(sock: socket.socket, buffer: memoryview) -> None:
    while len(buffer):
        count = sock.recv_into(buffer)
        if count == 0:
            raise WireError("the agent ended while it sent frozen tensors")
        buffer = buffer[count:]
