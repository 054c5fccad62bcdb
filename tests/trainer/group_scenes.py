"""What ranks do to learn how a group breaks, and how the trainers' agreement takes it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from surefoot.core.agreement import Vector
from surefoot.ipc.board import Board
from surefoot.trainer.boundary.agreement import Agreement, GlooAgreement
from surefoot.trainer.boundary.board_agreement import BoardAgreement
from surefoot.trainer.boundary.environment import Ranks
from surefoot.trainer.boundary.page import Page


def _reduce(group: dist.ProcessGroup | None = None) -> str:
    """The sum over the ranks of one each, or the kind of error."""
    ones = torch.ones(1)
    try:
        dist.all_reduce(ones, group=group)
    except RuntimeError as error:
        return type(error).__name__
    return str(int(ones))


def one_is_late(line: Connection, timeout_s: float) -> None:
    """Rank 1 comes to a group's reduction only after the others have given up; then both use both groups."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    # At one moment, however slowly the ranks came here.
    dist.barrier()
    line.send(_reduce(group))
    if dist.get_rank() == 1:
        # Told once rank 0 has given up.
        line.recv()
    line.send(_reduce(group))
    line.recv()
    line.send(_reduce(group))
    line.send(_reduce())


def one_stands_still(line: Connection, timeout_s: float) -> None:
    """Rank 0 reduces in a group with a rank that was stopped; later in the group of all."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    # At one moment, however slowly the ranks came here.
    dist.barrier()
    line.send(_reduce(group))
    line.recv()
    line.send(_reduce(group))
    line.recv()
    line.send(_reduce())


def one_ends(line: Connection, how: str) -> None:
    """Rank 1 ends in the middle of a group's life, with no time-out in sight; rank 0 says what it saw."""
    group = dist.new_group(backend="gloo", timeout=timedelta(hours=24))
    line.send(_reduce(group))
    if dist.get_rank() == 1:
        _end(line, how, lambda: dist.all_reduce(torch.ones(1), group=group, async_op=True))
    line.send(_reduce(group))
    line.send(_reduce(group))


def _end(line: Connection, how: str, post: Callable[[], object]) -> None:
    if how == "exception":
        raise ArithmeticError("the loss is not finite")
    if how == "pending":
        post()
        raise SystemExit(1)
    # Nobody says anything more: until it is killed.
    line.recv()


def _agreement(board: str | None) -> Agreement:
    """Of a group, or by a board that lies there."""
    if board is None:
        return GlooAgreement()
    return BoardAgreement(_page(board), 1)


def _page(board: str) -> Page:
    """Of this rank, all ranks' being open."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    page = Page(Board.open(Path(board)), Ranks(rank, world_size, rank, world_size), rank + 1)
    page.open(1, os.getpid())
    dist.barrier()
    return page


def agreement_of_mortals(line: Connection, how: str, board: str | None = None) -> None:
    """Rank 1 ends, one way or another; rank 0 goes on to settle and post at its boundaries."""
    agreement = _agreement(board)
    agreement.post(Vector(stage_every=3 if dist.get_rank() else 2, free_slots=2))
    line.send(agreement.settle(Vector).stage_every)
    if dist.get_rank() == 1 and how != "leaves":
        _end(line, how, lambda: agreement.post(Vector(free_slots=2)))
    if dist.get_rank() == 1:
        agreement.post(Vector(free_slots=2))
        agreement.leave()
        return
    for _boundary in range(6):
        agreement.post(Vector(notice=True, free_slots=2, stage_every=7))
        line.send(agreement.settle(lambda: Vector(stage_every=5, free_slots=2)))
    agreement.leave()
    line.send("left")


def agreement_of_many(line: Connection, board: str, seed: int, boundaries: int) -> None:
    """Every rank brings what seed, rank and boundary say, at its own pace; says what came of each."""
    agreement = _agreement(board)
    pace = random.Random(dist.get_rank())
    agreement.post(drawn(seed, dist.get_rank(), 0))
    agreed = []
    for boundary in range(1, boundaries):
        agreed.append(agreement.settle(Vector))
        agreement.post(drawn(seed, dist.get_rank(), boundary))
        if pace.random() < 0.01:
            time.sleep(pace.random() / 500)
    line.send(agreed)
    line.recv()
    agreement.leave()
    line.send("left")


def drawn(seed: int, rank: int, boundary: int) -> Vector:
    """What a rank brings to a boundary."""
    rng = random.Random(f"{seed} {rank} {boundary}")
    some = [rng.random() < 0.2 for _ in range(3)]
    return Vector(some[0], some[1], False, some[2], rng.randrange(4), rng.randrange(1, 5))


def agreement_with_one_that_lives_on(line: Connection, board: str) -> None:
    """Rank 1 leaves the run by an exception of its own, and its process lives on; rank 0 comes to its boundary."""
    page = _page(board)
    agreement = BoardAgreement(page, 1)
    agreement.post(Vector(free_slots=2))
    line.send(agreement.settle(Vector))
    if dist.get_rank() == 1:
        page.leave()
        line.recv()
        return
    agreement.post(Vector(free_slots=2))
    line.send(agreement.settle(Vector))
    line.send(agreement.settle(lambda: Vector(stage_every=9)))


def agreement_with_one_that_stands_still(line: Connection, board: str) -> None:
    """Each says what was agreed at its boundaries; rank 1 is stopped for a while before its second."""
    agreement = BoardAgreement(_page(board), 1)
    for boundary in range(3):
        agreement.post(Vector(stage_every=10 * boundary + dist.get_rank() + 1))
        line.send(agreement.settle(Vector).stage_every)
        line.recv()


def agreement_beside_the_users_group(line: Connection) -> None:
    """The agreement breaks, and the user's own group does not hear of it."""
    agreement = GlooAgreement()
    agreement._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    if dist.get_rank() == 0:
        agreement.post(Vector(free_slots=1))
        line.send(agreement.settle(Vector))
    line.recv()
    line.send(_reduce())
    # The late one posts into what is broken by now.
    agreement.post(Vector(free_slots=1))
    line.send(agreement.settle(Vector))
    line.send(_reduce())
