"""The node agent: owns the run's memory on this machine and everything that leaves it. No torch in here."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from surefoot.agent.books import Books
from surefoot.agent.control import Link, Server
from surefoot.agent.crew import Crew, Worker
from surefoot.agent.eviction import Eviction, finished_on_all
from surefoot.agent.hasher import Hasher
from surefoot.agent.journal import Journal
from surefoot.agent.keeper import Keeper
from surefoot.agent.memory import Held, ImageSet, Memory
from surefoot.agent.pacer import Pacer
from surefoot.agent.pipeline import Pipeline
from surefoot.agent.planning import Planner
from surefoot.agent.shipping import Shipper
from surefoot.agent.start import Beginning, Starter
from surefoot.agent_config import AgentConfig
from surefoot.board import Board, NodeWord, Phase, RankWord
from surefoot.clock import boot_s, wall_s
from surefoot.core.documents import Fields
from surefoot.core.layout import StepId
from surefoot.core.manifest import Generation, Manifest
from surefoot.core.plan import Plan
from surefoot.errors import AgentError, SupersededError, SurefootError, TierError
from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED, SUPERSEDED
from surefoot.home import Home
from surefoot.notices.base import NoticeSource
from surefoot.notices.file import FileNotice
from surefoot.segment import Segment
from surefoot.tiers.base import Tier
from surefoot.wire import Body

_DRAIN_S = 120.0
"""Bound on finishing what is under way when everybody has left."""
_RETENTION_EVERY_S = 5.0
_ENSURE_S = 3600.0


class _Over(Exception):  # noqa: N818 - not an error: the way out of a task group
    """The launch is over."""


class Agent:
    """One run on one node, from the first connection to the last byte shipped."""

    def __init__(
        self, config: AgentConfig, home: Home, books: Books, disks: Tier | None, journal: Journal, board: Board
    ) -> None:
        self._config = config
        self._home = home
        self._books = books
        self._disks = disks
        self._journal = journal
        self._board = board
        self._memory = Memory(home, lambda what, why: self._bad_memory(what, why))
        self._pacer = Pacer(config.cadence.max_bytes_per_s)
        self._pipeline = Pipeline(books, disks, self._pacer, self._set_phase)
        self._shipper = Shipper(
            self._memory, self._pipeline, journal, config.cadence, self, self._after_commit, disks is not None
        )
        self._hasher = Hasher(self._memory, self._hashed)
        self._keeper = Keeper(books, disks, journal)
        self._crew = Crew(lambda: board, self._crew_complete, self._worker_gone)
        self._planner = Planner(
            self._memory, journal, config.num_slots, self._pinned_slots, lambda plan: self._set_plan(plan)
        )
        self._starter = Starter(books, disks, self._memory, journal, config.launch, config.node, config.resume)
        self._eviction = Eviction(self._crew, self._memory, self._shipper, journal, self)
        self._generation: Generation | None = None
        self._plan: Plan | None = None
        self._held_image: ImageSet | None = None
        self._start_wanted = asyncio.Event()
        self._begun_at = 0
        self._finished_before: int | None = None
        self._group: asyncio.TaskGroup | None = None
        self._checks: dict[int, tuple[Worker, Body]] = {}
        self._grants: dict[tuple[int, int, int], asyncio.Future[bool]] = {}
        self._sources: list[NoticeSource] = [FileNotice(config.watch)] if config.watch is not None else []
        self._supervisor: Link | None = None
        self._supervisor_done = asyncio.Event()
        self._superseded_by: str | None = None
        self._ending = asyncio.Event()
        self._retained_s = 0.0
        self._finished = False

    # ------------------------------------------------------------------ life

    async def run(self, ready: Callable[[Path, Path], None]) -> int:
        """Serve until the launch is over and everything that can be safe is. Returns the launch's exit code."""
        await self._adopt()
        server = Server(self._home.socket, self._converse)
        code = FINISHED
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                server.listen()
                for work in (
                    server.serve(group),
                    self._hasher.run(),
                    self._shipper.run(),
                    self._shipper.keep_time(),
                    self._journal.keep_uploading(),
                    self._start_generations(),
                    self._watch_age(),
                    *(self._watch(source) for source in self._sources),
                ):
                    group.create_task(work)
                ready(self._home.socket, self._home.board)
                code = await self._until_over()
                raise _Over
        except* _Over:
            # Raised inside the group, so that everything still running in it ends with the agent.
            pass
        await self._close(code)
        return code

    async def _adopt(self) -> None:
        """Take over what an earlier agent of this run left on this machine."""
        adopted = self._memory.adopt_files()
        restart = self._home.previous_launch == self._config.launch
        self._journal.record("agent_started", adopted=adopted, restart=restart)
        self._finished_before = self._board_finished()
        number = self._board.node(NodeWord.GENERATION)
        if restart:
            if number:
                self._generation = await self._books.generation(number)
                self._journal.generation = number
            self._eviction.resume_notice()
        else:
            for word in (NodeWord.NOTICE, NodeWord.SUPERSEDED, NodeWord.DEADLINE_NS, NodeWord.DURABLE_WANTED):
                self._board.set_node(word, 0)
        newest = self._board.node(NodeWord.COMMITTED) if restart else 0
        if newest and self._generation is not None:
            committed = [at for at in await self._books.commits() if at.step == newest - 1]
            self._shipper.committed = max(committed, default=None)
        self._shipper.restart_clock()

    async def _until_over(self) -> int:
        over = asyncio.create_task(self._launch_over())
        evicted = asyncio.create_task(self._eviction.see_through())
        stopped = asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait([over, evicted, stopped], return_when=asyncio.FIRST_COMPLETED)
            if evicted.done():
                safe = evicted.result()
                await self._eviction.clear_crew()
                code = EVICTED if safe or self._is_safe() else EVICTED_UNSAVED
            elif self._superseded_by is not None:
                code = SUPERSEDED
                await self._crew.gone(10.0)
            else:
                code = FINISHED
                await self._drain()
        finally:
            for task in (over, evicted, stopped):
                task.cancel()
        if self._eviction.noticed.is_set() and self._finished:
            code = FINISHED
        if self._supervisor is not None:
            await self._supervisor.send({"op": "drained", "code": code})
            await self._wait_for_supervisor()
        return code

    async def _launch_over(self) -> None:
        """Wait until nobody will start or continue training here."""
        if self._config.supervised:
            await self._supervisor_done.wait()
            return
        owner = await _process_gone(self._config.owner_pid)
        assert owner
        await self._crew.gone()

    async def _wait_for_supervisor(self) -> None:
        try:
            async with asyncio.timeout(10.0):
                await self._supervisor_done.wait()
        except TimeoutError:
            return

    async def _drain(self) -> None:
        """Everybody left: make the newest image durable if it is not, and finish what is under way."""
        self._home.set_draining()
        await self._shipper.drop_incomplete()
        if self._superseded_by is None:
            await self._ship_newest()
        end_s = boot_s() + _DRAIN_S
        while self._shipper.busy() and boot_s() < end_s:
            self._shipper.changed.clear()
            try:
                async with asyncio.timeout(0.5):
                    await self._shipper.changed.wait()
            except TimeoutError:
                continue

    async def _ship_newest(self) -> None:
        sets = [
            s
            for s in await self._memory.whole_sets()
            if self._shipper.committed is None or s.at > self._shipper.committed
        ]
        newest = max(sets, key=lambda s: s.at, default=None)
        if newest is not None and self._generation is not None and not self._shipper.delivering(newest.at):
            self._shipper.ship(newest, "agent")

    async def _close(self, code: int) -> None:
        await self._journal.close(2.0)
        self._memory.close()
        await self._books.tier.close()
        if self._disks is not None:
            await self._disks.close()
        if code in (FINISHED, EVICTED, SUPERSEDED) and not self._unsafe_memory():
            self._home.remove()
        self._home.release()

    def _unsafe_memory(self) -> bool:
        """True if memory holds a step that is not durable: it is left for the next launch to adopt."""
        newest = max((s.at for segment in self._memory.segments for s in segment.all_sealed()), default=None)
        if newest is None or self._superseded_by is not None:
            return False
        return self._shipper.committed is None or newest > self._shipper.committed

    # ------------------------------------------------------------------ conversations

    async def _converse(self, link: Link, first: Body, fds: list[int]) -> None:
        roles = {"trainer": self._serve_trainer, "supervisor": self._serve_supervisor, "cli": self._serve_command}
        serve = roles.get(str(first.get("role")))
        if serve is None:
            await link.send({"error": "the first frame names no role"})
            return
        await serve(link, first, fds)

    async def _serve_command(self, link: Link, first: Body, _fds: list[int]) -> None:
        operation = first.get("op")
        if operation == "evict":
            grace_s = Fields(first, "evict").number("grace_s") if "grace_s" in first else self._config.grace_s
            self._eviction.notice("surefoot evict", grace_s)
            await link.send({"ok": True})
        elif operation == "status":
            await link.send(self._status())
        else:
            await link.send({"error": f"unknown operation {operation!r}"})

    async def _serve_supervisor(self, link: Link, first: Body, _fds: list[int]) -> None:
        self._supervisor = link
        await link.send({"ok": True})
        frame: tuple[Body, list[int]] | None = (first, [])
        while frame is not None:
            await self._supervisor_says(link, frame[0])
            frame = await link.receive()
        if not self._supervisor_done.is_set():
            # It died: the job is over here, and nothing may train without it.
            self._journal.record("warning", what="the supervisor died: this node stops training")
            self._crew.stop_all()
            self._supervisor = None
            await self._crew.gone(5.0)
            self._supervisor_done.set()

    async def _tell_supervisor(self, operation: str) -> None:
        if self._supervisor is not None:
            await self._supervisor.send({"op": operation})

    async def _supervisor_says(self, link: Link, body: Body) -> None:
        operation = body.get("op")
        if operation == "notice":
            fields = Fields(body, "notice")
            self._eviction.notice(fields.text("source"), fields.optional_number("grace_s") or self._config.grace_s)
        elif operation == "progress":
            await link.reply(body, finished=self._board_finished(), begun_at=self._begun_at)
        elif operation == "done":
            self._finished = bool(body.get("finished"))
            self._supervisor_done.set()

    async def _serve_trainer(self, link: Link, first: Body, fds: list[int]) -> None:
        worker = await self._admit(link, first, fds)
        if worker is None:
            return
        while (frame := await link.receive()) is not None:
            await self._trainer_says(worker, frame[0])

    async def _admit(self, link: Link, hello: Body, fds: list[int]) -> Worker | None:
        refusal = self._refusal(hello)
        if refusal is not None:
            await link.reply(hello, **refusal)
            return None
        try:
            worker = self._crew.register(link, hello)
            if fds:
                self._memory.adopt_descriptor(fds[0])
        except SurefootError as error:
            await link.reply(hello, error=str(error), kind=type(error).__name__)
            return None
        if hello.get("reconnect"):
            await link.reply(hello, ok=True)
        return worker

    def _refusal(self, hello: Body) -> Body | None:
        if self._superseded_by is not None:
            return {"refused": f"superseded by {self._superseded_by}", "code": SUPERSEDED}
        if self._eviction.noticed.is_set() and not hello.get("reconnect"):
            return {"refused": "this machine is being evicted", "code": EVICTED}
        return None

    async def _trainer_says(self, worker: Worker, body: Body) -> None:
        operation = body.get("op")
        if operation == "sealed":
            await self._sealed(worker, body)
        elif operation == "report":
            await self._planner.report(worker, body)
        elif operation == "check":
            await self._check(worker, body)
        elif operation == "loaded":
            await self._loaded(worker, body)
        elif operation == "granted":
            self._granted(worker, body)
        elif operation == "wait":
            await self._promise(worker, body)
        elif operation == "ensure":
            self._spawn(self._ensure(worker, body))
        elif operation == "event":
            self._journal.record(Fields(body, "event").text("event"), **Fields(body, "event").mapping("fields"))
        elif operation == "notice":
            self._eviction.notice(str(body.get("source")), self._config.grace_s)
        elif operation == "need_slot":
            await self._shipper.make_room()
        elif operation == "bye":
            self._spawn(self._bye(worker, body))

    # ------------------------------------------------------------------ trainers come and go

    def _crew_complete(self) -> None:
        known = [bool(worker.hello.get("reconnect")) for worker in self._crew.workers]
        if not any(known):
            self._start_wanted.set()
        elif not all(known):
            # The agent before this one died while it let them start: some have, some have not.
            ranks = self._crew.stop_all()
            self._journal.record("stopped", ranks=ranks, why="the agent was lost while they started")

    def _worker_gone(self, worker: Worker) -> None:
        if not self._crew.workers:
            self._finished_before = self._board_finished(worker.local_world_size)
            self._planner.forget()
            self._checks.clear()
        if self._eviction.noticed.is_set() and not self._crew.workers:
            self._spawn(self._tell_supervisor("workers_gone"))
        if worker.leaving or worker.stopping:
            return
        step = max(0, self._board.rank(worker.local_rank, RankWord.FINISHED) - 1)
        self._journal.record("worker_lost", rank=worker.rank, pid=worker.pid, step=step)
        ranks = self._crew.stop_all()
        if ranks:
            self._journal.record("stopped", ranks=ranks, why=f"rank {worker.rank} died")

    async def _bye(self, worker: Worker, body: Body) -> None:
        worker.leaving = True
        if self._eviction.noticed.is_set() and all(other.leaving for other in self._crew.workers):
            # From here on torchrun could only start trainers that are refused.
            await self._tell_supervisor("workers_gone")
        self._journal.record("left", step=body.get("step"), finished=bool(body.get("finished")))
        self._finished = self._finished or bool(body.get("finished"))
        if body.get("wait_safe"):
            self._home.set_draining()
            while not self._is_safe() and self._eviction.noticed.is_set() and not self._past_deadline():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await worker.link.reply(body, safe=self._is_safe())

    async def _start_generations(self) -> None:
        while True:
            await self._start_wanted.wait()
            self._start_wanted.clear()
            workers = self._crew.workers
            try:
                await self._start_generation(workers)
            except SupersededError as error:
                self.superseded(str(error))
            except SurefootError as error:
                self._journal.record("warning", what=f"cannot start: {error}")
                for worker in workers:
                    await worker.link.reply(worker.hello, error=str(error), kind=type(error).__name__)

    async def _start_generation(self, workers: list[Worker]) -> None:
        await self._shipper.drop_incomplete()
        beginning = await self._starter.begin(workers[0].world_size, self._eviction.noticed.is_set)
        if beginning is None:
            for worker in workers:
                await worker.link.reply(worker.hello, **(self._refusal({}) or {}))
            return
        try:
            self._enter(beginning)
            await self._hand_over(beginning, workers)
        finally:
            self._starter.release(beginning.image)

    def _enter(self, beginning: Beginning) -> None:
        generation, image = beginning.generation, beginning.image
        self._generation = generation
        self._journal.generation = generation.number
        self._begun_at = image.source.at.step if image is not None else 0
        self._journal.record(
            "generation",
            parent=generation.parent and generation.parent.step,
            world_size=generation.world_size,
            workers=[worker.pid for worker in self._crew.workers],
        )
        self._held_image = image.held if image is not None else None
        if image is not None and image.source.committed:
            self._shipper.committed = image.source.at
        kept = list(image.held.parts) if image is not None and image.held is not None else []
        self._void_history(kept)
        self._board.set_node(NodeWord.GENERATION, generation.number)

    def _void_history(self, kept: list[Held]) -> None:
        pinned = self._shipper.pinned()
        uploading = [Held(segment, sealed) for segment, slot in pinned if (sealed := segment.sealed(slot)) is not None]
        self._memory.void_all_but([*kept, *uploading])

    async def _hand_over(self, beginning: Beginning, workers: list[Worker]) -> None:
        began_s = boot_s()
        image = beginning.image
        loop = asyncio.get_running_loop()
        loaded = []
        for worker in workers:
            worker.answers["loaded"] = loop.create_future()
            loaded.append(worker.answers["loaded"])
            await self._send_start(worker, beginning)
        answers = await asyncio.gather(*loaded, return_exceptions=True)
        errors = [str(a) if isinstance(a, BaseException) else str(a["error"]) for a in answers if _is_bad(a)]
        for worker, answer in zip(workers, answers, strict=True):
            if isinstance(answer, dict):
                await worker.link.reply(answer, **({"error": errors[0]} if errors else {"ok": True}))
        if errors:
            return
        self._shipper.restart_clock()
        phases = {**beginning.phases, "load": round(boot_s() - began_s, 4)}
        self._journal.record(
            "resumed",
            from_step=image.source.at.step if image is not None else None,
            tier=image.source.place if image is not None else None,
            redone_steps=self._redone(self._begun_at),
            phases=phases,
        )

    async def _send_start(self, worker: Worker, beginning: Beginning) -> None:
        image = beginning.image
        start: Body | None = None
        if image is not None:
            for fetched in image.fetched:
                await worker.link.send(
                    {"op": "image", "rank": fetched.rank, "offset": fetched.offset, "size": fetched.size_bytes},
                    (fetched.fd,),
                )
            known = worker.rank < len(image.records)
            start = {
                "step": image.source.at.step,
                "plan": image.plan.body,
                "record": dict(image.records[worker.rank if known else 0]),
                "of_rank": worker.rank if known else 0,
                "place": image.source.place,
            }
        await worker.link.reply(
            worker.hello,
            ok=True,
            run=self._home.run,
            generation=beginning.generation.number,
            board=str(self._home.board),
            start=start,
        )

    def _redone(self, from_step: int) -> int | None:
        return None if self._finished_before is None else max(0, self._finished_before - from_step)

    async def _check(self, worker: Worker, body: Body) -> None:
        """All ranks ask, all get the same answer: whether any of them must plan again before this image."""
        self._checks[worker.rank] = (worker, body)
        if len(self._checks) == worker.world_size:
            asked, self._checks = self._checks, {}
            replan = any(bool(request.get("drift")) for _worker, request in asked.values())
            for other, request in asked.values():
                await other.link.reply(request, replan=replan)

    # ------------------------------------------------------------------ images

    async def _sealed(self, worker: Worker, body: Body) -> None:
        fields = Fields(body, "sealed")
        slot, seq, step = fields.integer("slot"), fields.integer("seq"), fields.integer("step")
        at = StepId(step, fields.integer("generation", 1))
        segment = self._memory.find(worker.rank, fields.text("plan"))
        if segment is None:
            raise AgentError(f"rank {worker.rank} sealed a slot of a segment that nobody knows")
        trigger = fields.optional_text("trigger")
        if trigger is not None:
            tag = fields.optional_text("tag")
            self._shipper.sealed(segment, slot, seq, at, trigger, tag, worker.world_size)
        await self._shipper.passed(worker.rank, at)
        self._hasher.note(segment, slot)

    def _hashed(self, held: Held) -> None:
        """Once a step of the current plan is whole, what lies in segments of older plans is history."""
        plan = self._plan
        if plan is None or held.segment.plan_hash != plan.hash:
            return
        newest = [self._newest_hashed(rank, plan.hash) for rank in range(plan.world_size)]
        pinned = {id(segment) for segment, _slot in self._shipper.pinned()}
        if len({*newest}) == 1 and newest[0] is not None:
            older = [s for s in self._memory.segments if s.plan_hash != plan.hash and id(s) not in pinned]
            self._memory.drop(older)

    def _newest_hashed(self, rank: int, plan_hash: str) -> StepId | None:
        segment = self._memory.find(rank, plan_hash)
        sealed = segment.all_sealed() if segment is not None else []
        return max((s.at for s in sealed if s.image_hash is not None), default=None)

    def _pinned_slots(self) -> list[tuple[Segment, int]]:
        return self._shipper.pinned()

    def _set_plan(self, plan: Plan) -> None:
        self._plan = plan

    async def unpin(self, rank: int, segment: Segment, slot: int, seq: int) -> None:
        worker = self._crew.worker(rank)
        if worker is not None:
            await worker.link.send({"op": "unpin", "plan": segment.plan_hash, "slot": slot, "seq": seq})

    async def pin(self, images: ImageSet) -> bool:
        """Have every trainer keep its slot of a set. The dead keep theirs by being dead."""
        grants = []
        for part in images.parts:
            worker = self._crew.worker(part.segment.rank)
            if worker is not None and not worker.leaving:
                key = (worker.rank, part.sealed.slot, part.sealed.seq)
                self._grants[key] = asyncio.get_running_loop().create_future()
                grants.append(self._grants[key])
                await worker.link.send(
                    {"op": "pin", "plan": part.segment.plan_hash, "slot": part.sealed.slot, "seq": part.sealed.seq}
                )
        try:
            async with asyncio.timeout(2.0):
                granted = all(await asyncio.gather(*grants))
        except TimeoutError:
            granted = False
        return granted and all(part.unchanged() for part in images.parts)

    def _granted(self, worker: Worker, body: Body) -> None:
        fields = Fields(body, "granted")
        future = self._grants.pop((worker.rank, fields.integer("slot"), fields.integer("seq")), None)
        if future is not None and not future.done():
            future.set_result(bool(body.get("ok")))

    # ------------------------------------------------------------------ what parts ask of the whole

    def board(self) -> Board:
        return self._board

    def generation(self) -> Generation:
        assert self._generation is not None
        return self._generation

    def finished_on_all(self) -> int | None:
        return self._board_finished()

    def newest_safe(self) -> StepId | None:
        return self._shipper.committed

    def superseded(self, why: str) -> None:
        """A newer launch owns the run: stop writing and training, at once and for good."""
        if self._superseded_by is None:
            self._superseded_by = why
            self._journal.record("superseded", by=why)
            self._board.set_node(NodeWord.SUPERSEDED, 1)
            self._crew.stop_all()
            self._ending.set()

    async def quarantine(self, what: str, tier: str, why: str) -> None:
        self._journal.record("quarantined", object=what, tier=tier, why=why)

    async def make_space(self) -> None:
        """A tier is full: what was given up goes now instead of an hour later."""
        if self._generation is None:
            return
        try:
            freed = await self._keeper.run(self._generation.number, sweep_delay_s=0.0)
        except (TierError, SupersededError) as error:
            self._journal.record("warning", what=f"no space could be made: {error}")
        else:
            if not freed:
                self._journal.record(
                    "warning", what=f"{self._books.tier.uri} is full and holds nothing to delete: free some space there"
                )

    async def _after_commit(self, manifest: Manifest) -> None:
        if boot_s() - self._retained_s < _RETENTION_EVERY_S or self._eviction.noticed.is_set():
            return
        self._retained_s = boot_s()
        try:
            await self._keeper.note(manifest)
        except TierError as error:
            self._journal.record("warning", what=f"old checkpoints could not be given up: {error}")
        except SupersededError as error:
            self.superseded(str(error))

    async def _promise(self, worker: Worker, body: Body) -> None:
        fields = Fields(body, "wait")
        future = self._shipper.wait(StepId(fields.integer("step"), fields.integer("generation", 1)))
        future.add_done_callback(
            lambda done: (
                asyncio.ensure_future(worker.link.reply(body, error=done.result())) if not done.cancelled() else None
            )
        )

    async def _ensure(self, worker: Worker, body: Body) -> None:
        """All steps are done: answer when the last one is durable, shipping it if nothing else does."""
        step = Fields(body, "ensure").integer("step")
        end_s = boot_s() + _ENSURE_S
        while boot_s() < end_s:
            committed = self._shipper.committed
            if committed is not None and committed.step >= step:
                await worker.link.reply(body, ok=True)
                return
            at = await self._under_way(step)
            if at is None:
                await asyncio.sleep(0.05)
                continue
            why = await self._shipper.wait(at)
            if why is not None:
                await worker.link.reply(body, error=f"step {step} could not be made durable: {why}")
                return
        await worker.link.reply(body, error=f"step {step} is neither durable nor in memory")

    async def _under_way(self, step: int) -> StepId | None:
        """A step at or past `step` that is being shipped, from now on if need be."""
        under_way = self._shipper.newest_under_way()
        if under_way is not None and under_way.step >= step:
            return under_way
        sets = [images for images in await self._memory.whole_sets() if images.at.step >= step]
        newest = max(sets, key=lambda images: images.at, default=None)
        if newest is None or not await self.pin(newest):
            return None
        if not self._shipper.delivering(newest.at):
            self._shipper.ship(newest, "final")
        return newest.at

    # ------------------------------------------------------------------ small things

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Answer a request that takes time without keeping its connection from being read."""
        assert self._group is not None
        self._group.create_task(work)

    async def _loaded(self, worker: Worker, body: Body) -> None:
        future = worker.answers.get("loaded")
        if future is None:
            # Asked of the agent that this one replaces; a rank that could not load ends by itself, and all with it.
            await worker.link.reply(body, ok=True)
        elif not future.done():
            future.set_result(body)

    def _board_finished(self, local_ranks: int | None = None) -> int | None:
        workers = self._crew.workers
        ranks = local_ranks or (workers[0].local_world_size if workers else self._ranks_on_board())
        return finished_on_all(self._board, ranks) if ranks else None

    def _ranks_on_board(self) -> int:
        return sum(1 for rank in range(self._board.num_ranks) if self._board.rank(rank, RankWord.INCARNATION))

    def _is_safe(self) -> bool:
        finished = self._board_finished()
        committed = self._shipper.committed
        return not finished or (committed is not None and committed.step >= finished)

    def _past_deadline(self) -> bool:
        deadline_ns = self._board.node(NodeWord.DEADLINE_NS)
        return bool(deadline_ns) and boot_s() > deadline_ns / 1e9

    def _set_phase(self, phase: Phase) -> None:
        self._board.set_node(NodeWord.PHASE, phase)

    def _bad_memory(self, what: str, why: str) -> None:
        self._journal.record("quarantined", object=what, tier="ram", why=why)

    async def _watch(self, source: NoticeSource) -> None:
        notice = await source.wait()
        self._eviction.notice(notice.source, notice.grace_s or self._config.grace_s)

    async def _watch_age(self) -> None:
        """Say so, once a while, when the newest durable checkpoint has grown too old."""
        said_s = boot_s()
        while True:
            await asyncio.sleep(5.0)
            age_s = self._durable_age_s()
            limit_s = max(600.0, 3 * (self._config.cadence.interval_s or 300.0))
            if self._crew.workers and age_s is not None and age_s > limit_s and boot_s() - said_s > limit_s:
                said_s = boot_s()
                committed = self._shipper.committed
                self._journal.record(
                    "durable_age",
                    age_s=round(age_s, 1),
                    step=committed.step if committed else None,
                    tier=self._shipper.committed_tier,
                )

    def _durable_age_s(self) -> float | None:
        staged_ns = self._board.node(NodeWord.COMMITTED_NS)
        return boot_s() - staged_ns / 1e9 if staged_ns else None

    def _status(self) -> Body:
        return {
            "run": self._home.run,
            "uri": self._books.tier.uri,
            "launch": self._config.launch,
            "generation": self._generation.number if self._generation else 0,
            "ranks": [
                {
                    "rank": worker.rank,
                    "pid": worker.pid,
                    "finished": max(0, self._board.rank(worker.local_rank, RankWord.FINISHED) - 1),
                    "phase": Phase(self._board.rank(worker.local_rank, RankWord.PHASE)).name.lower(),
                }
                for worker in self._crew.workers
            ],
            "durable_age_s": self._durable_age_s(),
            "notice": bool(self._board.node(NodeWord.NOTICE)),
            "deadline_in_s": self._board.node(NodeWord.DEADLINE_NS) / 1e9 - boot_s()
            if self._board.node(NodeWord.NOTICE)
            else None,
            "time": wall_s(),
            **self._shipper.status(),
        }


def _is_bad(answer: object) -> bool:
    return isinstance(answer, BaseException) or (isinstance(answer, dict) and bool(answer.get("error")))


async def _process_gone(pid: int) -> bool:
    """Wait for the end of a process; at once if it is gone, or if there is none to wait for."""
    if not pid:
        return True
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(pidfd, gone.set)
    try:
        await gone.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)
    return True
