"""The demo: train twice with the same seed, once through everything that can happen, once undisturbed; compare.

Real processes, a real S3 server (or a directory), real signals. The seed moves the events and the training. On demand
other ways to survive go through the same events.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.core.cadence import CONTINUOUS_GAP_S
from surefoot.demo.methods.compare import Conditions, PeerResult, run_peer
from surefoot.demo.methods.methods import Method
from surefoot.demo.page import Shown, demo_page
from surefoot.errors import ConfigError, CorruptError
from surefoot.ipc.home import base_directory
from surefoot.scenario import stalls
from surefoot.scenario.curves import quantile, step_times
from surefoot.scenario.durable import newest_durable
from surefoot.scenario.engine import BREATH_STEPS, Outcome, Scenario, View
from surefoot.scenario.events import Event, Kind, Strike, draw
from surefoot.scenario.job import Node
from surefoot.scenario.log import DISTURBED, UNDISTURBED, Line, gather, read
from surefoot.scenario.machines import Machines, machines
from surefoot.scenario.verdict import Recovery, Verdict, judge

TRAIN_TEXT = Path(__file__).with_name("train_text.py")
MIN_STEPS = 40
_PHASES = {
    Kind.EVICT: ("training", "filling"),
    Kind.KILL_TRAINER: ("training", "filling", "sealed"),
    Kind.KILL_AGENT: ("idle", "flushing", "committing"),
    Kind.KILL_ALL: ("training", "filling", "flushing", "committing"),
}
_PHASES_OF_A_LINK = {Kind.CUT: ("training", "flushing")}
_CUT_LASTS_S = 20.0
"""Longer than the other nodes wait for one that is silent."""
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """What to show."""

    seed: int = 0
    steps: int = 200
    nodes: int = 1
    ranks: int = 2
    """Of each node."""
    store: Path | None = None
    """A directory to keep the runs in; None: an S3 server of the demo's own."""
    keep: bool = False
    """Keep the runs, the events and each process's lines too, not only the log and the output."""
    script: Path = TRAIN_TEXT
    """Takes --steps, --seed, --log and --name, and writes the log that `scenario.log` describes."""
    events: Sequence[Event] | None = None
    """None: an eviction and three kills, drawn from the seed."""
    page: Path | None = None
    """Where to write the page; None: beside the log."""
    peers: Sequence[Method] = ()
    """Other ways that go through the same events afterwards."""

    def __post_init__(self) -> None:
        if self.steps < MIN_STEPS:
            raise ConfigError(f"steps is {self.steps}: at least {MIN_STEPS} leave room between the events")
        for name, count in (("ranks", self.ranks), ("nodes", self.nodes)):
            if count < 1:
                raise ConfigError(f"{name} is {count}: at least 1 has to train")
        if self.nodes > 1 and self.peers:
            raise ConfigError("the other ways train on one node only: leave out --nodes or --peers")
        if self.page is not None and not self.page.absolute().parent.is_dir():
            raise ConfigError(f"page is {self.page}: there is no directory {self.page.absolute().parent}")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What came of it."""

    steps: int
    strikes: tuple[Strike, ...]
    verdict: Verdict
    log: Path
    output_tail: str
    """On a failure: the end of what the processes printed last."""
    page: Path
    peers: tuple[PeerResult, ...] | None
    """None: not asked for."""

    def to_json(self) -> dict[str, Any]:
        peers = {} if self.peers is None else {"peers": [peer.to_json() for peer in self.peers]}
        return {
            "verdict": "PASS" if self.verdict.passed else "FAIL",
            "steps": self.steps,
            "bit_identical": self.verdict.bit_identical,
            "events": [_event_json(*pair) for pair in zip(self.strikes, self.verdict.recoveries, strict=True)],
            "problems": list(self.verdict.problems),
            "log": str(self.log),
            **peers,
        }


LookOn = Callable[[str, View], None]
"""Called about ten times per second with the run's name and its state."""


def plan_events(seed: int, steps: int, ranks: int, nodes: int = 1, *, links: bool = False) -> list[Event]:
    """An eviction and three kills in an order, at steps, in phases, on nodes and ranks drawn from the seed.

    Args:
        seed: draws.
        steps: of the run.
        ranks: of each node.
        nodes: how many.
        links: whether a node's link is cut, too.
    """
    rng = random.Random(f"events {seed}")
    phases = _PHASES | (_PHASES_OF_A_LINK if links else {})
    kinds = list(phases)
    rng.shuffle(kinds)
    span = steps / (len(kinds) + 1)
    wanted = [
        Event(
            kind=kind,
            phase=rng.choice(phases[kind]),
            step=round((number + 0.5) * span),
            latest=round((number + 1) * span),
            rank=None,
            node=None if nodes > 1 else 0,
            lasts_s=_CUT_LASTS_S if kind is Kind.CUT else 0.0,
        )
        for number, kind in enumerate(kinds)
    ]
    return draw(wanted, rng, ranks, nodes)


def run_demo(config: DemoConfig, look_on: LookOn) -> DemoResult:
    """Train twice and compare. Leaves the logs, the page and the processes' output, and nothing else.

    Raises:
        ConfigError: there is no S3 server on this machine.
        ResourceError: the S3 server does not start.
    """
    with ExitStack() as stack:
        place = stack.enter_context(_log_directory(config.keep))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="surefoot-demo-", dir=base_directory())))
        hosts = stack.enter_context(machines(config.nodes))
        store = stack.enter_context(_store(config, hosts))
        stage = _Stage(config, place, memory, store, hosts)
        outcome = stage.run(DISTURBED, _events(config, links=hosts.can_cut), look_on)
        calm = stage.run(UNDISTURBED, [], look_on) if not outcome.problems else None
        result = _result(config, place, outcome, calm)
        if config.peers:
            result = replace(result, peers=tuple(_peers(config, place, memory, result, look_on)))
        result.page.write_text(demo_page(_shown(config, place, result)))
        return result


def _events(config: DemoConfig, *, links: bool = False) -> Sequence[Event]:
    if config.events is not None:
        return config.events
    return plan_events(config.seed, config.steps, config.ranks, config.nodes, links=links)


class _Stage:
    """Where both runs happen."""

    def __init__(
        self, config: DemoConfig, place: Path, memory: Path, store: Callable[[str], str], hosts: Machines
    ) -> None:
        self._config = config
        self._place = place
        self._memory = memory
        self._store = store
        self._hosts = hosts

    def run(self, name: str, events: Sequence[Event], look_on: LookOn) -> Outcome:
        uri = self._store(name)
        scenario = Scenario(
            [self._node(name, uri, number) for number in range(self._config.nodes)],
            events,
            num_ranks=self._config.ranks,
            newest_durable=lambda: asyncio.run(newest_durable(uri)),
            look_on=lambda view: look_on(name, view),
            breath_steps=BREATH_STEPS,
        )
        return scenario.run()

    def _node(self, name: str, uri: str, number: int) -> Node:
        config, memory = self._config, self._memory
        supervisor = [sys.executable, "-m", "surefoot.cli.main", "run", "--to", uri, "--nproc", str(config.ranks)]
        if config.nodes > 1:
            supervisor += ["--nnodes", str(config.nodes), "--rdzv", self._hosts.meet]
            memory = memory / f"node{number}"
            memory.mkdir(exist_ok=True, mode=0o700)
        options = {"--steps": config.steps, "--seed": config.seed, "--name": name, "--log": self._place / "lines"}
        arguments = [str(word) for option in options.items() for word in option]
        return Node(
            name=name if config.nodes == 1 else f"{name}-node{number}",
            command=self._hosts.command(number, [*supervisor, str(config.script), *arguments]),
            memory=memory,
            output=self._place,
            environment={"XDG_STATE_HOME": str(self._place / "state" / name)},
            link=self._hosts.link(number),
        )


# ---------------------------------------------------------------------- what is judged


def _result(config: DemoConfig, place: Path, outcome: Outcome, calm: Outcome | None) -> DemoResult:
    log = place / "log.jsonl"
    problems = [*outcome.problems, *(calm.problems if calm is not None else ())]
    try:
        gather((place / "lines").iterdir(), log)
        verdict = judge(read(log), outcome.strikes, steps=config.steps, num_ranks=config.nodes * config.ranks)
    except CorruptError as error:
        problems.append(str(error))
        verdict = Verdict(False, tuple(Recovery(s.event.kind, None, 0, None) for s in outcome.strikes), ())
    if problems:
        # Everything else in the log follows from these.
        verdict = Verdict(verdict.bit_identical and calm is not None, verdict.recoveries, tuple(problems))
    tail = "" if verdict.passed else _output_tail(place)
    return DemoResult(config.steps, outcome.strikes, verdict, log, tail, config.page or place / "page.html", None)


def _shown(config: DemoConfig, place: Path, result: DemoResult) -> Shown:
    found = [
        stall
        for run in (DISTURBED, UNDISTURBED)
        for stall in stalls.find(run, (place / "state" / run).rglob("*.jsonl"))
    ]
    stalls.write(found, place / "stalls.jsonl")
    return Shown(
        seed=config.seed,
        steps=config.steps,
        ranks=config.nodes * config.ranks,
        lines=_lines(result.log),
        strikes=result.strikes,
        verdict=result.verdict,
        stalls=found,
        peers=result.peers or (),
        answer=result.to_json(),
    )


def _lines(log: Path) -> list[Line]:
    """What can be shown of the log: nothing, if it could not be gathered."""
    return read(log) if log.exists() else []


# ---------------------------------------------------------------------- the other ways


def _peers(config: DemoConfig, place: Path, memory: Path, result: DemoResult, look_on: LookOn) -> Iterator[PeerResult]:
    undisturbed = [line for line in _lines(result.log) if line.run == UNDISTURBED]
    times = step_times(undisturbed)
    if not times:
        return
    conditions = Conditions(
        steps=config.steps,
        seed=config.seed,
        ranks=config.ranks,
        events=_events(config),
        # As often as Surefoot's continuous saves, in steps.
        save_every=max(1, round(CONTINUOUS_GAP_S / quantile(times, 0.5))),
        memory=memory,
    )
    for method in config.peers:
        yield _peer(method, conditions, undisturbed, place, config.keep, look_on)


def _peer(
    method: Method, conditions: Conditions, undisturbed: Sequence[Line], place: Path, keep: bool, look_on: LookOn
) -> PeerResult:
    own = place / method.name
    own.mkdir()
    try:
        return run_peer(method, conditions, undisturbed, own, lambda view: look_on(method.name, view))
    finally:
        if not keep:
            for name in ("lines", "checkpoints"):
                shutil.rmtree(own / name, ignore_errors=True)


def _output_tail(place: Path) -> str:
    newest = max(place.glob("*.out"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return ""
    lines = newest.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join([f"{newest} ends:", *lines])


def _event_json(strike: Strike, recovery: Recovery) -> dict[str, Any]:
    return {
        "event": str(recovery.event),
        "resumed_from": recovery.resumed_from,
        "redone_steps": recovery.redone_steps,
        "seconds_to_new_step": recovery.seconds_to_new_step,
        "at_step": strike.at_step,
        "wanted_in": strike.event.phase,
        "struck_in": strike.struck_in,
        "rank": strike.event.rank,
        "node": strike.event.node,
        "durable": strike.durable,
        "exit_code": strike.exit_code,
    }


# ---------------------------------------------------------------------- places that do not outlive the demo


@contextmanager
def _log_directory(keep: bool) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="surefoot-demo-"))
    (place / "lines").mkdir()
    try:
        yield place
    except BaseException:
        # There is no verdict for which the log could be evidence.
        if not keep:
            shutil.rmtree(place, ignore_errors=True)
        raise
    if not keep:
        for name in ("lines", "state"):
            shutil.rmtree(place / name, ignore_errors=True)


@contextmanager
def _store(config: DemoConfig, hosts: Machines) -> Iterator[Callable[[str], str]]:
    """Where the runs live, from their name; gone afterwards unless it is to be kept."""
    if config.store is None:
        with hosts.server() as server, _environment(server.env):
            yield server.url
        return
    made = not config.store.exists()
    config.store.mkdir(parents=True, exist_ok=True)
    # A directory of its own: a run left by an earlier demo would be gone on with.
    place = Path(tempfile.mkdtemp(prefix="demo-", dir=config.store))
    try:
        yield lambda name: str(place / name)
    finally:
        if not config.keep:
            shutil.rmtree(config.store if made else place, ignore_errors=True)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
