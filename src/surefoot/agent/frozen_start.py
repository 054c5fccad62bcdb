"""Frozen tensors at a start: compare what the trainers have with what was saved, and send them what differs.

All this happens before the generation is claimed, so that what is chosen is whole. Each tensor is read once a node, in
small pieces, and written over the trainers' own; a copy that turns out bad is followed by the next, in its place.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.agent.control import Link
from surefoot.agent.crew import Crew, Worker
from surefoot.agent.frozen_desk import FrozenDesk
from surefoot.agent.frozen_files import CHUNK_BYTES, FrozenFiles
from surefoot.agent.journal import Journal
from surefoot.clock import boot_s
from surefoot.core.documents import Fields
from surefoot.core.frozen import FrozenFile, FrozenIndex, contents_key, frozen_ranks, named_by, needed_by
from surefoot.core.image import Box
from surefoot.core.plan import Item, Plan
from surefoot.errors import AgentError, CorruptError, ObjectMissingError, TierError
from surefoot.tensor_hash import TensorHash
from surefoot.tiers.base import Tier
from surefoot.wire import Body


@dataclass(frozen=True, slots=True)
class _Saved:
    """One rank's frozen file, and what is in it."""

    file: FrozenFile
    index: FrozenIndex
    key: str
    """Of its contents."""
    places: Mapping[str, tuple[Box, int, str]]
    """By name: box, offset in the file, digest."""


class _BadCopy(Exception):  # noqa: N818 - an answer, not a fault
    """A tier's copy cannot be used."""


class FrozenStart:
    """Asks the trainers that wait for a start."""

    def __init__(self, crew: Crew, desk: FrozenDesk, files: FrozenFiles, journal: Journal) -> None:
        self._crew = crew
        self._desk = desk
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
            saved = await self._saved(plan, records)
            differing = await self._compare(plan, saved) if saved else {}
            if any(differing.values()):
                await self._load(saved, differing)
        except CorruptError as error:
            return str(error)
        return None

    async def _saved(self, plan: Plan, records: Sequence[Mapping[str, Any]]) -> dict[int, _Saved]:
        saved = {}
        for rank in frozen_ranks(plan):
            file = named_by(records[rank])
            if file is None:
                raise CorruptError(f"the frozen tensors of rank {rank} had not been hashed yet")
            if file in self._bad:
                raise CorruptError(self._bad[file])
            index = await self._files.index(file, plan, rank)
            image = plan.frozen_image(rank)
            if index is None or image is None:
                raise CorruptError(f"{file.key}: what is in it cannot be told, its index and every copy are lost")
            digests = dict(index.tensors)
            key = contents_key(image.header, digests.values())
            places = {box.name: (box, start, digests[box.name]) for box, start in image.places}
            saved[rank] = _Saved(file, index, key, places)
        return saved

    # ------------------------------------------------------------------ comparing

    async def _compare(self, plan: Plan, saved: Mapping[int, _Saved]) -> dict[Worker, list[Item]]:
        """By trainer, the items that its own tensors differ from."""
        asked = []
        for worker in self._crew.workers:
            of_rank = worker.rank if worker.rank < plan.world_size else 0
            asked.append(self._ask(worker, needed_by(plan, of_rank), saved))
        return dict(await asyncio.gather(*asked))

    async def _ask(self, worker: Worker, items: list[Item], saved: Mapping[int, _Saved]) -> tuple[Worker, list[Item]]:
        ticket = secrets.token_hex(16)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        worker.answers["frozen"] = answer
        body = {
            "op": "frozen_check",
            "ticket": ticket,
            "wanted": [_wanted(item, saved[item.rank]) for item in items],
            "files": [[one.key, one.file.to_json()] for one in saved.values()],
        }
        await worker.link.send(body)
        fields = Fields(await answer, "frozen_checked")
        if (error := fields.optional_text("error")) is not None:
            raise AgentError(f"rank {worker.rank} cannot compare its frozen tensors: {error}")
        if fields.text("ticket") != ticket:
            raise AgentError(f"rank {worker.rank} answers another question about its frozen tensors")
        return worker, [items[number] for number in fields.integers("differs") if number < len(items)]

    async def checked(self, worker: Worker, body: Body) -> None:
        """A trainer's answer."""
        future = worker.answers.get("frozen")
        if future is not None and not future.done():
            future.set_result(body)

    # ------------------------------------------------------------------ loading

    async def _load(self, saved: Mapping[int, _Saved], differing: Mapping[Worker, list[Item]]) -> None:
        started_s = boot_s()
        links: dict[Worker, Link] = {}
        try:
            for worker, items in differing.items():
                if items:
                    wanted = [[number, _wanted(item, saved[item.rank])] for number, item in enumerate(items)]
                    links[worker] = await self._desk.ask(worker, {"op": "frozen_load", "wanted": wanted})
            size_bytes, tiers = await self._send_all(saved, differing, links)
            for worker, link in links.items():
                await self._see_loaded(worker, link)
        finally:
            for link in links.values():
                link.release()
        took_s = round(boot_s() - started_s, 4)
        self._journal.record("frozen_loaded", bytes=size_bytes, tier=" + ".join(sorted(tiers)), seconds=took_s)

    async def _send_all(
        self, saved: Mapping[int, _Saved], differing: Mapping[Worker, list[Item]], links: Mapping[Worker, Link]
    ) -> tuple[int, set[str]]:
        size_bytes, tiers = 0, set()
        for item in {item.box.name + f"/{item.rank}": item for items in differing.values() for item in items}.values():
            takers = [(links[worker], items.index(item)) for worker, items in differing.items() if item in items]
            tiers.add(await self._send(saved[item.rank], item.box.name, takers))
            size_bytes += item.box.size_bytes
        return size_bytes, tiers

    async def _send(self, saved: _Saved, name: str, takers: list[tuple[Link, int]]) -> str:
        """Send one tensor from the nearest good copy; returns the tier's name.

        Raises:
            CorruptError: there is none.
        """
        why = "is not saved"
        for tier in self._files.near:
            try:
                await self._send_from(tier, saved, name, takers)
                return tier.name
            except _BadCopy as error:
                why = str(error)
                await self._files.refuse(tier, saved.file, why)
            except ObjectMissingError:
                # Said only if no other tier has it: a file may not have been saved everywhere yet.
                continue
            except TierError as error:
                if self._files.is_authority(tier):
                    raise
                await self._files.refuse(tier, saved.file, str(error))
        self._bad[saved.file] = f"{saved.file.key} {why}, and the script's own frozen tensors are others ({name})"
        raise CorruptError(self._bad[saved.file])

    async def _send_from(self, tier: Tier, saved: _Saved, name: str, takers: list[tuple[Link, int]]) -> None:
        box, offset, digest = saved.places[name]
        if await tier.size(saved.file.key) != saved.file.size_bytes:
            raise _BadCopy("has another size than was saved")
        for link, number in takers:
            await link.send({"number": number})
        hashing = TensorHash()
        buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
        fault: TierError | None = None
        for start in range(0, box.size_bytes, CHUNK_BYTES):
            part = buffer[: min(CHUNK_BYTES, box.size_bytes - start)]
            try:
                if fault is None:
                    await tier.read_into(saved.file.key, offset + start, part)
            except TierError as error:
                # The takers count bytes: they get the rest, whatever it is, and then the tensor from another copy.
                fault = error
            await asyncio.to_thread(hashing.update, part)
            await asyncio.gather(*(link.send_bytes(part) for link, _number in takers))
        if fault is not None:
            raise fault
        if hashing.finish() != digest:
            raise _BadCopy(f"has bytes in {name} that do not match their hash")

    async def _see_loaded(self, worker: Worker, link: Link) -> None:
        await link.send({"end": True})
        frame = await link.receive()
        if frame is None or frame[0].get("bad") != []:
            raise AgentError(f"rank {worker.rank} could not take its frozen tensors")


def _wanted(item: Item, saved: _Saved) -> list[Any]:
    box, _start, digest = saved.places[item.box.name]
    return [item.leaf, box.dtype, list(box.shape), list(box.offset), digest]
