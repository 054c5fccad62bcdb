"""`surefoot.Run`: the one object by which a training script uses Surefoot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import TracebackType
from typing import Any

from surefoot.core.documents import compact
from surefoot.errors import ConfigError, UsageError
from surefoot.host.clock import boot_s
from surefoot.ipc.board import NodeWord
from surefoot.launch.config import OPTION_NAMES, Options
from surefoot.trainer.boundary.boundary import Save, Staging
from surefoot.trainer.session import Session, Wishes


class Run:
    """One training run: restores on entry, saves as it goes, leaves in good order on eviction.

    Args:
        to: a bucket prefix (`s3://…`) or a directory.
        disk: directories on local drives that hold further copies.
        interval_s: seconds between durable saves. Default: continuous while a save takes under 10 s, else 300.
        max_bytes_per_s: bound on an upload's bandwidth.
        grace_s: window of a bare SIGTERM. Default: 30.
        watch: a file whose appearance announces an eviction.
        resume: `auto` (the default), `must` (refuse to start from scratch) or `never` (start from scratch).
        stage: stage every so many steps. Default: 1, and more only if copying a step takes longer than a step.
        overlap: copy leaves that only a registered optimizer changes behind the next step. False: copy all at each
            boundary.
        strict: no rank's optimizer goes beyond a step before every rank has staged it. Default: unless the state lies
            on an accelerator, where it would end the program's running ahead.
        objects: the objects to checkpoint, by name: modules, optimizers, anything with
            `state_dict`/`load_state_dict`, tensors, generators, data loaders, and plain values (found in `run.state`).

    The options up to `resume` have the same names on the command line (`--grace-s`) and in the environment
    (`SUREFOOT_GRACE_S`). Under `surefoot run` the command decides them: the script leaves them out, or gives the same.

    Raises:
        ConfigError: an option has an impossible value, or under `surefoot run` another value than the command's.
    """

    def __init__(
        self,
        to: str | os.PathLike[str] | None = None,
        *,
        disk: Sequence[str | os.PathLike[str]] | None = None,
        interval_s: float | None = None,
        max_bytes_per_s: float | None = None,
        grace_s: float | None = None,
        watch: str | None = None,
        resume: str | None = None,
        stage: int | None = None,
        overlap: bool = True,
        strict: bool | None = None,
        **objects: Any,
    ) -> None:
        options = {
            "to": to,
            "disk": disk,
            "interval_s": interval_s,
            "max_bytes_per_s": max_bytes_per_s,
            "grace_s": grace_s,
            "watch": watch,
            "resume": resume,
        }
        # Raises here, where the option is given, if its value is impossible.
        Options().given(**options)
        staging = Staging(every=stage, overlap=overlap, strict=strict)
        self._wishes = Wishes(options=options, staging=staging, notes=tuple(_misspelt(objects)))
        self._objects = objects
        self.state: dict[str, Any] = {}
        """Plain values that are checkpointed: those named on construction, and all that are put in here before
        entry."""
        self._opened = False
        self._finished = 0
        self._complete = False
        self._session: Session | None = None
        self._saves: list[Save] = []

    # ------------------------------------------------------------------ entry and exit

    def __enter__(self) -> Run:
        self.restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if self._session is None:
            return
        if kind is None:
            self._session.warn_of_leftover(self._saves)
        self._close(clean=kind is None)

    def close(self) -> None:
        """Leave the run; for scripts that do not use `with`. A step that is not finished is not saved."""
        if self._session is not None:
            self._close(clean=True)

    def _close(self, *, clean: bool) -> None:
        session, self._session = self._need_session(), None
        session.close(clean=clean, finished=self._complete, step=self._finished)

    def restore(self) -> int:
        """Open the run and load the newest good checkpoint, if there is one.

        Returns:
            Optimizer steps finished so far; 0 for a new run.

        Raises:
            Evicted, Superseded: this launch is over before it began.
            SurefootError: the run cannot start; the message names the reason and the remedy.
        """
        if self._session is not None:
            return self._finished
        if self._opened:
            raise UsageError("this Run was used before: make a new one")
        self._opened = True
        session = Session(self._wishes, self._objects, self.state)
        self._finished = session.open()
        self._session = session
        return self._finished

    # ------------------------------------------------------------------ loops

    def steps(self, total: int) -> Iterator[int]:
        """Yield the numbers of the steps still to do, up to `total`. A body that runs to its end finishes a step.

        Raises:
            Evicted: the machine is being taken away; the last finished step has been taken.
        """
        self.restore()
        while self._finished < total:
            self._complete = False
            yield self._finished
            self._boundary(last=self._finished + 1 >= total)
        self._end()

    def batches(self, loader: Any, total: int) -> Iterator[tuple[int, Any]]:
        """Like `steps`, with one batch of `loader` each, going on at the batch after the last one consumed."""
        self.restore()
        # Asked for in any case: loaders without a name are distinguished by the order of the loops.
        position = self._need_session().position_of(loader)
        if self._finished < total:
            self._complete = False
            for batch in position.batches():
                yield self._finished, batch
                position.step_done()
                self._boundary(last=self._finished + 1 >= total)
                if self._finished >= total:
                    break
        self._end()

    def step_done(self, *, last: bool = False) -> None:
        """Report that one optimizer step is finished, from a loop that is not a `for` over `steps` or `batches`. With
        `last`, the run is finished too."""
        self._need_session()
        self._boundary(last=last)
        if last:
            self._end()

    # ------------------------------------------------------------------ inside a step

    def save(self, tag: str | None = None, *, wait: bool = False, metrics: Mapping[str, Any] | None = None) -> None:
        """Make a checkpoint at the end of the step that runs now; call it on every rank.

        Args:
            tag: a name; retention keeps named checkpoints.
            wait: the end of the step waits until it is committed, and raises if it cannot be.
            metrics: numbers or words to find it by; plain JSON.
        """
        self._need_session()
        try:
            compact(dict(metrics or {}))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"save(metrics=…): {error}; give plain finite numbers and words (tensor.item())"
            ) from error
        self._saves.append(Save(tag, wait, dict(metrics or {})))

    @property
    def evicting(self) -> bool:
        """True once an eviction was announced. Cheap, no collective: for the inner loop of a long evaluation."""
        session = self._session
        return session is not None and session.board.node(NodeWord.NOTICE) == 1

    @property
    def finished(self) -> bool:
        """True when all steps are done."""
        return self._complete

    @property
    def step(self) -> int:
        """Optimizer steps finished."""
        return self._finished

    @property
    def generation(self) -> int:
        """Number of this start of the run, the same on every rank, larger with each start; 0 before entry."""
        session = self._session
        return session.generation if session is not None else 0

    @property
    def durable_step(self) -> int | None:
        """Optimizer steps finished at the newest committed boundary; None before there is one."""
        session = self._session
        word = session.board.node(NodeWord.COMMITTED_STEP) if session is not None else 0
        return word - 1 if word else None

    @property
    def durable_age_s(self) -> float | None:
        """Age of the newest committed step; None before there is one."""
        session = self._session
        staged_ns = session.board.node(NodeWord.COMMITTED_NS) if session is not None else 0
        return boot_s() - staged_ns / 1e9 if staged_ns else None

    # ------------------------------------------------------------------ inner workings

    def _boundary(self, *, last: bool) -> None:
        saves, self._saves = self._saves, []
        session = self._need_session()
        self._finished += 1
        if session.cross(self._finished, saves, last=last):
            self._session = None
            raise session.leave_evicted(self._finished)

    def _end(self) -> None:
        session = self._need_session()
        session.make_safe(self._finished)
        self._complete = True

    def _need_session(self) -> Session:
        if self._session is None:
            raise UsageError("the run is not open: use `with surefoot.Run(…) as run`, or call run.restore() first")
        return self._session


_STEMS = {each.removesuffix("_s"): each for each in (*OPTION_NAMES, "stage", "overlap", "strict")}


def _misspelt(names: Iterable[str]) -> Iterator[str]:
    """One sentence for each object whose name looks like an option's."""
    for name in names:
        for stem in get_close_matches(name.lower().removesuffix("_s"), _STEMS, n=1, cutoff=0.85):
            yield f"surefoot.Run keeps {name}=… as an object; if the option {_STEMS[stem]} is meant, use that name"
