"""Opens a generation: when all trainers are here, gives each its starting state, and lets them go together."""

from __future__ import annotations

import asyncio

from surefoot.agent.clients.trainers import Trainer
from surefoot.agent.evict.eviction import Eviction
from surefoot.agent.memory.memory import Held
from surefoot.agent.node import Node
from surefoot.agent.nodes.relay import Relay
from surefoot.agent.save.clock import SaveClock
from surefoot.agent.save.shipping import Shipper
from surefoot.agent.start.choosing import Beginning, Starter, release
from surefoot.agent.start.needs import of_rank
from surefoot.errors import SupersededError, SurefootError
from surefoot.host.clock import boot_s
from surefoot.ipc.wire import Body

COMPLETE_WITHIN_S = 60.0
"""The trainers of one launch come within this; otherwise the missing ones are named."""


class Opening:
    """Waits for whole launches, one after the other."""

    def __init__(
        self,
        run: str,
        node: Node,
        relay: Relay,
        starter: Starter,
        shipper: Shipper,
        clock: SaveClock,
        eviction: Eviction,
    ) -> None:
        self._run = run
        self._membership = node.membership
        self._trainers = node.trainers
        self._memory = node.memory
        self._status = node.status
        self._journal = node.journal
        self._tasks = node.tasks
        self._relay = relay
        self._starter = starter
        self._shipper = shipper
        self._clock = clock
        self._refusal = eviction.refusal
        self._wanted = asyncio.Event()
        node.trainers.hear("loaded", self._loaded)
        node.trainers.when_complete(self._trainers_complete)

    async def _loaded(self, trainer: Trainer, body: Body) -> None:
        future = trainer.answers.get("loaded")
        if future is None:
            # Asked of the agent that this one replaces; a rank that could not load ends by itself, and all with it.
            await trainer.link.reply(body, ok=True)
        elif not future.done():
            future.set_result(body)

    def _trainers_complete(self) -> None:
        """The last of this node's trainers has come."""
        known = [bool(trainer.hello.get("reconnect")) for trainer in self._trainers.live]
        if not any(known):
            self._wanted.set()
        elif all(known):
            if "round" in self._trainers.live[0].hello:
                self._tasks.create_task(self.meet_again())
        else:
            # The agent before this one died while it let them start: some have started, some have not.
            self._journal.record(
                "stopped", ranks=self._trainers.stop_all(), why="the agent was lost while they started"
            )

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            trainers = self._trainers.live
            try:
                await self._open(trainers)
            except SupersededError as error:
                self._status.supersede(str(error))
                for trainer in trainers:
                    await trainer.link.reply(trainer.hello, **(self._refusal() or {}))
            except SurefootError as error:
                self._journal.record("warning", what=f"cannot start: {error}")
                for trainer in trainers:
                    await trainer.link.reply(trainer.hello, error=str(error), kind=type(error).__name__)

    async def name_the_missing(self) -> None:
        """Report the missing ranks to an incomplete launch: the script opened the run on some ranks only."""
        while True:
            await self._trainers.incomplete_for(COMPLETE_WITHIN_S)
            here = [trainer.rank for trainer in self._trainers.live]
            first = self._trainers.live[0]
            missing = f"rank(s) {sorted(set(range(first.world_size)) - set(here))}"
            if first.local_world_size < first.world_size:
                missing = f"{first.local_world_size - len(here)} other rank(s) of this machine"
            for trainer in self._trainers.live:
                await trainer.link.reply(
                    trainer.hello,
                    error=f"rank(s) {here} opened the run, {missing} did not within "
                    f"{COMPLETE_WITHIN_S:.0f} s: open surefoot.Run on every rank",
                    kind="UsageError",
                )
            await self._trainers.gone()

    async def _open(self, trainers: list[Trainer]) -> None:
        await self._shipper.drop_incomplete()
        await self._meet(trainers, again=False)
        beginning = await self._starter.begin(trainers[0].world_size, lambda: self._refusal() is not None)
        if beginning is None:
            for trainer in trainers:
                await trainer.link.reply(trainer.hello, **(self._refusal() or {}))
            return
        try:
            self._enter(beginning)
            await self._hand_over(beginning, trainers)
        finally:
            release(beginning.image)

    async def _meet(self, trainers: list[Trainer], *, again: bool) -> None:
        first, ranks = trainers[0], [trainer.rank for trainer in trainers]
        nonce, meet = str(first.hello.get("round", "")), str(first.hello.get("meet", ""))
        await self._membership.enter(nonce, meet, ranks, first.world_size, again=again)

    async def meet_again(self) -> None:
        """This agent replaces one whose trainers train on: take its place among the other nodes' agents."""
        trainers = self._trainers.live
        try:
            await self._meet(trainers, again=True)
        except SurefootError as error:
            why = f"cannot take its place among the other nodes: {error}"
            self._journal.record("warning", what=why)
            self._membership.miss(why)
            # Nothing that they train from here on could be saved.
            self._journal.record("stopped", ranks=self._trainers.stop_all(), why=why)
            return
        self._relay.begin(self._status.generation.number, len(trainers))
        self._relay.tell()

    def _enter(self, beginning: Beginning) -> None:
        generation, image = beginning.generation, beginning.image
        self._journal.generation = generation.number
        self._journal.record(
            "generation",
            parent=generation.parent and generation.parent.step,
            world_size=generation.world_size,
            trainers=[trainer.pid for trainer in self._trainers.live],
        )
        self._status.rebase(
            image.source.at if image is not None else None, committed=image is not None and image.source.committed
        )
        self._void_history(list(image.held.parts) if image is not None and image.held is not None else [])
        self._status.enter(generation, image.source.at if image is not None else None)
        self._status.forget_ranks(len(self._trainers.live))
        self._relay.begin(generation.number, len(self._trainers.live))

    def _void_history(self, kept: list[Held]) -> None:
        uploading = [
            Held(segment, sealed)
            for segment, slot in self._shipper.pinned()
            if (sealed := segment.sealed(slot)) is not None
        ]
        self._memory.void_all_but([*kept, *uploading])

    async def _hand_over(self, beginning: Beginning, trainers: list[Trainer]) -> None:
        began_s = boot_s()
        loop = asyncio.get_running_loop()
        loaded = []
        for trainer in trainers:
            trainer.answers["loaded"] = loop.create_future()
            loaded.append(trainer.answers["loaded"])
            await self._send_start(trainer, beginning)
        answers = await asyncio.gather(*loaded, return_exceptions=True)
        # One rank's failure is every rank's, with the first cause as text, within moments and by no collective.
        mine = next((_problem(answer) for answer in answers if _problem(answer)), None)
        brought = await self._membership.gather(f"loaded {beginning.generation.number}", {"error": mine})
        errors = [str(one["error"]) for one in brought if one.get("error")]
        for trainer, answer in zip(trainers, answers, strict=True):
            if isinstance(answer, dict):
                await trainer.link.reply(answer, **({"error": errors[0]} if errors else {"ok": True}))
        if not errors:
            self._clock.restart()
            self._say_resumed(beginning, boot_s() - began_s)

    def _say_resumed(self, beginning: Beginning, load_s: float) -> None:
        image = beginning.image
        before = self._status.steps_before
        self._journal.record(
            "resumed",
            from_step=image.source.at.step if image is not None else None,
            tier=image.source.place if image is not None else None,
            redone_steps=None if before is None else max(0, before - (self._status.begun_at_step or 0)),
            phases={**beginning.phases, "load": round(load_s, 4)},
            reads=image.reads.to_json() if image is not None and image.reads is not None else None,
        )

    async def _send_start(self, trainer: Trainer, beginning: Beginning) -> None:
        image = beginning.image
        start: Body | None = None
        if image is not None:
            for fetched in image.fetched:
                place: Body = {"rank": fetched.rank, "offset": fetched.offset, "size": fetched.size_bytes}
                place |= {"ranges": None if fetched.ranges is None else [list(one) for one in fetched.ranges]}
                await trainer.link.send({"op": "image", **place}, (fetched.fd,))
            saved_rank = of_rank(image.plan, trainer.rank)
            start = {
                **image.source.at.to_json(),
                "plan": image.plan.body,
                "record": dict(image.records[saved_rank]),
                "of_rank": saved_rank,
                "place": image.source.place,
            }
        await trainer.link.reply(
            trainer.hello,
            ok=True,
            run=self._run,
            generation=beginning.generation.number,
            board=str(self._status.board.path),
            start=start,
        )


def _problem(answer: object) -> str:
    if isinstance(answer, BaseException):
        return str(answer)
    assert isinstance(answer, dict)
    return str(answer.get("error") or "")
