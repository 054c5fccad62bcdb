"""Asks the trainers that wait for a start what they need of a checkpoint that was saved in another layout.

They are asked before the generation is claimed, as part of the answer that they wait for; each answers with regions of
the plan's items. A rank saved as it is now needs no question, or answers "the same", and is given whole shards.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.agent.clients.trainers import Trainer, Trainers
from surefoot.core.documents import Fields
from surefoot.core.dtypes import ITEM_BYTES
from surefoot.core.plan import Plan
from surefoot.core.ranges import Range, Region, merged, region_ranges, union_elements
from surefoot.errors import AgentError, ConfigError
from surefoot.ipc.wire import Body


@dataclass(frozen=True, slots=True)
class Needs:
    """What the trainers of one node need of a checkpoint, all together."""

    plan: Plan
    regions: Mapping[int, frozenset[Region]]
    """By the number of the plan's item."""

    @property
    def size_bytes(self) -> int:
        """Bytes that at least one of them needs."""
        return sum(
            union_elements(regions) * ITEM_BYTES[self.plan.items[number].box.dtype]
            for number, regions in self.regions.items()
        )

    def ranges(self, rank: int, gap_bytes: int) -> list[Range]:
        """Where in a saved rank's image that lies; gaps shorter than `gap_bytes` are left out."""
        starts = {box.name: start for box, start in self.plan.image(rank).places}
        return merged(
            one
            for number, regions in self.regions.items()
            if (item := self.plan.items[number]).rank == rank and not item.frozen
            for region in regions
            for one in region_ranges(item.box, starts[item.box.name], region, gap_bytes)
        )


class NeedsOfTrainers:
    """Asks, and waits for the answers."""

    def __init__(self, trainers: Trainers) -> None:
        self._trainers = trainers
        self._known: dict[str, Needs | None] = {}
        """By plan: what trainers have does not change while they wait."""

    def forget(self) -> None:
        """A new start begins: these are other trainers."""
        self._known.clear()

    async def ask(self, plan: Plan) -> Needs | None:
        """What this node's trainers need; None if they are to be given whole shards.

        Raises:
            ConfigError: one needs what the checkpoint does not have; the message names the path.
            AgentError: one ended, or broke off.
        """
        if plan.hash not in self._known:
            trainers = self._trainers.live
            asked = _must_be_asked(plan, trainers)
            self._known[plan.hash] = await self._ask_all(plan, trainers) if asked else None
        return self._known[plan.hash]

    async def answered(self, trainer: Trainer, body: Body) -> None:
        """A trainer's answer."""
        future = trainer.answers.get("needs")
        # No one waits for an answer to a question from before this agent came, or of a start that is over.
        if future is not None and not future.done():
            future.set_result(body)

    async def _ask_all(self, plan: Plan, trainers: Sequence[Trainer]) -> Needs | None:
        answers = await asyncio.gather(*(self._ask(trainer, plan) for trainer in trainers))
        same = all(answer.flag("same") for answer in answers)
        if same and len(trainers) == trainers[0].world_size:
            return None
        regions: dict[int, set[Region]] = {}
        for trainer, answer in zip(trainers, answers, strict=True):
            for number, region in _regions(plan, answer.items("regions"), trainer.rank):
                regions.setdefault(number, set()).add(region)
        return Needs(plan, {number: frozenset(found) for number, found in regions.items()})

    async def _ask(self, trainer: Trainer, plan: Plan) -> Fields:
        ticket = secrets.token_hex(16)
        answer: asyncio.Future[Body] = asyncio.get_running_loop().create_future()
        trainer.answers["needs"] = answer
        question = {"ticket": ticket, "plan": plan.body, "of_rank": of_rank(plan, trainer.rank)}
        await trainer.link.reply(trainer.hello, question=question)
        fields = Fields(await answer, "needs")
        if fields.text("ticket") != ticket:
            raise AgentError(f"rank {trainer.rank} answers another question about what it needs")
        if (error := fields.optional_text("error")) is not None:
            raise ConfigError(error)
        return fields


def of_rank(plan: Plan, rank: int) -> int:
    """The saved rank whose structure, own tensors and values a rank takes; rank 0's if there was none of its number."""
    return rank if rank < plan.world_size else 0


def _must_be_asked(plan: Plan, trainers: Sequence[Trainer]) -> bool:
    """False where whole shards will do in any case: nothing is sharded, then or now, and no rank came or went."""
    sharded = [trainer.hello.get("sharded") for trainer in trainers]
    # A rank that does not report whether anything of it is sharded cannot be asked.
    if any(type(one) is not bool for one in sharded):
        return False
    return any(sharded) or bool(plan.blocks) or plan.world_size != trainers[0].world_size


def _regions(plan: Plan, told: Sequence[Any], rank: int) -> list[tuple[int, Region]]:
    found = []
    for one in told:
        fields = Fields(one, f"needs of rank {rank}")
        number = fields.integer("item")
        region = Region(fields.integers("offset"), fields.integers("lengths"))
        if number >= len(plan.items) or not region.is_inside(plan.items[number].box):
            raise AgentError(f"rank {rank} needs a region that item {number} of its plan does not have")
        found.append((number, region))
    return found
