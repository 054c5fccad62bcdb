"""`python -m surefoot.agent CONFIG FD`: the agent's process.

CONFIG is an `AgentConfig` as JSON. FD is a pipe's end, on which one line of JSON says that the agent is ready, or why
it cannot be.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surefoot.agent.agent import Agent
from surefoot.agent.journal import Journal
from surefoot.errors import RunBusyError, SurefootError
from surefoot.exits import leave
from surefoot.host.clock import boot_s, wall_s
from surefoot.host.priority import give_way
from surefoot.ipc.board import Board
from surefoot.ipc.home import Home, is_draining
from surefoot.launch.config import AgentConfig
from surefoot.records.records import Records
from surefoot.tiers.open import open_disks, open_tier
from surefoot.tiers.silence import spoken_of

_THREADS = 8
_NUM_RANKS = 64
"""Local ranks that a board has room for: 4 kB each."""
_WAIT_FOR_DRAINING_S = 150.0
_SETTLE_S = 1.0
_LOOK_EVERY_S = 0.1


def main() -> int:
    config = AgentConfig.from_json(sys.argv[1])
    pipe = int(sys.argv[2])
    # Slurm and shells send these to every process of a job; the agent is the one that must stay to the end.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        return asyncio.run(_run(config, pipe))
    except SurefootError as error:
        if not _say(pipe, {"error": str(error), "kind": type(error).__name__}):
            print(f"surefoot: {error}", file=sys.stderr)  # noqa: T201 - nobody else says it
        return 1


async def _run(config: AgentConfig, pipe: int) -> int:
    # What is done beside the loop is hashing, mostly.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "beside", initializer=give_way))
    # Until there is a journal.
    place = spoken_of(open_tier(config.uri))
    records = Records(place)
    record = await records.open_run(wall_s())
    home = await _take_home(record.run, config)
    journal = Journal.open(record.run, config.launch, config.node, records.tier, home.directory)
    place.told = lambda silence: journal.record(**place.event_of(silence))
    board = Board.create(home.board, _NUM_RANKS)
    agent = Agent(config, home, records, open_disks(config.disks), journal, board)

    def ready(socket: Path, board_path: Path) -> None:
        _say(pipe, {"socket": str(socket), "board": str(board_path), "run": record.run})

    return await agent.run(ready)


async def _take_home(run: str, config: AgentConfig) -> Home:
    """Take the run's lock; an agent on its way out is waited for."""
    start_s = boot_s()
    while True:
        try:
            return Home.take(run, config.launch, config.node)
        except RunBusyError:
            limit_s = _WAIT_FOR_DRAINING_S if is_draining(run) else _SETTLE_S
            if boot_s() - start_s > limit_s:
                raise
        await asyncio.sleep(_LOOK_EVERY_S)


def _say(pipe: int, message: dict[str, str]) -> bool:
    """Tell whoever started this agent. False if they are gone, or were told before."""
    try:
        os.write(pipe, json.dumps(message).encode() + b"\n")
        os.close(pipe)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    leave(main())
