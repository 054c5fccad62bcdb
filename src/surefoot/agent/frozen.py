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
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import xxhash

from surefoot.agent.crew import Crew, Worker
from surefoot.agent.frozen_files import FrozenFiles
from surefoot.agent.journal import Journal
from surefoot.agent.memory import ImageSet
from surefoot.agent.needs import of_rank
from surefoot.agent.pacer import Pacer
from surefoot.clock import boot_s
from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, frozen_ranks, named_by
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, TierError
from surefoot.tiers.base import Tier
from surefoot.wire import Body

_WINDOW_BYTES = 16 * 1024 * 1024
_READ_BYTES = 4 * 1024 * 1024
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
_AT_ONCE = 2


class _Changed(CorruptError):  # noqa: N818 - an answer, not a fault
    """What was sent is not what was announced."""


class _BadCopy(Exception):  # noqa: N818 - an answer, not a fault
    """A tier's copy cannot be used."""


class _Window:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = memoryview(mmap.mmap(fd, _WINDOW_BYTES))

    def pieces(self, file: FrozenFile) -> Iterator[tuple[Body, memoryview]]:
        """A file's pieces in order: what a trainer is told of each, and where it is to stand."""
        for start in range(0, file.size_bytes, _WINDOW_BYTES):
            part = self._memory[: min(_WINDOW_BYTES, file.size_bytes - start)]
            yield {"start": start, "bytes": len(part)}, part


@contextmanager
def _window() -> Iterator[_Window]:
    fd = os.memfd_create("frozen", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, _WINDOW_BYTES)
        yield _Window(fd)
    finally:
        os.close(fd)


async def _ask(worker: Worker, what: str, body: Body, fds: tuple[int, ...] = ()) -> Fields:
    """Ask a trainer to do something with its frozen tensors, and wait until it has.

    Raises:
        AgentError: it ended, or cannot; the message says why.
    """
    ticket = secrets.token_hex(8)
    answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
    worker.answers[_key(ticket)] = answer
    try:
        if not await worker.link.send({"op": "frozen_ask", "what": what, "ticket": ticket, **body}, fds):
            raise AgentError(f"rank {worker.rank} hung up")
        done = Fields(await answer, "frozen_done")
    finally:
        worker.answers.pop(_key(ticket), None)
    if (error := done.optional_text("error")) is not None:
        raise AgentError(f"frozen tensors of rank {worker.rank}: {error}")
    return done


async def answered(worker: Worker, body: Body) -> None:
    """A trainer has done what it was asked; one to a question that nobody waits for any more is nobody's."""
    future = worker.answers.get(_key(Fields(body, "frozen_done").text("ticket")))
    if future is not None and not future.done():
        future.set_result(body)


def _key(ticket: str) -> str:
    return f"frozen {ticket}"


class FrozenSaver:
    """Uploads of the current crew's frozen files, and who waits for them."""

    def __init__(
        self,
        crew: Crew,
        files: FrozenFiles,
        pacer: Pacer,
        journal: Journal,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._crew = crew
        self._files = files
        self._pacer = pacer
        self._journal = journal
        self._spawn = spawn
        self._expected: set[int] = set()
        """Ranks whose frozen file is not durable yet, under the current plan."""
        self._uploads: dict[int, tuple[FrozenFile, asyncio.Task[None]]] = {}
        self._ready = asyncio.Event()
        self._ready.set()
        self._changed = asyncio.Event()
        self._fault: TierError | None = None
        """What the last try of an upload failed with; None once one went well."""
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    # ------------------------------------------------------------------ what comes in

    def planned(self, plan: Plan) -> None:
        """A plan stands: until its frozen files are durable, no checkpoint is complete."""
        self._expected = set(frozen_ranks(plan)) & {worker.rank for worker in self._crew.workers}
        self._stir()

    async def announced(self, worker: Worker, body: Body) -> None:
        """A trainer knows what its frozen file is; or knows it still, and that it is here."""
        file = FrozenFile.from_json(body, "frozen")
        self._files.hold(file)
        if not self._is_coming(file):
            self._expected.add(worker.rank)
            self._stop(worker.rank)
            self._uploads[worker.rank] = (file, self._spawn(self._save(worker, file)))
        self._stir()

    def worker_gone(self, worker: Worker) -> None:
        """A trainer ended. What it was sending will not be complete."""
        self._stop(worker.rank)
        if not self._crew.workers:
            self._expected.clear()
        self._stir()

    # ------------------------------------------------------------------ who waits

    async def ready(self) -> None:
        """Wait until a durable save could be complete: no frozen file is still to be saved."""
        await self._ready.wait()

    async def hold_back(self, images: ImageSet, trigger: str) -> str | None:
        """Why this node's images must not be committed now; None if they may. Saves that somebody waits for wait here.

        Raises:
            TierError: a frozen file that is waited for could not be saved just now.
            CorruptError: a record names no file.
        """
        frozen = set(frozen_ranks(images.parts[0].segment.plan()))
        files = []
        for part in images.parts:
            if part.segment.rank in frozen:
                file = named_by(part.record())
                if file is None:
                    return f"the frozen tensors of rank {part.segment.rank} had not been hashed yet"
                files.append(file)
        while missing := [file for file in files if not await self._files.is_durable(file)]:
            if trigger == "periodic":
                return f"{missing[0].key} is still being saved"
            if trigger in ("emergency", "agent"):
                self._say_without(missing, images.at.step)
                return None
            if not any(map(self._is_coming, missing)):
                raise TierError(f"{missing[0].key} is not saved, and no trainer has it any more")
            self._fault = None
            self._changed.clear()
            await self._changed.wait()
            if self._fault is not None:
                raise self._fault
        return None

    def _is_coming(self, file: FrozenFile) -> bool:
        return any(saving == file and not task.done() for saving, task in self._uploads.values())

    def _say_without(self, missing: list[FrozenFile], step: int) -> None:
        names = ", ".join(file.key for file in missing)
        self._journal.record(
            "warning",
            what=f"step {step} is committed before {names} is saved: it can be resumed only by a script that makes the "
            "same frozen tensors by itself",
        )

    # ------------------------------------------------------------------ the work

    async def _save(self, worker: Worker, file: FrozenFile) -> None:
        """Bring a file to the run's place, however often that takes, and then to the local drives."""
        run, *copies = self._files.tiers
        attempt = 0
        while True:
            try:
                if not await self._files.is_durable(file):
                    await self._put(run, worker, file)
                break
            except _Changed as error:
                # The trainer finds out which tensor it was, or announces the file anew.
                self._journal.record("warning", what=f"{file.key}: {error}")
                return
            except (TierError, AgentError) as error:
                attempt += 1
                self._failed(file, error, attempt)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))
        self._expected.discard(worker.rank)
        self._stir()
        for tier in copies:
            try:
                if not await self._files.is_on(tier, file):
                    await self._put(tier, worker, file)
            except (TierError, AgentError, _Changed) as error:
                # A copy is a short cut: one that fails is said, and left.
                self._journal.record("frozen_failed", object=file.key, tier="disk", why=str(error), attempt=1)

    def _failed(self, file: FrozenFile, error: TierError | AgentError, attempt: int) -> None:
        tier = self._files.tiers[0].name
        self._journal.record("frozen_failed", object=file.key, tier=tier, why=str(error), attempt=attempt)
        self._fault = error if isinstance(error, TierError) else TierError(f"{file.key}: {error}")
        self._stir()

    async def _put(self, tier: Tier, worker: Worker, file: FrozenFile) -> None:
        async with self._at_once:
            started_s = boot_s()
            about = {"object": file.key, "tier": tier.name, "bytes": file.size_bytes, "rank": worker.rank}
            self._journal.record("frozen_saving", **about)
            with _window() as window:
                await tier.put_stream(file.key, self._sent(worker, file, window), file.size_bytes)
            await self._files.saved(tier, file)
            self._journal.record("frozen_saved", **about, seconds=round(boot_s() - started_s, 4))

    async def _sent(self, worker: Worker, file: FrozenFile, window: _Window) -> AsyncIterator[memoryview]:
        """The file as the trainer sends it. The last piece is given away only if the whole is what was announced."""
        whole = xxhash.xxh3_128()
        for piece, part in window.pieces(file):
            await self._pacer.take(len(part))
            await _ask(worker, "read", {"xxh3_128": file.xxh3_128, **piece}, (window.fd,))
            await asyncio.to_thread(whole.update, part)
            if piece["start"] + len(part) == file.size_bytes and whole.hexdigest() != file.xxh3_128:
                raise _Changed("its tensors changed while they were sent")
            yield part

    def _stop(self, rank: int) -> None:
        upload = self._uploads.pop(rank, None)
        if upload is not None:
            upload[1].cancel()

    def _stir(self) -> None:
        if self._expected:
            self._ready.clear()
        else:
            self._ready.set()
        self._changed.set()


class FrozenStart:
    """Asks the trainers that wait for a start whether they have made the frozen tensors that a checkpoint needs, and
    gives them those of a file that differs. Before the generation is claimed, so that what is chosen is whole."""

    def __init__(self, crew: Crew, files: FrozenFiles, journal: Journal) -> None:
        self._crew = crew
        self._files = files
        self._journal = journal
        self._bad: dict[FrozenFile, str] = {}
        """Files of which no copy verified, in this start."""

    def forget(self) -> None:
        """A new start begins: what was bad may have been repaired."""
        self._bad.clear()

    async def settle(self, plan: Plan, records: Sequence[Mapping[str, Any]]) -> str | None:
        """See to it that every trainer has the frozen tensors of a checkpoint. Returns why that cannot be.

        Raises:
            AgentError: a trainer ended, or broke off.
            TierError: the run's URI does not answer.
        """
        try:
            files = {rank: self._file(plan, records[rank], rank) for rank in frozen_ranks(plan)}
            takers = await self._differing(plan, files) if files else {}
            started_s = boot_s()
            tiers = {await self._load(rank, files[rank], workers) for rank, workers in takers.items()}
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

    async def _differing(self, plan: Plan, files: Mapping[int, FrozenFile]) -> dict[int, list[Worker]]:
        """By saved rank, the trainers that must be given its file."""
        workers = self._crew.workers
        body = {"plan": plan.body, "files": [[rank, file.to_json()] for rank, file in files.items()]}
        asked = (_ask(worker, "compare", {**body, "of_rank": of_rank(plan, worker.rank)}) for worker in workers)
        takers: dict[int, list[Worker]] = {}
        for worker, answer in zip(workers, await asyncio.gather(*asked), strict=True):
            for rank in answer.integers("differs"):
                takers.setdefault(rank, []).append(worker)
        return takers

    async def _load(self, rank: int, file: FrozenFile, workers: Sequence[Worker]) -> str:
        """Give a file to trainers from the nearest good copy; returns the tier's name.

        Raises:
            CorruptError: there is none.
        """
        why = "is not saved"
        for tier in self._files.near:
            try:
                await self._load_from(tier, rank, file, workers)
                return tier.name
            except _BadCopy as error:
                why = str(error)
                await self._files.refuse(tier, file, why)
            except ObjectMissingError:
                # Said only if no other tier has it: a file may not have been saved everywhere yet.
                continue
            except TierError as error:
                if self._files.is_authority(tier):
                    raise
                await self._files.refuse(tier, file, str(error))
        self._bad[file] = f"{file.key} {why}, and the script's own frozen tensors are others"
        raise CorruptError(self._bad[file])

    async def _load_from(self, tier: Tier, rank: int, file: FrozenFile, workers: Sequence[Worker]) -> None:
        if await tier.size(file.key) != file.size_bytes:
            raise _BadCopy("has another size than was saved")
        whole = xxhash.xxh3_128()
        with _window() as window:
            for piece, part in window.pieces(file):
                reads = range(0, len(part), _READ_BYTES)
                await asyncio.gather(
                    *(tier.read_into(file.key, piece["start"] + at, part[at : at + _READ_BYTES]) for at in reads)
                )
                await asyncio.to_thread(whole.update, part)
                if piece["start"] + len(part) == file.size_bytes and whole.hexdigest() != file.xxh3_128:
                    raise _BadCopy("has bytes that do not match their hash")
                await asyncio.gather(
                    *(_ask(worker, "write", {"rank": rank, **piece}, (window.fd,)) for worker in workers)
                )
