"""Frozen tensors, the agent's part: saves the trainers' frozen files, each once, and gives back those that differ.

All bytes pass through a window, a stretch of shared memory: the trainer fills it, or takes from it, piece by piece. So
nobody ever holds a second copy. A file gets its name on a tier only if its bytes had that hash on their way, so a file
that is there is good.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import xxhash

from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.agent.frozen.files import FrozenFiles
from surefoot.agent.journal import Journal
from surefoot.agent.memory.memory import ImageSet
from surefoot.agent.node import Node
from surefoot.agent.save.pacer import Pacer
from surefoot.agent.start.needs import of_rank
from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, frozen_ranks, named_by
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, TierError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body
from surefoot.tiers.base import Tier

_WINDOW_BYTES = 16 * 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
_AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class _Window:
    fd: int
    memory: memoryview

    def pieces(self, file: FrozenFile) -> Iterator[tuple[Body, memoryview]]:
        """A file's pieces in order: the fields that name each to a trainer, and its place in the window."""
        for start in range(0, file.size_bytes, len(self.memory)):
            part = self.memory[: file.size_bytes - start]
            yield {"start": start, "bytes": len(part)}, part


@contextmanager
def _window() -> Iterator[_Window]:
    fd = os.memfd_create("frozen", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _WINDOW_BYTES)
        yield _Window(fd, memoryview(mmap.mmap(fd, _WINDOW_BYTES)))
    finally:
        os.close(fd)


async def _ask(trainer: Trainer, what: str, body: Body, fds: tuple[int, ...] = ()) -> Fields:
    """Ask a trainer to do something with its frozen tensors, and wait until it has.

    Raises:
        AgentError: the trainer ended, or cannot do it; the message names the reason.
    """
    ticket = secrets.token_hex(8)
    answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    trainer.answers[_key(ticket)] = answer
    try:
        if not await trainer.link.send({"op": "frozen_ask", "what": what, "ticket": ticket, **body}, fds):
            raise AgentError(f"rank {trainer.rank} hung up")
        done = Fields(await answer, "frozen_done")
    finally:
        trainer.answers.pop(_key(ticket), None)
    if (error := done.optional_text("error")) is not None:
        raise AgentError(f"frozen tensors of rank {trainer.rank}: {error}")
    return done


async def _answered(trainer: Trainer, body: Body) -> None:
    """A trainer has done what it was asked; one to a question that nobody waits for any more is nobody's."""
    future = trainer.answers.get(_key(Fields(body, "frozen_done").text("ticket")))
    if future is not None and not future.done():
        future.set_result(body)


def _key(ticket: str) -> str:
    return f"frozen {ticket}"


class FrozenSaver:
    """Saves the current trainers' frozen files on every tier."""

    def __init__(
        self,
        node: Node,
        files: FrozenFiles,
        pacer: Pacer,
    ) -> None:
        self._trainers = node.trainers
        self._journal = node.journal
        self._tasks = node.tasks
        self._files = files
        self._pacer = pacer
        self._expected: set[int] = set()
        """Ranks whose frozen file is not durable yet, under the current plan."""
        self._ready = asyncio.Event()
        self._ready.set()
        self._uploads: dict[int, tuple[FrozenFile, asyncio.Task[None]]] = {}
        """Files that are being saved to the run's place, by rank."""
        self._one_of_rank: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        node.trainers.hear("frozen", self._announced)
        node.trainers.hear("frozen_done", _answered)
        node.trainers.when_gone(self._trainer_gone)

    def planned(self, plan: Plan) -> None:
        """Take a new plan: until its frozen files are durable, no checkpoint is complete."""
        self._expect(set(frozen_ranks(plan)) & {trainer.rank for trainer in self._trainers.live})

    async def _announced(self, trainer: Trainer, body: Body) -> None:
        """A trainer knows what its frozen file is; or has found that it is still the same."""
        file = FrozenFile.from_json(body, "frozen")
        self._files.hold(file)
        coming = self._uploads.get(trainer.rank)
        if coming is None or coming[0] != file or coming[1].done():
            self._stop(trainer)
            self._expect(self._expected | {trainer.rank})
            self._uploads[trainer.rank] = (file, self._tasks.create_task(self._save(trainer, file)))

    def _trainer_gone(self, trainer: Trainer) -> None:
        """A trainer ended. What it was sending will not be complete."""
        self._stop(trainer)
        self._expect(self._expected if self._trainers.live else set())

    async def ready(self) -> None:
        """Wait until a durable save can be complete: no frozen file is left to save."""
        await self._ready.wait()

    async def hold_back(self, images: ImageSet, trigger: str) -> str | None:
        """The reason why this node's images must not be committed now; None if they may be. A save that the script
        waits for waits here for its frozen files.

        Raises:
            TierError: a frozen file that the save needs could not be saved just now.
            CorruptError: a record names no file, or the file's tensors have changed since.
        """
        frozen = frozen_ranks(images.parts[0].segment.plan())
        for part in images.parts:
            if (rank := part.segment.rank) in frozen:
                file = named_by(part.record())
                if file is None:
                    return f"the frozen tensors of rank {rank} had not been hashed yet"
                if await self._files.is_durable(file):
                    continue
                if trigger == "periodic":
                    return f"{file.key} is still being saved"
                if trigger not in ("emergency", "agent"):
                    await self._save_durably(self._trainers.of_rank(rank), file)
                    continue
                what = f"{images.at.label} is committed before {file.key} is saved: it can be resumed only by a "
                self._journal.record("warning", what=f"{what}script that makes the same frozen tensors by itself")
        return None

    async def _save(self, trainer: Trainer, file: FrozenFile) -> None:
        """Save a file to the run's place, with as many attempts as that takes, and then to the local drives."""
        attempt = 0
        while True:
            try:
                await self._save_durably(trainer, file)
                break
            except CorruptError as error:
                # The trainer hashes again, and gives up the changed leaves or announces the file anew.
                self._journal.record("warning", what=str(error))
                return
            except TierError as error:
                if trainer.leaving:
                    return
                attempt += 1
                self._failed(file, self._files.tiers[0].name, error, attempt)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))
        del self._uploads[trainer.rank]
        self._expect(self._expected - {trainer.rank})
        async with self._one_of_rank[trainer.rank]:
            for tier in self._files.tiers[1:]:
                await self._copy(tier, trainer, file)

    async def _copy(self, tier: Tier, trainer: Trainer, file: FrozenFile) -> None:
        """Save a copy, which is only a short cut: a failure is logged and not retried. It may end with its trainer."""
        try:
            if not trainer.leaving and not await self._files.is_on(tier, file):
                await self._put(tier, trainer, file)
        except (TierError, CorruptError) as error:
            if not trainer.leaving:
                self._failed(file, "disk", error, 1)

    async def _save_durably(self, trainer: Trainer | None, file: FrozenFile) -> None:
        if trainer is None:
            raise TierError(f"{file.key} is not saved, and the trainer that has it is gone")
        async with self._one_of_rank[trainer.rank]:
            if not await self._files.is_durable(file):
                await self._put(self._files.tiers[0], trainer, file)

    async def _put(self, tier: Tier, trainer: Trainer, file: FrozenFile) -> None:
        async with self._at_once:
            started_s = boot_s()
            about = {"object": file.key, "tier": tier.name, "bytes": file.size_bytes, "rank": trainer.rank}
            self._journal.record("frozen_saving", **about)
            try:
                with _window() as window:
                    await tier.put_stream(file.key, self._sent(trainer, file, window), file.size_bytes)
            except AgentError as error:
                raise TierError(f"{file.key}: {error}") from error
            await self._files.saved(tier, file)
            self._journal.record("frozen_saved", **about, seconds=round(boot_s() - started_s, 4))

    async def _sent(self, trainer: Trainer, file: FrozenFile, window: _Window) -> AsyncIterator[memoryview]:
        """The file as the trainer sends it. The last piece is passed on only if the whole has the announced hash."""
        whole = xxhash.xxh3_128()
        for piece, part in window.pieces(file):
            await self._pacer.take(len(part))
            await _ask(trainer, "read", {"xxh3_128": file.xxh3_128, **piece}, (window.fd,))
            await asyncio.to_thread(whole.update, part)
            if piece["start"] + len(part) == file.size_bytes and whole.hexdigest() != file.xxh3_128:
                raise CorruptError(f"{file.key}: its tensors changed while they were sent")
            yield part

    def _failed(self, file: FrozenFile, tier: str, error: Exception, attempt: int) -> None:
        self._journal.record("frozen_failed", object=file.key, tier=tier, why=str(error), attempt=attempt)

    def _stop(self, trainer: Trainer) -> None:
        if upload := self._uploads.pop(trainer.rank, None):
            upload[1].cancel()

    def _expect(self, ranks: set[int]) -> None:
        self._expected = ranks
        if ranks:
            self._ready.clear()
        else:
            self._ready.set()


class FrozenStart:
    """Asks the trainers that wait for a start whether they have made the frozen tensors that a checkpoint needs, and
    gives them those of a file that differs. It does so before the generation is claimed, so that the chosen checkpoint
    is whole."""

    def __init__(self, trainers: Trainers, files: FrozenFiles, journal: Journal) -> None:
        self._trainers = trainers
        self._files = files
        self._journal = journal
        self._bad: dict[FrozenFile, str] = {}
        """Files of which no copy verified, in this start."""

    def forget(self) -> None:
        """Begin a new start: files that were bad may have been repaired."""
        self._bad.clear()

    async def settle(self, plan: Plan, records: Sequence[Mapping[str, Any]]) -> str | None:
        """Give every trainer the frozen tensors of a checkpoint. Returns the reason if that is impossible.

        Raises:
            AgentError: a trainer ended, or could not do it.
            TierError: the run's URI does not answer.
        """
        try:
            files = {rank: self._file(plan, records[rank], rank) for rank in frozen_ranks(plan)}
            takers = await self._differing(plan, files) if files else {}
            started_s = boot_s()
            tiers = {await self._load(rank, files[rank], trainers) for rank, trainers in takers.items()}
        except CorruptError as error:
            return str(error)
        if takers:
            size_bytes = sum(files[rank].size_bytes for rank in takers)
            took_s = round(boot_s() - started_s, 4)
            self._journal.record("frozen_loaded", bytes=size_bytes, tier=" + ".join(sorted(tiers)), seconds=took_s)
        return None

    def _file(self, plan: Plan, record: Mapping[str, Any], rank: int) -> FrozenFile:
        file, image = named_by(record), plan.frozen_image(rank)
        if file is None:
            raise CorruptError(f"the frozen tensors of rank {rank} had not been hashed yet")
        if image is None or image.size_bytes != file.size_bytes:
            raise CorruptError(f"{file.key}: has {file.size_bytes} bytes, its plan gives it another size")
        if file in self._bad:
            raise CorruptError(self._bad[file])
        return file

    async def _differing(self, plan: Plan, files: Mapping[int, FrozenFile]) -> dict[int, list[Trainer]]:
        """By saved rank, the trainers that must be given its file."""
        trainers = self._trainers.live
        body = {"plan": plan.body, "files": [[rank, file.to_json()] for rank, file in files.items()]}
        asked = (_ask(trainer, "compare", {**body, "of_rank": of_rank(plan, trainer.rank)}) for trainer in trainers)
        takers: dict[int, list[Trainer]] = {}
        for trainer, answer in zip(trainers, await asyncio.gather(*asked), strict=True):
            for rank in answer.integers("differs"):
                takers.setdefault(rank, []).append(trainer)
        return takers

    async def _load(self, rank: int, file: FrozenFile, trainers: Sequence[Trainer]) -> str:
        """Give a file to trainers from the nearest good copy; returns the tier's name.

        Raises:
            CorruptError: there is no good copy.
        """
        why = "is not saved"
        for tier in self._files.near:
            try:
                await self._load_from(tier, rank, file, trainers)
                return tier.name
            except CorruptError as error:
                why = str(error)
                await self._files.refuse(tier, file, why)
            except ObjectMissingError:
                # Reported only if no other tier has it: a file may not have been saved everywhere yet.
                continue
            except TierError as error:
                if self._files.is_authority(tier):
                    raise
                await self._files.refuse(tier, file, str(error))
        self._bad[file] = f"{file.key} {why}, and the script's own frozen tensors differ from it"
        raise CorruptError(self._bad[file])

    async def _load_from(self, tier: Tier, rank: int, file: FrozenFile, trainers: Sequence[Trainer]) -> None:
        if await tier.size(file.key) != file.size_bytes:
            raise CorruptError("has another size than was saved")
        whole = xxhash.xxh3_128()
        with _window() as window:
            for piece, part in window.pieces(file):
                reads = range(0, len(part), _READ_BYTES)
                await asyncio.gather(
                    *(tier.read_into(file.key, piece["start"] + at, part[at : at + _READ_BYTES]) for at in reads)
                )
                await asyncio.to_thread(whole.update, part)
                if piece["start"] + len(part) == file.size_bytes and whole.hexdigest() != file.xxh3_128:
                    raise CorruptError("has bytes that do not match their hash")
                await asyncio.gather(
                    *(_ask(trainer, "write", {"rank": rank, **piece}, (window.fd,)) for trainer in trainers)
                )
