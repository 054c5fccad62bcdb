"""The run: what a training script sees of Surefoot."""

from __future__ import annotations

import os
import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from surefoot.agent_config import DEFAULT_GRACE_S
from surefoot.board import Board, NodeWord, Phase, RankWord
from surefoot.clock import boot_ns, boot_s
from surefoot.core.agreement import BoundaryPlan, Vector, at_boundary
from surefoot.core.cadence import Cadence, stage_every
from surefoot.core.documents import compact
from surefoot.core.layout import StepId
from surefoot.core.plan import Leaf, Plan, Report
from surefoot.errors import ConfigError, CorruptError, SurefootError, UsageError
from surefoot.exits import EVICTED, EVICTED_UNSAVED, SUPERSEDED, Evicted
from surefoot.home import Use
from surefoot.segment import open_segment
from surefoot.spawn import find_or_spawn, launch_key
from surefoot.trainer import rng
from surefoot.trainer.agreement import Agreement, GlooAgreement, LoneAgreement
from surefoot.trainer.client import AgentClient, Refused
from surefoot.trainer.data import Position, shield
from surefoot.trainer.flatten import Flat, Flattener, dtype_name
from surefoot.trainer.objects import Kept, KeptEntry, KeptModule, keep
from surefoot.trainer.place import (
    AGENT_VARIABLE,
    check_platform,
    find_ranks,
    find_uri,
    own_agent_config,
)
from surefoot.trainer.restore import MappedImage, load, map_image
from surefoot.trainer.signals import SigtermNotice
from surefoot.trainer.stage import Stager
from surefoot.trainer.tensors import digest
from surefoot.wire import Body

_SLOT_LOOK_S = 0.0005
_SAMPLE_EVERY_S = 1.0
_open_runs: set[str] = set()
_ALONE_AFTER_S = 5.0
"""All ranks finished the step that one wants to save, and some have not asked for it within this: they will not."""
_MEASURED = 5
"""Copies and steps whose median sets the cadence: one slow copy is no reason to leave steps out."""
_NEVER_BEHIND = 1 << 62
"""SEALED of a rank that has left: nobody waits for it any more."""


class Run:
    """One training run: restores on entry, saves as it goes, leaves in good order on eviction.

    Args:
        to: a bucket prefix (`s3://…`) or a directory; may be left to `surefoot run --to`.
        disk: directories on local drives that hold further copies.
        interval_s: seconds between durable saves. Default: continuous while a save takes under 10 s, else 300.
        max_bytes_per_s: bound on an upload's bandwidth.
        grace_s: window of a bare SIGTERM.
        resume: `auto`, `must` (refuse to start from scratch) or `never` (start from scratch).
        stage: stage every so many steps; default 1, more only if copying a step takes longer than a step.
        objects: what to keep, by name: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors,
            generators, data loaders, and plain values (found in `run.state`).
    """

    def __init__(
        self,
        to: str | os.PathLike[str] | None = None,
        *,
        disk: Sequence[str | os.PathLike[str]] = (),
        interval_s: float | None = None,
        max_bytes_per_s: float | None = None,
        grace_s: float = DEFAULT_GRACE_S,
        resume: str = "auto",
        stage: int | None = None,
        **objects: Any,
    ) -> None:
        self._to = None if to is None else os.fspath(to)
        self._disk = tuple(os.fspath(path) for path in ([disk] if isinstance(disk, str) else disk))
        self._cadence = Cadence(interval_s=interval_s, max_bytes_per_s=max_bytes_per_s)
        self._grace_s = grace_s
        self._resume = resume
        self._stage_setting = stage
        self._objects = objects
        self.state: dict[str, Any] = {}
        """Plain values that are kept: those named on construction, and whatever is put in here before entry."""
        self._opened = False
        self._finished = 0
        self._complete = False
        self._session: _Session | None = None
        self._saves: list[_Save] = []

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
            self._session.take_leftover_saves(self._saves)
        self._close(clean=kind is None)

    def close(self) -> None:
        """Leave the run; for scripts that do not use `with`. A step that is not finished is not kept."""
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
            SurefootError: what is wrong, and what to do about it.
        """
        if self._session is not None:
            return self._finished
        if self._opened:
            raise UsageError("this Run was used before: make a new one")
        self._opened = True
        session = _Session(self)
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
        # Asked for in any case: loaders without a name are told apart by the order of the loops.
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
        """For loops that are no `for`: one optimizer step is finished. With `last`, the run is."""
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
        self._saves.append(_Save(tag, wait, dict(metrics or {})))

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
        """Newest committed step; None before there is one."""
        session = self._session
        word = session.board.node(NodeWord.COMMITTED) if session is not None else 0
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
        session.boundary(self._finished, saves, last=last)

    def _end(self) -> None:
        session = self._need_session()
        session.make_safe(self._finished)
        self._complete = True

    def _need_session(self) -> _Session:
        if self._session is None:
            raise UsageError("the run is not open: use `with surefoot.Run(…) as run`, or call run.restore() first")
        return self._session


class _Save:
    """A save that was asked for."""

    def __init__(self, tag: str | None, wait: bool, metrics: dict[str, Any]) -> None:
        self.tag = tag
        self.wait = wait
        self.metrics = metrics


class _Session:
    """An open run: one trainer's part between entry and exit."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._incarnation = secrets.randbits(62) | 1
        self._kept: dict[str, Kept] = {}
        self._positions: dict[str, Position] = {}
        self._loaders: dict[str, Any] = {}
        self._resumed_positions: dict[str, Any] = {}
        self._signals = SigtermNotice()
        self._stager: Stager | None = None
        self._signature: tuple[Any, ...] | None = None
        self._drift = False
        self._newest = -1
        self._newest_message: Body | None = None
        self._durable_served = 0
        self._step_s = 0.0
        self._steps_s: deque[float] = deque(maxlen=_MEASURED)
        self._copies_s: deque[float] = deque(maxlen=_MEASURED)
        self._every = run._stage_setting or 1
        self._sampled_s = 0.0
        self._last_boundary_s = boot_s()
        self._images: list[tuple[Body, list[int]]] = []
        self._base_image: StepId | None = None
        self._habits_checked = False
        self._registered = False

    # ------------------------------------------------------------------ opening

    def open(self) -> int:
        check_platform()
        run = self._run
        self._ranks = find_ranks()
        self._uri = find_uri(run._to)
        self._open_key = self._uri if "://" in self._uri else os.path.realpath(self._uri)
        if self._open_key in _open_runs:
            raise UsageError(
                f"{self._uri} is already open in this process: leave its `with` block, or call its close(), first"
            )
        self._register()
        self._connect()
        _open_runs.add(self._open_key)
        try:
            return self._begin()
        except BaseException:
            _open_runs.discard(self._open_key)
            self._signals.remove()
            if self._registered:
                # The process may live on, as a notebook does, and try again.
                self._goodbye(0, finished=False, wait_safe=False, failed=True)
            self._client.close()
            raise

    def _register(self) -> None:
        run = self._run
        for name, value in run._objects.items():
            shield(value)
            if isinstance(value, DataLoader) and not hasattr(value, "load_state_dict"):
                self._loaders[name] = value
            else:
                self._kept[name] = keep(name, value, run.state, self._parameter_names)
        for name in run.state:
            if name not in self._kept:
                self._kept[name] = KeptEntry(name, run.state, self._parameter_names)
        self._state_names = set(run.state)
        # Refused now, by path, and not hours later.
        self._flatten()

    def _connect(self) -> None:
        run = self._run
        path = os.environ.get(AGENT_VARIABLE)
        self._supervised = path is not None
        respawn = None
        if path is None:
            config = own_agent_config(
                self._uri, run._disk, run._cadence, run._grace_s, run._resume, self._ranks.world_size
            )
            key = launch_key(config.owner_pid, self._uri)
            path = str(find_or_spawn(config, key)["socket"])

            def respawn() -> None:
                find_or_spawn(config, key)

        elif run._disk:
            raise ConfigError("under `surefoot run`, local drives are named there: surefoot run --disk DIR")
        self._client = AgentClient(path, self._hello, self._pushed, self._news, self._tick, respawn)
        self._client.start()

    def _begin(self) -> int:
        problem = None if self._supervised else self._signals.install(self._client.wake_fd)
        try:
            answer, fds = self._client.register()
        except Refused as refused:
            raise refused.exit(0) from None
        self._registered = True
        if problem is not None:
            self._event("warning", what=problem)
        for fd in fds:
            os.close(fd)
        self.board = Board.open(Path(answer["board"]))
        self._use = Use(self.board.path.parent)
        self.generation = int(answer["generation"])
        self._set(RankWord.INCARNATION, self._incarnation)
        self._set(RankWord.PID, os.getpid())
        self._set(RankWord.SEALED, 0)
        self._set(RankWord.SEALED_GENERATION, self.generation)
        self._phase(Phase.RESTORING)
        finished = self._load(answer.get("start"))
        self._set(RankWord.FINISHED, finished + 1)
        self._agreement: Agreement = GlooAgreement() if self._ranks.world_size > 1 else LoneAgreement()
        self._phase(Phase.TRAINING)
        self._last_boundary_s = boot_s()
        return finished

    def _load(self, start: Body | None) -> int:
        error: SurefootError | None = None
        try:
            step = self._restore(start) if start is not None else 0
        except SurefootError as caught:
            error = caught
            step = 0
        except Exception as caught:  # noqa: BLE001 - the user's load_state_dict may raise anything; all ranks hear of it
            error = ConfigError(f"loading the checkpoint failed: {type(caught).__name__}: {caught}")
            error.__cause__ = caught
        try:
            self._client.request({"op": "loaded", "error": None if error is None else f"{error}"})
        except SurefootError as others:
            raise error or others from None
        if error is not None:
            raise error
        return step

    def _restore(self, start: Body) -> int:
        ranks = self._ranks
        plan = Plan.from_body(start["plan"])
        images: dict[int, MappedImage] = {}
        for body, fds in self._images:
            images[body["rank"]] = map_image(body["rank"], fds[0], body["offset"], body["size"])
        self._images.clear()
        record = start["record"]
        of_rank = int(start["of_rank"])
        fresh, unknown = load(self._kept, plan, of_rank, images, record["values"])
        for name in [name for name in fresh if name not in self._loaders]:
            self._event("warning", what=f"{name} is not in the checkpoint: it starts fresh")
        if unknown:
            self._event("warning", what=f"the checkpoint holds {unknown}, which this script does not register")
        if plan.world_size != ranks.world_size:
            self._event(
                "warning",
                what=f"saved by {plan.world_size} rank(s), resumed by {ranks.world_size}: each rank goes on at its "
                "own batch count, so samples may repeat or be left out",
            )
        self._resumed_positions = dict(record.get("positions", {}))
        for name, position in self._positions.items():
            self._resume_position(name, position)
        rng.restore(record["rng"])
        if of_rank != ranks.rank:
            rng.diverge(ranks.rank)
        self._base_image = StepId(int(start["step"]), int(record["generation"]))
        return int(start["step"])

    # ------------------------------------------------------------------ data

    def position_of(self, loader: Any) -> Position:
        """The position of a loader, registered or not."""
        for name, known in self._loaders.items():
            if known is loader:
                return self._positions.get(name) or self._new_position(name, loader)
        name = f"batches{len(self._positions) or ''}"
        self._loaders[name] = loader
        return self._new_position(name, loader)

    def _new_position(self, name: str, loader: Any) -> Position:
        position = Position(name, loader, lambda what: self._event("warning", what=what))
        self._positions[name] = position
        self._resume_position(name, position)
        return position

    def _resume_position(self, name: str, position: Position) -> None:
        state = self._resumed_positions.pop(name, None)
        if state is not None:
            position.load(state)

    # ------------------------------------------------------------------ the boundary

    def boundary(self, step: int, saves: list[_Save], *, last: bool) -> None:
        """A step is finished: take it, as all ranks agreed, and stop here if they agreed on that."""
        now_s = boot_s()
        self._step_s = now_s - self._last_boundary_s
        self._steps_s.append(self._step_s)
        self._set(RankWord.FINISHED, step + 1)
        self._check_habits()
        flat = self._flatten()
        self._drift = self._stager is not None and flat.signature() != self._signature
        agreed = self._agreement.settle(self._vector)
        todo = at_boundary(agreed, step, planned=self._stager is not None, wanted=bool(saves), last=last)
        if todo.skipped:
            self._event("skipped", step=step, why="an upload still holds the slot")
        must = todo.stop or last or bool(saves)
        if todo.stage:
            self._take(step, flat, todo, saves, last=last, must=must)
        self._agreement.post(self._vector())
        self._sample(step, boot_s() - now_s)
        self._last_boundary_s = boot_s()
        if saves and todo.stage:
            self._wait_for(saves, StepId(step, self.generation))
        if todo.stop and not last:
            self._leave_evicted(step)
        self._phase(Phase.TRAINING)

    def _check_habits(self) -> None:
        """Say once, at the first step, what looks kept and is not."""
        if self._habits_checked:
            return
        self._habits_checked = True
        for name in self._loaders:
            if name not in self._positions:
                self._event(
                    "warning",
                    what=f"{name} is registered, but this step's batch did not come from run.batches({name}, …): "
                    "its position is not kept while it is iterated otherwise",
                )
        for name in set(self._run.state) - self._state_names:
            self._event("warning", what=f"run.state[{name!r}] was added after the run was opened: it is not kept")

    def _vector(self) -> Vector:
        board = self.board
        stager = self._stager
        return Vector(
            notice=board.node(NodeWord.NOTICE) == 1,
            replan=self._drift,
            durable=board.node(NodeWord.DURABLE_WANTED) > self._durable_served,
            # By the next boundary the newest step is sealed everywhere: the strict fence below sees to it.
            free_slots=stager.free_slots(self._newest) if stager is not None else 1,
            stage_every=self._every,
        )

    def _take(self, step: int, flat: Flat, todo: BoundaryPlan, saves: list[_Save], *, last: bool, must: bool) -> None:
        record = self._record(step, flat, todo, saves, last)
        drift = self._any_drift(step, record) if must else False
        if todo.replan or drift:
            self._plan(flat, len(record))
        stager = self._stager
        assert stager is not None
        if self._drift or len(record) > stager.segment.geometry.record_capacity:
            # Only this rank knows: all plan again at the next boundary, and this step has no whole image.
            self._drift = True
            self._event("skipped", step=step, why="the structure changed; planning again at the next step")
            return
        self._phase(Phase.FILLING)
        slot = self._slot(stager, must)
        started_s = boot_s()
        stager.fill(slot, flat.tensors)
        self._seal(stager, slot, step, record, _trigger(todo, saves, last), saves)
        self._copies_s.append(boot_s() - started_s)
        if self._run._stage_setting is None and len(self._copies_s) == _MEASURED:
            copy_s, step_s = median(self._copies_s), median(self._steps_s)
            self._every = stage_every(copy_s, step_s) if copy_s > step_s else 1

    def _seal(
        self, stager: Stager, slot: int, step: int, record: bytes, trigger: str | None, saves: list[_Save]
    ) -> None:
        at = StepId(step, self.generation)
        if trigger is not None:
            self._durable_served = self.board.node(NodeWord.DURABLE_WANTED)
        tag = next((save.tag for save in saves if save.tag is not None), None)
        message = stager.seal(
            slot,
            at,
            record,
            staged_ns=boot_ns(),
            message={
                "op": "sealed",
                "step": step,
                "generation": self.generation,
                "trigger": trigger,
                "tag": tag,
            },
        )
        self._newest = step
        self._set(RankWord.SEALED, step + 1)
        self._phase(Phase.SEALED)
        self._newest_message = message
        self._client.tell(message)

    def _slot(self, stager: Stager, must: bool) -> int:
        """A slot to fill. Waits, as the strict fence demands, until every rank has sealed what came before."""
        asked = False
        while True:
            slot = stager.take(self.board.sealed_on_all(self.generation, self._ranks.local_world_size))
            if slot is not None:
                return slot
            if must and not asked and stager.free_slots(self._newest) == 0:
                asked = True
                self._client.tell({"op": "need_slot"})
            time.sleep(_SLOT_LOOK_S)

    def _any_drift(self, step: int, record: bytes) -> bool:
        """Before an image that must be whole: does any rank have to plan again first?

        Raises:
            UsageError: other ranks do not take this image at all.
        """
        stager = self._stager
        drift = stager is None or self._drift or len(record) > stager.segment.geometry.record_capacity
        if self._ranks.world_size == 1:
            return drift
        answer, _fds = self._client.request({"op": "check", "drift": drift}, give_up=_Alone(self, step).why)
        return bool(answer["replan"])

    def _plan(self, flat: Flat, record_bytes: int) -> None:
        """Report what is registered, and get the plan and a segment for it."""
        several = self._ranks.world_size > 1
        leaves = [
            Leaf(
                named.name,
                dtype_name(named.tensor.dtype),
                tuple(named.tensor.shape),
                named.spread,
                digest(named.tensor) if several and named.spread == "replicated" else "",
            )
            for named in flat.tensors
        ]
        report = Report(tuple(leaves), flat.structure).to_json()
        answer, fds = self._client.request({"op": "report", "report": report, "record_bytes": record_bytes})
        old = self._stager
        segment = open_segment(fds[0], None, populate=True)
        plan = segment.plan()
        if plan.hash != answer["plan"]:
            raise CorruptError("the agent handed over a segment of another plan")
        self._stager = Stager(segment, plan, self._ranks.rank, answer["pinned"])
        self._signature = flat.signature()
        self._drift = False
        if old is not None:
            old.segment.close()

    def _record(self, step: int, flat: Flat, todo: BoundaryPlan, saves: list[_Save], last: bool) -> bytes:
        metrics: dict[str, Any] = {}
        for save in saves:
            metrics.update(save.metrics)
        return compact(
            {
                "step": step,
                "generation": self.generation,
                "rank": self._ranks.rank,
                "world_size": self._ranks.world_size,
                "trigger": _trigger(todo, saves, last),
                "tag": next((save.tag for save in saves if save.tag is not None), None),
                "metrics": metrics,
                "values": flat.values,
                "positions": self._resumed_positions
                | {name: position.state() for name, position in self._positions.items()},
                "rng": rng.capture(),
            }
        )

    def _wait_for(self, saves: list[_Save], at: StepId) -> None:
        if any(save.wait for save in saves):
            answer, _fds = self._client.request({"op": "wait", "step": at.step, "generation": at.generation}, None)
            del answer

    def take_leftover_saves(self, saves: list[_Save]) -> None:
        """Saves asked for after the last finished step have no step to be taken at."""
        if saves:
            self._event("warning", what="save() was called, but no step finished after it: nothing was saved by it")

    # ------------------------------------------------------------------ leaving

    def make_safe(self, step: int) -> None:
        """All steps are done: wait until the last one is durable.

        Raises:
            SurefootError: it cannot be made durable.
        """
        if step:
            self._client.request({"op": "ensure", "step": step}, None)

    def close(self, *, clean: bool, finished: bool, step: int) -> None:
        if clean:
            self._agreement.leave()
        self._set(RankWord.SEALED, _NEVER_BEHIND)
        self._goodbye(step, finished=finished, wait_safe=False, failed=not clean)
        self._end()

    def _leave_evicted(self, step: int) -> None:
        self._agreement.leave()
        safe = self._goodbye(step, finished=False, wait_safe=not self._supervised)
        self._end()
        self._run._session = None
        leaving = Evicted(step)
        if not self._supervised and not safe:
            leaving.code = EVICTED_UNSAVED
        raise leaving

    def _goodbye(self, step: int, *, finished: bool, wait_safe: bool, failed: bool = False) -> bool:
        self._phase(Phase.LEAVING)
        try:
            answer, _fds = self._client.request(
                {"op": "bye", "step": step, "finished": finished, "wait_safe": wait_safe, "failed": failed},
                within_s=None if wait_safe else 10.0,
            )
        except SurefootError:
            # Nobody to say goodbye to: the agent sees the process end.
            return False
        return bool(answer.get("safe"))

    def _end(self) -> None:
        self._signals.remove()
        self._client.close()
        self._use.close()
        _open_runs.discard(self._open_key)

    # ------------------------------------------------------------------ called by the watcher thread

    def _hello(self, reconnect: bool) -> tuple[Body, list[int]]:
        ranks = self._ranks
        fds = []
        stager = self._stager
        if reconnect and stager is not None and stager.segment.fd >= 0:
            fds = [stager.segment.fd]
        hello = {
            "role": "trainer",
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "local_rank": ranks.local_rank,
            "local_world_size": ranks.local_world_size,
            "incarnation": self._incarnation,
            "reconnect": reconnect,
        }
        return hello, fds

    def _pushed(self, body: Body, fds: list[int]) -> None:
        operation = body.get("op")
        if operation == "image":
            self._images.append((body, fds))
            return
        stager = self._stager
        current = stager is not None and stager.plan.hash == body.get("plan")
        if operation == "pin":
            # Slots of a segment that this trainer does not fill (it has none yet, or another) are nobody's to reuse.
            ok = not current or stager is None or stager.pin(body["slot"], body["seq"])
            self._client.tell({"op": "granted", "slot": body["slot"], "seq": body["seq"], "ok": ok})
        elif operation == "unpin" and current and stager is not None:
            stager.unpin(body["slot"], body["seq"])

    def _news(self) -> list[Body]:
        """What an agent that replaces another must hear."""
        stager, newest = self._stager, self._newest_message
        waiting = stager.tell_again() if stager is not None else []
        return waiting if newest is None or newest in waiting else [*waiting, newest]

    def _tick(self, woken: bytes) -> None:
        if signal_byte in woken:
            self._client.tell({"op": "notice", "source": "sigterm"})
        board = getattr(self, "board", None)
        if board is not None and board.rank(self._ranks.local_rank, RankWord.STOP) == self._incarnation:
            # From any state of the main thread, also from inside a collective: nothing of it is needed any more.
            os._exit(_stop_code(board))

    # ------------------------------------------------------------------ small things

    def _flatten(self) -> Flat:
        ddp = [value for value in self._run._objects.values() if isinstance(value, DistributedDataParallel)]
        replicated = frozenset(parameter.data_ptr() for module in ddp for parameter in module.parameters())
        ids = {id(parameter) for module in ddp for parameter in module.parameters()}
        optimizers = [
            name
            for name, value in self._run._objects.items()
            if isinstance(value, Optimizer)
            and ids
            and all(id(p) in ids for group in value.param_groups for p in group["params"])
        ]
        trees = {name: kept.tree() for name, kept in self._kept.items()}
        return Flattener(replicated).flatten(trees, optimizers)

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for kept in self._kept.values():
            if isinstance(kept, KeptModule):
                for parameter, name in kept.parameter_names():
                    names.setdefault(id(parameter), name)
        return names

    def _event(self, kind: str, **fields: Any) -> None:
        self._client.tell({"op": "event", "event": kind, "fields": fields})

    def _sample(self, step: int, stall_s: float) -> None:
        now_s = boot_s()
        if now_s - self._sampled_s >= _SAMPLE_EVERY_S:
            self._sampled_s = now_s
            self._event("step", rank=self._ranks.rank, step=step, step_s=round(self._step_s, 6))
            self._event("stall", rank=self._ranks.rank, step=step, stall_s=round(stall_s, 6))

    def _set(self, word: RankWord, value: int) -> None:
        self.board.set_rank(self._ranks.local_rank, word, value)

    def _phase(self, phase: Phase) -> None:
        self._set(RankWord.PHASE, phase)


class _Alone:
    """Whether a rank waits in vain for the others to take the image that it takes."""

    def __init__(self, session: _Session, step: int) -> None:
        self._board = session.board
        ranks = session._ranks
        self._rank = ranks.rank
        self._others = [rank for rank in range(ranks.local_world_size) if rank != ranks.local_rank]
        self._step = step
        self._all_here_s: float | None = None

    def why(self) -> str | None:
        """What to tell the user; None as long as the others may still come."""
        past = [rank for rank in self._others if self._word(rank, RankWord.SEALED) > self._step]
        past += [rank for rank in self._others if self._word(rank, RankWord.FINISHED) > self._step + 1]
        here = all(self._word(rank, RankWord.FINISHED) > self._step for rank in self._others)
        if here and self._all_here_s is None:
            self._all_here_s = boot_s()
        waited = self._all_here_s is not None and boot_s() - self._all_here_s > _ALONE_AFTER_S
        if not past and not waited:
            return None
        who = f"rank(s) {sorted(set(past))}" if past else "some other rank"
        return (
            f"rank {self._rank} takes step {self._step} (save(), or its last step), and {who} does not: "
            "call save() on every rank, and give every rank the same total"
        )

    def _word(self, rank: int, word: RankWord) -> int:
        return self._board.rank(rank, word)


signal_byte = b"\x0f"
"""What `signal.set_wakeup_fd` writes for SIGTERM."""


def _trigger(todo: BoundaryPlan, saves: list[_Save], last: bool) -> str | None:
    if todo.stop:
        return "emergency"
    if last:
        return "final"
    if saves:
        return "manual"
    return "periodic" if todo.durable else None


def _stop_code(board: Board) -> int:
    if board.node(NodeWord.SUPERSEDED):
        return SUPERSEDED
    return EVICTED if board.node(NodeWord.NOTICE) else 1
