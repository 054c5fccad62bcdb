"""This node: what every part of the agent stands on, made before them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from surefoot.agent.clients.trainers import Trainers
from surefoot.agent.journal import Journal
from surefoot.agent.memory.memory import Memory
from surefoot.agent.nodes.membership import Membership
from surefoot.agent.status import Status


@dataclass(frozen=True, slots=True)
class Node:
    """Who is here, what is in memory, what is known, and the tasks that the agent's end ends."""

    membership: Membership
    trainers: Trainers
    memory: Memory
    status: Status
    journal: Journal
    tasks: asyncio.TaskGroup
