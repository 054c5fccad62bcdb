"""Defines the ways to save that are compared. Each is used as its documentation prescribes, and none tears a save."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

import surefoot
from surefoot.bench.worker import Training
from surefoot.ipc.board import Board, NodeWord

_NEVER_DUE_S = 1e9
_NO_STAGING = 1 << 40


class Method(Protocol):
    """One way to save. The order in a step: forward and backward, `before_optimizer`, optimizer, `boundary`."""

    def before_optimizer(self) -> None:
        """The state is about to change: wait for those that still read it."""

    def boundary(self, number: int | None) -> None:
        """A step is finished; with a number, save it."""

    def sealed(self) -> bool:
        """The last save has all it needs in memory of its own."""

    def durable(self) -> bool:
        """The last save's last byte is on the device. Asked by another thread."""

    def close(self) -> None: ...


class Nothing:
    """Saves nothing: the stall that it shows is the measurement's noise."""

    def before_optimizer(self) -> None:
        return

    def boundary(self, number: int | None) -> None:
        return

    def sealed(self) -> bool:
        return True

    def durable(self) -> bool:
        return True

    def close(self) -> None:
        return


class Memcpy(Nothing):
    """Keeps nothing: one plain copy of the state behind the next step, which is neither hashed nor written. The stall
    that it shows is the cost of a copy on this machine, however it is hidden."""

    def __init__(self, training: Training) -> None:
        self._pairs = [(torch.empty_like(tensor), tensor) for tensor in training.tensors().values()]
        for target, source in self._pairs:
            target.copy_(source)
        self._copier = ThreadPoolExecutor(1)
        self._copy: Future[None] | None = None

    def before_optimizer(self) -> None:
        if self._copy is not None:
            self._copy.result()

    def boundary(self, number: int | None) -> None:
        if number is not None:
            self._copy = self._copier.submit(self._run)

    def sealed(self) -> bool:
        return self._copy is None or _is_done(self._copy)

    def close(self) -> None:
        self._copier.shutdown()

    def _run(self) -> None:
        for target, source in self._pairs:
            target.copy_(source)


class TorchSave(Nothing):
    """Each rank's state by `torch.save`, with fsync, in the training thread."""

    def __init__(self, training: Training, place: Path, rank: int) -> None:
        self._training, self._place, self._rank = training, place, rank

    def boundary(self, number: int | None) -> None:
        if number is None:
            return
        with (self._place / f"{number}-{self._rank}.pt").open("wb") as file:
            torch.save(self._training.tensors(), file)
            file.flush()
            os.fsync(file.fileno())


class DcpSave(Nothing):
    """PyTorch's distributed checkpoint, all of it in the training thread."""

    def __init__(self, training: Training, place: Path, rank: int) -> None:
        self._training, self._place, self._rank = training, place, rank
        self._group = dist.new_group(backend="gloo")

    def boundary(self, number: int | None) -> None:
        if number is not None:
            dcp.save(self._state(), checkpoint_id=str(self._place / str(number)), process_group=self._group)

    def _state(self) -> dict[str, Any]:
        # By names of its own, or a rank's tensors would be taken for another's copy, and written once only.
        return dict(self._training.tensors(f"rank{self._rank}."))


class DcpAsyncSave(DcpSave):
    """PyTorch's distributed checkpoint behind training, flushed by a thread or a process of its own."""

    def __init__(self, training: Training, place: Path, rank: int, *, process: bool, shared: bool) -> None:
        super().__init__(training, place, rank)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        self._stager = _shared_stager() if shared else None
        self._staging: Future[Any] | None = None
        self._upload: Future[Any] | None = None

    def before_optimizer(self) -> None:
        if self._staging is not None:
            self._staging.result()

    def boundary(self, number: int | None) -> None:
        if number is None:
            return
        answer = dcp.async_save(
            self._state(),
            checkpoint_id=str(self._place / str(number)),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staging, self._upload = answer.staging_completion, answer.upload_completion
        else:
            self._staging, self._upload = None, answer

    def sealed(self) -> bool:
        return self._staging is None or _is_done(self._staging)

    def durable(self) -> bool:
        return self._upload is None or _is_done(self._upload)

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()


class Surefoot:
    """This project. A step is only taken when a save is asked for, so that saves are comparable."""

    def __init__(self, training: Training, place: Path) -> None:
        self._run = surefoot.Run(
            place / "run",
            interval_s=_NEVER_DUE_S,
            stage=_NO_STAGING,
            model=training.model,
            optimizer=training.optimizer,
        )
        self._run.restore()
        self._wanted = 0
        session = self._run._session
        assert session is not None
        self._board: Board = session.board

    def before_optimizer(self) -> None:
        return

    def boundary(self, number: int | None) -> None:
        if number is not None:
            self._wanted = self._run.step + 1
            self._run.save(metrics={"save": number})
        self._run.step_done()

    def sealed(self) -> bool:
        # By the word that the trainers themselves go by: every rank's image of the step is whole.
        return self._board.sealed_on_all(self._run.generation, dist.get_world_size()) >= self._wanted

    def durable(self) -> bool:
        return self._board.node(NodeWord.COMMITTED_STEP) > self._wanted

    def close(self) -> None:
        self._run.close()


def make_method(name: str, training: Training, place: Path, rank: int) -> Method:
    """By the name in the results; `nothing` for the measurement's own noise, `memcpy` for the machine's."""
    kinds: dict[str, Any] = {
        "nothing": Nothing,
        "memcpy": lambda: Memcpy(training),
        "torch.save": lambda: TorchSave(training, place, rank),
        "dcp.save": lambda: DcpSave(training, place, rank),
        "dcp.async_save/thread": lambda: DcpAsyncSave(training, place, rank, process=False, shared=False),
        "dcp.async_save/thread+shared": lambda: DcpAsyncSave(training, place, rank, process=False, shared=True),
        "dcp.async_save/process": lambda: DcpAsyncSave(training, place, rank, process=True, shared=False),
        "surefoot": lambda: Surefoot(training, place),
    }
    method: Method = kinds[name]()
    return method


def _shared_stager() -> DefaultStager:
    """As for asynchronous staging into shared memory, with what pinning a machine without an accelerator lacks off."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=True, use_non_blocking_copy=False
        )
    )


def _is_done(future: Future[Any]) -> bool:
    if future.done():
        # Raises what the save raised: a save that failed is not a fast one.
        future.result()
        return True
    return False
