"""The frozen desk: hears what a trainer's frozen file is, and brings it to every tier, once, through a small buffer.

The file has its final name only when it is whole and its hash is the announced one, so a file that is there is good.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from surefoot.agent.control import Link
from surefoot.agent.crew import Crew, Worker
from surefoot.agent.frozen_files import CHUNK_BYTES, FrozenFiles, index_of
from surefoot.agent.journal import Journal
from surefoot.agent.memory import ImageSet, Memory
from surefoot.agent.pacer import Pacer
from surefoot.clock import boot_s
from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, FrozenIndex, frozen_ranks, named_by
from surefoot.core.image import Image
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, CorruptError, TierError
from surefoot.tensor_hash import FileHash
from surefoot.tiers.base import Tier
from surefoot.wire import Body

_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 20.0
_CONNECT_WITHIN_S = 30.0
_AT_ONCE = 2


class _Changed(CorruptError):  # noqa: N818 - an answer, not a fault
    """What was sent is not what was announced."""


class FrozenDesk:
    """Uploads of the current crew's frozen files, and who waits for them."""

    def __init__(
        self,
        crew: Crew,
        memory: Memory,
        files: FrozenFiles,
        pacer: Pacer,
        journal: Journal,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._crew = crew
        self._memory = memory
        self._files = files
        self._pacer = pacer
        self._journal = journal
        self._spawn = spawn
        self._expected: set[int] = set()
        """Ranks whose frozen file is not durable yet, under the current plan."""
        self._uploads: dict[int, tuple[FrozenFile, asyncio.Task[None]]] = {}
        self._tickets: dict[str, asyncio.Future[Link]] = {}
        self._ready = asyncio.Event()
        self._ready.set()
        self._changed = asyncio.Event()
        self._fault: TierError | None = None
        """What the last try of an upload failed with; None once one went well."""
        self._at_once = asyncio.Semaphore(_AT_ONCE)

    # ------------------------------------------------------------------ what comes in

    def planned(self, plan: Plan) -> None:
        """A plan stands: until its frozen files are durable, no checkpoint is complete."""
        self._expected = set(frozen_ranks(plan))
        self._stir()

    async def announced(self, worker: Worker, body: Body) -> None:
        """A trainer knows what its frozen file is."""
        fields = Fields(body, "frozen")
        index = FrozenIndex.from_json(fields.mapping("index"), "frozen")
        segment = self._memory.find(worker.rank, fields.text("plan"))
        plan = segment.plan() if segment is not None else None
        if plan is None or not index.fits(plan, worker.rank):
            # Of a plan that was replaced meanwhile: the trainer announces what it has under the new one, too.
            return
        self._files.hold(index.file)
        self._expected.add(worker.rank)
        self._stir()
        if not self._is_coming(index.file):
            self._stop(worker.rank)
            self._uploads[worker.rank] = (index.file, self._spawn(self._save(worker, index, plan)))

    async def gone(self, _worker: Worker, body: Body) -> None:
        """A trainer has another frozen file by now than the one that was asked for."""
        future = self._tickets.get(Fields(body, "frozen_gone").text("ticket"))
        if future is not None and not future.done():
            future.set_exception(AgentError("it has another frozen file by now"))

    async def serve(self, link: Link, first: Body) -> None:
        """A trainer's connection for bytes in bulk: handed to whoever asked for it, until that is done with it."""
        future = self._tickets.get(str(first.get("ticket")))
        if future is None or future.done():
            return
        future.set_result(link)
        await link.released()

    def worker_gone(self, worker: Worker) -> None:
        """A trainer ended. What it was sending will not be complete, whoever else holds its connection open."""
        self._stop(worker.rank)
        if not self._crew.workers:
            self._expected.clear()
        self._stir()

    # ------------------------------------------------------------------ who waits

    async def ready(self) -> None:
        """Wait until a durable save could be complete: no frozen file is still to be saved."""
        await self._ready.wait()

    async def hold_back(self, images: ImageSet, trigger: str) -> str | None:
        """Why an image set must not be committed now; None if it may. Saves that somebody waits for wait here.

        Raises:
            TierError: a frozen file that is waited for could not be saved just now.
            CorruptError: a record names no file.
        """
        plan = images.parts[0].segment.plan()
        files = []
        for rank in frozen_ranks(plan):
            file = named_by(images.parts[rank].record())
            if file is None:
                return f"the frozen tensors of rank {rank} had not been hashed yet"
            files.append(file)
        while missing := [file for file in files if not await self._files.is_durable(file)]:
            if trigger == "periodic":
                return f"{missing[0].key} is still being saved"
            if trigger in ("emergency", "agent"):
                self._say_without(missing, images.at.step)
                return None
            if not any(map(self._is_coming, missing)):
                raise TierError(f"{missing[0].key} is not saved, and the trainers that have it are gone")
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

    async def _save(self, worker: Worker, index: FrozenIndex, plan: Plan) -> None:
        attempt = 0
        while True:
            try:
                await self._save_once(worker, index, plan)
                break
            except _Changed as error:
                self._journal.record("warning", what=f"{index.file.key}: {error}; rank {worker.rank} hashes anew")
                await worker.link.send({"op": "frozen_again"})
                return
            except (TierError, AgentError) as error:
                attempt += 1
                self._failed(index.file, error, attempt)
            await asyncio.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**attempt))
        self._expected.discard(worker.rank)
        self._stir()
        await self._copy(worker, index, plan)

    def _failed(self, file: FrozenFile, error: TierError | AgentError, attempt: int) -> None:
        self._journal.record(
            "frozen_failed", object=file.key, tier=self._files.tiers[0].name, why=str(error), attempt=attempt
        )
        self._fault = error if isinstance(error, TierError) else TierError(f"{file.key}: {error}")
        self._stir()

    async def _save_once(self, worker: Worker, index: FrozenIndex, plan: Plan) -> None:
        await self._files.put_index(index)
        if not await self._files.is_durable(index.file):
            await self._bring(self._files.tiers[0], worker, index, plan)

    async def _copy(self, worker: Worker, index: FrozenIndex, plan: Plan) -> None:
        """Copies on local drives are a short cut: one that fails is said, and left."""
        for tier in self._files.tiers[1:]:
            try:
                if not await self._files.is_on(tier, index.file):
                    await self._bring(tier, worker, index, plan)
            except (TierError, AgentError, _Changed) as error:
                self._journal.record("frozen_failed", object=index.file.key, tier="disk", why=str(error), attempt=1)

    async def _bring(self, tier: Tier, worker: Worker, index: FrozenIndex, plan: Plan) -> None:
        image = plan.frozen_image(worker.rank)
        assert image is not None
        async with self._at_once:
            started_s = boot_s()
            about = {"object": index.file.key, "tier": tier.name, "bytes": index.file.size_bytes, "rank": worker.rank}
            self._journal.record("frozen_saving", **about)
            link = await self.ask(worker, {"op": "frozen_send", "xxh3_128": index.file.xxh3_128})
            try:
                await tier.put_stream(index.file.key, self._received(link, index, image), index.file.size_bytes)
            finally:
                link.release()
            await self._files.saved(tier, index.file)
            self._journal.record("frozen_saved", **about, seconds=round(boot_s() - started_s, 4))

    async def ask(self, worker: Worker, body: Body) -> Link:
        """Have a trainer open a connection for bytes in bulk.

        Raises:
            AgentError: it does not, or has nothing to send.
        """
        ticket = secrets.token_hex(16)
        future: asyncio.Future[Link] = asyncio.get_running_loop().create_future()
        self._tickets[ticket] = future
        try:
            await worker.link.send({**body, "ticket": ticket})
            async with asyncio.timeout(_CONNECT_WITHIN_S):
                return await future
        except TimeoutError:
            raise AgentError(f"rank {worker.rank} did not open a connection for its frozen tensors") from None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().release()
            raise
        finally:
            del self._tickets[ticket]

    async def _received(self, link: Link, index: FrozenIndex, image: Image) -> AsyncIterator[memoryview]:
        """The file as it comes in. The last piece is given away only if the whole is what was announced."""
        hashing = FileHash(image)
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        for start in range(0, index.file.size_bytes, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, index.file.size_bytes - start)]
            await self._pacer.take(len(part))
            await link.receive_into(part)
            await asyncio.to_thread(hashing.update, part)
            if start + len(part) == index.file.size_bytes:
                whole, digests = hashing.finish()
                if whole != index.file.xxh3_128 or index_of(index.file, image, digests) != index:
                    raise _Changed("the frozen tensors changed while they were sent")
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
