"""A job that only goes through the phases: a supervisor with an agent and trainers, none of which trains anything.

    python phased_job.py STEPS RANKS [--hang-at STEP] [--fail-every STEPS] [--leave-child] [--exit CODE]

It publishes on a board as the real one does, starts again what dies, and ends as the real one ends. Its progress
lies in a file beside the script's output, so that it outlives the memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from surefoot.ipc.board import Board, NodeWord, Phase, RankWord

_BEAT_S = 0.001
_SUPERVISOR = os.getpid()
"""Its children end with it, whoever adopts them."""


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("steps", type=int)
    options.add_argument("ranks", type=int)
    options.add_argument("--progress", type=Path, required=True)
    options.add_argument("--hang-at", type=int, default=-1)
    options.add_argument("--fail-every", type=int, default=1 << 30)
    options.add_argument("--leave-child", action="store_true")
    options.add_argument("--exit", type=int, default=0)
    given = options.parse_args()
    print("a word on the way", flush=True)
    if given.leave_child and os.fork() == 0:
        os.setsid()
        time.sleep(3600)
    if given.exit:
        return int(given.exit)
    return supervise(given)


def supervise(given: argparse.Namespace) -> int:
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked.append(number))
    home = Path(os.environ["SUREFOOT_SHM"]) / "home"
    home.mkdir(exist_ok=True)
    board = Board.create(home / "board", given.ranks)
    agent = child(lambda: play_agent(board))
    trainers = start_trainers(board, given)
    while True:
        time.sleep(_BEAT_S)
        if asked:
            end([agent, *trainers])
            return 75
        ended = {pid: code for pid in (agent, *trainers) if (code := collect(pid)) is not None}
        if agent in ended:
            agent = child(lambda: play_agent(board))
        dead = [pid for pid in trainers if ended.get(pid)]
        if dead:
            end([pid for pid in trainers if pid not in ended])
            trainers = start_trainers(board, given)
            continue
        trainers = [pid for pid in trainers if pid not in ended]
        if not trainers:
            end([agent])
            board.path.unlink()
            home.rmdir()
            return 0


def start_trainers(board: Board, given: argparse.Namespace) -> list[int]:
    return [child(lambda rank=rank: play_trainer(board, rank, given)) for rank in range(given.ranks)]  # type: ignore[misc]


def play_agent(board: Board) -> None:
    board.set_node(NodeWord.PHASE, Phase.IDLE)
    board.set_node(NodeWord.AGENT_PID, os.getpid())
    while True:
        for phase in (Phase.IDLE, Phase.FLUSHING, Phase.COMMITTING):
            board.set_node(NodeWord.PHASE, phase)
            beat()


def play_trainer(board: Board, rank: int, given: argparse.Namespace) -> None:
    progress = Path(f"{given.progress}-{rank}")
    board.set_rank(rank, RankWord.PHASE, Phase.STARTING)
    board.set_rank(rank, RankWord.PID, os.getpid())
    beat()
    board.set_rank(rank, RankWord.PHASE, Phase.RESTORING)
    beat()
    begin = len(progress.read_bytes()) if progress.exists() else 0
    board.set_rank(rank, RankWord.STEP, begin + 1)
    board.set_rank(rank, RankWord.FINISHED, begin + 1)
    with progress.open("ab", buffering=0) as done:
        for step in range(begin, given.steps):
            board.set_rank(rank, RankWord.PHASE, Phase.TRAINING)
            beat()
            while step == given.hang_at:
                stay_here_for_ever()
            board.set_rank(rank, RankWord.STEP, step + 2)
            board.set_rank(rank, RankWord.FINISHED, step + 2)
            for phase in (Phase.FILLING, Phase.SEALED):
                board.set_rank(rank, RankWord.PHASE, phase)
                beat()
            done.write(b".")
            if (step + 1) % given.fail_every == 0:
                os._exit(1)


def stay_here_for_ever() -> None:
    time.sleep(3600)


def child(play: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    play()
    os._exit(0)


def beat() -> None:
    if os.getppid() != _SUPERVISOR:
        os._exit(1)
    time.sleep(_BEAT_S)


def collect(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def end(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
