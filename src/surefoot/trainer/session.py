"""An open run: one trainer's part between entry and exit."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Plan
from surefoot.errors import ConfigError, SurefootError, UsageError
from surefoot.exits import EVICTED_UNSAVED, Evicted, bound_end, hasten_end, let_end
from surefoot.ipc.board import Board, Phase, RankWord
from surefoot.ipc.home import Use
from surefoot.ipc.wire import Body
from surefoot.launch.config import AgentConfig, Options
from surefoot.launch.spawn import find_or_spawn, launch_key
from surefoot.trainer.boundary.agreement import Agreement, GlooAgreement, LoneAgreement
from surefoot.trainer.boundary.board_agreement import BoardAgreement
from surefoot.trainer.boundary.boundary import Boundary, Save, Staging
from surefoot.trainer.boundary.environment import AGENT_VARIABLE, Ranks, check_platform, find_ranks, own_agent_config
from surefoot.trainer.boundary.page import Page
from surefoot.trainer.boundary.signals import SIGTERM_BYTE, SigtermNotice
from surefoot.trainer.client import AgentClient, Refused
from surefoot.trainer.data.position import Position
from surefoot.trainer.restore.fit import Fit
from surefoot.trainer.restore.restore import MappedImage, map_image, unclaimed
from surefoot.trainer.state.registry import Registry

_FAILED_END_WITHIN_S = 60.0
"""Time for a failed script's own exit handlers; the other ranks cannot go on meanwhile."""
_open_runs: set[str] = set()


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The options by which the script decides how its run is saved. An option that it leaves out is None."""

    options: Mapping[str, Any]
    staging: Staging
    notes: tuple[str, ...]


class Session:
    """Opens, restores, crosses boundaries, leaves. Its callbacks run in the watcher thread."""

    def __init__(self, wishes: Wishes, objects: Mapping[str, Any], state: dict[str, Any]) -> None:
        self._wishes = wishes
        self._incarnation = secrets.randbits(62) | 1
        self._registry = Registry(objects, state, self._warn, self._tell)
        self._signals = SigtermNotice()
        self._images: list[tuple[Body, list[int]]] = []
        self._registered = False
        self._page: Page | None = None
        self._fit: Fit | None = None
        """How this rank's state fits the checkpoint about which the agent asked last, until the start is decided."""
        self._boundary: Boundary | None = None
        self._crossed = 0
        """Boundaries along the history, those before the restored one included."""
        self.generation = 0
        self._ranks: Ranks
        self._client: AgentClient
        self._agreement: Agreement
        self._use: Use

    # ------------------------------------------------------------------ opening

    def open(self) -> int:
        """Find the agent, wait for all ranks, restore. Returns the steps finished so far."""
        check_platform()
        self._ranks = find_ranks()
        path = os.environ.get(AGENT_VARIABLE)
        self._supervised = path is not None
        said, wanted = Options.from_environment(), self._wishes.options
        config = own_agent_config(said.decided(**wanted) if path else said.given(**wanted), self._ranks.world_size)
        self._open_key = config.uri if "://" in config.uri else os.path.realpath(config.uri)
        if self._open_key in _open_runs:
            raise UsageError(
                f"{config.uri} is already open in this process: leave its `with` block, or call its close(), first"
            )
        self._registry.register()
        self._meet()
        self._connect(config, path)
        _open_runs.add(self._open_key)
        try:
            return self._begin()
        except BaseException:
            _open_runs.discard(self._open_key)
            self._signals.remove()
            if self._registered:
                # The process may live on, as a notebook does, and try again.
                self._goodbye(0, finished=False, wait_safe=False, failed=True)
            self._registry.frozen.close()
            self._client.close()
            raise

    def _meet(self) -> None:
        """Agree with the ranks of other machines on a name of this round, by which the agents find each other."""
        ranks = self._ranks
        self._agreement = LoneAgreement()
        self._round: Body = {}
        if ranks.local_world_size < ranks.world_size:
            self._agreement = agreement = GlooAgreement()
            meet = os.environ.get("MASTER_ADDR", "127.0.0.1")
            self._round = {"round": f"{agreement.draw():016x}", "meet": meet}

    def _connect(self, config: AgentConfig, path: str | None) -> None:
        respawn = None
        if path is None:
            key = launch_key(config.owner_pid, config.uri)
            path = str(find_or_spawn(config, key)["socket"])

            def respawn() -> None:
                find_or_spawn(config, key)

        self._client = AgentClient(path, self._hello, self._pushed, self._news, self._tick, respawn)
        self._client.start()

    def _begin(self) -> int:
        problem = None if self._supervised else self._signals.install(self._client.wake_fd)
        try:
            answer, fds = self._client.register(self._needs)
        except Refused as refused:
            raise refused.exit(0) from None
        self._registered = True
        for note in (*self._wishes.notes, *([problem] if problem is not None else [])):
            self._warn(note)
        for fd in fds:
            os.close(fd)
        board = Board.open(Path(answer["board"]))
        self._use = Use(board.path.parent)
        self.generation = int(answer["generation"])
        page = self._page = Page(board, self._ranks, self._incarnation)
        page.open(self.generation, os.getpid())
        page.phase(Phase.RESTORING)
        self._crossed, finished = self._load(answer.get("start"))
        self._fit = None
        page.set(RankWord.STEP, finished + 1)
        page.set(RankWord.FINISHED, self._crossed + 1)
        self._registry.frozen.begin()
        if self._ranks.world_size > 1 and not self._round:
            self._agreement = BoardAgreement(page, self.generation)
        self._boundary = Boundary(
            self._client, page, self._registry, self._agreement, self.generation, self._wishes.staging
        )
        page.phase(Phase.TRAINING)
        return finished

    def _load(self, start: Body | None) -> tuple[int, int]:
        """Boundaries and optimizer steps of what was loaded."""
        error: SurefootError | None = None
        loaded = 0, 0
        try:
            loaded = self._restore(start) if start is not None else (0, 0)
            if start is None:
                self._registry.frozen.refuse_torn(None, 0)
        except SurefootError as caught:
            error = caught
        except Exception as caught:  # noqa: BLE001 - the user's load_state_dict may raise anything; all ranks hear of it
            error = ConfigError(f"loading the checkpoint failed: {type(caught).__name__}: {caught}")
            error.__cause__ = caught
        try:
            self._client.request({"op": "loaded", "error": None if error is None else f"{error}"})
        except SurefootError as others:
            raise error or others from None
        if error is not None:
            raise error
        return loaded

    def _restore(self, start: Body) -> tuple[int, int]:
        plan = Plan.from_body(start["plan"])
        images: dict[int, MappedImage] = {}
        for body, fds in self._images:
            images[body["rank"]] = map_image(body["rank"], fds[0], body["offset"], body["size"], body["ranges"])
        self._images.clear()
        if plan.world_size != self._ranks.world_size:
            self._warn(
                f"saved by {plan.world_size} rank(s), resumed by {self._ranks.world_size}: each rank goes on at its "
                "own batch count, so samples may repeat or be left out, unless they come from surefoot.data's samplers"
            )
        ranks = self._ranks
        left = unclaimed(plan, ranks.world_size) if ranks.rank == 0 else None
        if left is not None:
            self._warn(left)
        self._registry.load(self._fit_to(plan, int(start["of_rank"])), start["record"], images, ranks.rank)
        return int(start["boundary"]), int(start["step"])

    def _fit_to(self, plan: Plan, of_rank: int) -> Fit:
        # Worked out once: no code of the script's runs between the agent's question and the start.
        if self._fit is None or (self._fit.plan, self._fit.of_rank) != (plan, of_rank):
            self._fit = self._registry.fit(plan, of_rank, self._ranks.world_size)
        return self._fit

    def _needs(self, question: Body) -> Body:
        """The parts of a checkpoint that this rank needs. The agent asks before it decides to take the checkpoint."""
        answer: Body = {"op": "needs", "ticket": question["ticket"]}
        try:
            plan = Plan.from_body(question["plan"])
            found = self._fit_to(plan, int(question["of_rank"]))
            same = found.as_saved and plan.world_size == self._ranks.world_size
            regions = [
                {"item": number, "offset": list(one.offset), "lengths": list(one.lengths)}
                for number, one in found.regions()
            ]
            return {**answer, "same": same, "regions": regions}
        except SurefootError as error:
            return {**answer, "error": str(error)}
        except Exception as error:  # noqa: BLE001 - the user's state_dict may raise anything; the agent hears of it
            return {**answer, "error": f"comparing with the checkpoint failed: {type(error).__name__}: {error}"}

    # ------------------------------------------------------------------ while it is open

    @property
    def board(self) -> Board:
        return self._own_page.board

    def position_of(self, loader: Any) -> Position:
        return self._registry.position_of(loader)

    def cross(self, step: int, saves: list[Save], *, last: bool) -> bool:
        """The state is whole, after so many optimizer steps; one more may have been finished since the last boundary.

        Returns true if this is where all ranks stop, because they are being evicted.
        """
        assert self._boundary is not None
        self._crossed += 1
        stop = self._boundary.cross(self._crossed, step, saves, last=last)
        if not (stop and not last) and not self._boundary.in_flight:
            self._own_page.phase(Phase.TRAINING)
        return stop and not last

    def warn_of_leftover(self, saves: list[Save]) -> None:
        """Warn of saves that were asked for after the last finished step: there is no step at which to take them."""
        if saves:
            self._warn("save() was called, but no step finished after it: nothing was saved by it")

    # ------------------------------------------------------------------ leaving

    def make_safe(self, step: int) -> None:
        """Wait until the last step is durable, after all are done.

        Raises:
            SurefootError: it cannot be made durable.
        """
        if self._boundary is not None:
            self._boundary.finish()
        if self._crossed:
            self._client.request({"op": "ensure", **BoundaryId(self._crossed, self.generation, step).to_json()}, None)

    def close(self, *, clean: bool, finished: bool, step: int) -> None:
        """Leave in good order, or because of an error of the script's own."""
        self._land(clean=clean)
        if clean:
            self._agreement.leave()
            let_end()
        else:
            self._agreement.abandon()
            if self._ranks.world_size > 1:
                bound_end(_FAILED_END_WITHIN_S)
        self._own_page.leave()
        self._goodbye(step, finished=finished, wait_safe=False, failed=not clean)
        self._end()

    def leave_evicted(self, step: int) -> Evicted:
        """Leave because this machine is being taken away. Returns the exit to raise."""
        self._land(clean=False)
        self._agreement.leave()
        safe = self._goodbye(step, finished=False, wait_safe=not self._supervised)
        self._end()
        hasten_end()
        leaving = Evicted(step)
        if not self._supervised and not safe:
            leaving.code = EVICTED_UNSAVED
        return leaving

    def _land(self, *, clean: bool) -> None:
        """Finish a step that is being copied into its slot, and unhook the optimizers."""
        if self._boundary is None:
            return
        try:
            self._boundary.finish()
        except Exception as error:
            if clean:
                raise
            # The script leaves because of an error of its own, and that is the error to show.
            self._warn(f"the last step was not staged: {type(error).__name__}: {error}")
        finally:
            self._boundary.close()

    def _goodbye(self, step: int, *, finished: bool, wait_safe: bool, failed: bool = False) -> bool:
        if self._page is not None:
            self._page.phase(Phase.LEAVING)
        try:
            answer, _fds = self._client.request(
                {"op": "bye", "step": step, "finished": finished, "wait_safe": wait_safe, "failed": failed},
                within_s=None if wait_safe else 10.0,
            )
        except SurefootError:
            # No agent takes the goodbye: an agent that comes back sees the process end.
            return False
        return bool(answer.get("safe"))

    def _end(self) -> None:
        self._registry.frozen.close()
        self._signals.remove()
        self._client.close()
        self._use.close()
        _open_runs.discard(self._open_key)

    # ------------------------------------------------------------------ called by the watcher thread

    def _hello(self, reconnect: bool) -> tuple[Body, list[int]]:
        ranks = self._ranks
        fd = self._boundary.segment_fd if reconnect and self._boundary is not None else None
        hello = {
            "role": "trainer",
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "local_rank": ranks.local_rank,
            "local_world_size": ranks.local_world_size,
            "incarnation": self._incarnation,
            "reconnect": reconnect,
            "sharded": self._registry.sharded,
            **self._round,
        }
        return hello, [] if fd is None else [fd]

    def _pushed(self, body: Body, fds: list[int]) -> None:
        if body.get("op") == "image":
            self._images.append((body, fds))
        elif not self._registry.frozen.pushed(body, fds) and self._boundary is not None:
            self._boundary.pushed(body)

    def _news(self) -> list[Body]:
        """The messages that an agent which replaces another needs."""
        return [*self._registry.frozen.news(), *(self._boundary.news() if self._boundary is not None else [])]

    def _tick(self, woken: bytes) -> None:
        if SIGTERM_BYTE in woken:
            self._client.tell({"op": "notice", "source": "sigterm"})
        if self._boundary is not None:
            self._boundary.stage_late()
        page = self._page
        if page is not None and page.must_end():
            # Ends the process in any state of the main thread, also inside a collective: its work is no longer needed.
            os._exit(page.end_code())

    # ------------------------------------------------------------------ small things

    @property
    def _own_page(self) -> Page:
        assert self._page is not None
        return self._page

    def _tell(self, body: Body) -> None:
        self._client.tell(body)

    def _warn(self, what: str) -> None:
        self._client.event("warning", what=what)
