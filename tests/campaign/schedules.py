"""Schedules of faults on several nodes: drawn from a seed, carried out, judged, shrunk.

schedules.py --seeds FIRST COUNT [--nodes N] [--shrink]     draw and run these
schedules.py --events FILE --seed N                         run one that was written down

One line of JSON a schedule on stdout. The process goes into a network of its own if the machine allows it; else links
are left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster import Cluster, Forge, script_command

from surefoot.core.layout import BoundaryId
from surefoot.host.clock import boot_s, wall_s
from surefoot.ipc.home import base_directory
from surefoot.records.records import Records
from surefoot.scenario.durable import newest_durable
from surefoot.scenario.engine import Outcome, Scenario
from surefoot.scenario.events import LASTING, Event, Kind, draw
from surefoot.scenario.faults import write_number
from surefoot.scenario.job import Node
from surefoot.scenario.log import DISTURBED, UNDISTURBED, gather, read
from surefoot.scenario.machines import Machines, machines
from surefoot.scenario.network import is_isolated, isolate, small_disk
from surefoot.scenario.s3_server import S3Server
from surefoot.scenario.verdict import judge
from surefoot.tiers.open import open_tier

SCRIPT = Path(__file__).with_name("campaign_script.py")
STEPS = 240
FIRST_STEP, LAST_STEP = 10, 150
BREATH_STEPS = 10
_PATIENCE_S = 180.0
_DISK_BYTES = 4 << 20
_PACE_MARGIN = 5
_TRAINER = ("training", "filling", "sealed")
_AGENT = ("idle", "flushing", "committing")
_PHASES = {
    Kind.EVICT: _TRAINER[:2],
    Kind.KILL_TRAINER: (*_TRAINER, "restoring"),
    Kind.KILL_GROUP: _TRAINER,
    Kind.KILL_AGENT: _AGENT,
    Kind.KILL_ALL: (*_TRAINER, *_AGENT[1:]),
    Kind.KILL_JOB: (*_TRAINER, *_AGENT[1:]),
    Kind.ROT: ("training", "flushing"),
    Kind.PAUSE: (*_TRAINER, *_AGENT[1:]),
    Kind.CUT: (*_TRAINER, "flushing"),
    Kind.SLOW: ("training", "flushing"),
    Kind.STORE_CUT: ("training", "flushing"),
    Kind.STORE_SLOW: ("training", "flushing"),
    Kind.STORE_HANG: ("training", "flushing", "committing"),
    Kind.FULL_DISK: ("training", "flushing"),
    Kind.CLOCK: ("training", "flushing"),
}
_RESTARTING = (Kind.EVICT, Kind.KILL_TRAINER, Kind.KILL_GROUP, Kind.KILL_ALL, Kind.KILL_JOB, Kind.ROT)
"""After these all trainers start again."""
_OF_LINKS = (Kind.CUT, Kind.SLOW, Kind.STORE_CUT, Kind.STORE_SLOW)
_LASTS_S = (1.0, 6.0, 20.0)
"""Too short to be noticed; noticed; longer than a silent node is waited for."""
_LONG_S = {Kind.STORE_HANG: 75.0, Kind.PAUSE: 150.0}
"""Longer than the answer to a request is waited for; minutes, after which nobody counts on the node any more."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a seed decides beside the events."""

    seed: int
    kind: str
    object_store: bool
    disks: bool
    """Whether each node keeps copies on a disk of its own."""
    nodes: int
    ranks: int = 1
    steps: int = STEPS

    @classmethod
    def of(cls, seed: int, nodes: int) -> Setting:
        return cls(seed, ("ddp", "fsdp")[seed % 2], seed // 2 % 2 == 1, seed // 4 % 2 == 1, nodes)


def schedule(setting: Setting, *, links: bool) -> list[Event]:
    """One to four events, by the seed alone."""
    rng = random.Random(f"schedule {setting.seed}")
    able = [kind for kind in _PHASES if _is_able(kind, setting, links=links)]
    kinds = [rng.choice(able) for _ in range(rng.randint(1, 4))]
    span = (LAST_STEP - FIRST_STEP) // len(kinds)
    wanted = [
        Event(
            kind=kind,
            phase=rng.choice(_PHASES[kind]),
            step=FIRST_STEP + number * span,
            latest=FIRST_STEP + (number + 1) * span - 15,
            rank=None,
            node=None,
            lasts_s=_lasts_s(kind, rng, last=number + 1 == len(kinds)),
        )
        for number, kind in enumerate(kinds)
    ]
    return _possible(draw(wanted, rng, setting.ranks, setting.nodes))


def _possible(events: Sequence[Event]) -> list[Event]:
    """With each phase one that its process comes to."""
    possible: list[Event] = []
    for event in events:
        before = possible[-1] if possible else None
        if event.phase == "committing":
            # Only the first node's agent commits, as long as it lives.
            possible.append(replace(event, node=0))
        elif event.phase != "restoring":
            possible.append(event)
        elif before is not None and before.kind in _RESTARTING:
            # In the recovery from what was before: there may be none later. Fewer steps than that was at: of the last
            # few before it the node's last look may not have known.
            possible.append(replace(event, step=max(0, before.step - BREATH_STEPS)))
        else:
            possible.append(replace(event, phase=_TRAINER[0]))
    return possible


def _lasts_s(kind: Kind, rng: random.Random, *, last: bool) -> float:
    """Training goes on while a store hangs, and would be over before a next event."""
    if kind not in LASTING:
        return 0.0
    return rng.choice((*_LASTS_S, _LONG_S[kind]) if last and kind in _LONG_S else _LASTS_S)


def _is_able(kind: Kind, setting: Setting, *, links: bool) -> bool:
    if kind is Kind.FULL_DISK:
        return links and setting.disks
    if kind is Kind.CLOCK:
        return shutil.which("cc") is not None
    if kind is Kind.STORE_HANG:
        return setting.object_store
    if kind in (Kind.STORE_CUT, Kind.STORE_SLOW):
        return links and setting.object_store
    return links or kind not in _OF_LINKS


class Place:
    """Where schedules run: memory, output, stores."""

    def __init__(self, root: Path, hosts: Machines, forges: Sequence[Forge], server: S3Server) -> None:
        self._root = root
        self._hosts = hosts
        self._forges = forges
        self._server = server
        self._undisturbed: dict[tuple[str, int, int], Path] = {}
        self._runs = 0

    def run(
        self,
        setting: Setting,
        events: Sequence[Event],
        settings: Mapping[str, Any] | None = None,
        *,
        keep: bool = False,
    ) -> dict[str, Any]:
        """Run one schedule; returns what came of it.

        Args:
            setting: what is trained.
            events: what befalls it.
            settings: of the run, beside the defaults.
            keep: keep the logs even if all is well.
        """
        self._runs += 1
        place = self._root / f"seed{setting.seed}-{self._runs}"
        calm = self._calm(setting)
        outcome = self._play(DISTURBED, setting, events, place, settings or {})
        parts = [*(place / "lines").iterdir(), *calm.iterdir()]
        gather(parts, place / "log.jsonl")
        lines = read(place / "log.jsonl")
        verdict = judge(lines, outcome.strikes, steps=setting.steps, num_ranks=setting.nodes * setting.ranks)
        problems = [*outcome.problems, *verdict.problems]
        kept = keep or bool(problems)
        if not kept:
            shutil.rmtree(place)
        return {
            "seed": setting.seed,
            "kind": setting.kind,
            "store": ("object" if setting.object_store else "disk") + (" and copies" if setting.disks else ""),
            "verdict": "FAIL" if problems else "PASS",
            "bit_identical": verdict.bit_identical,
            "events": [event.to_json() for event in events],
            "recoveries": [
                [strike.at_step, recovery.resumed_from, recovery.redone_steps, recovery.seconds_to_new_step]
                for strike, recovery in zip(outcome.strikes, verdict.recoveries, strict=True)
            ],
            "problems": problems,
            "place": str(place) if kept else None,
        }

    def _calm(self, setting: Setting) -> Path:
        """Lines of undisturbed training, which are those of every seed of its kind and size."""
        key = (setting.kind, setting.nodes, setting.steps)
        if key not in self._undisturbed:
            place = self._root / f"calm-{setting.kind}-{setting.nodes}-{setting.steps}"
            outcome = self._play(UNDISTURBED, setting, [], place, {})
            if outcome.problems:
                raise AssertionError("\n".join(outcome.problems))
            self._undisturbed[key] = place / "lines"
        return self._undisturbed[key]

    def _play(
        self, name: str, setting: Setting, events: Sequence[Event], place: Path, settings: Mapping[str, Any]
    ) -> Outcome:
        (place / "lines").mkdir(parents=True)
        uri = self._server.url(place.name) if setting.object_store else str(place / "run")
        cluster = Cluster(self._hosts, self._forges, setting.ranks)
        nodes = [self._node(name, setting, uri, place, settings, number) for number in range(setting.nodes)]
        pace, damaged = place / "pace", list[BoundaryId]()
        write_number(pace, 0)
        return Scenario(
            nodes,
            events,
            num_ranks=setting.ranks,
            look_on=lambda view: write_number(pace, _pace(events, len(view.strikes), setting.steps)),
            newest_durable=lambda: asyncio.run(newest_durable(uri, damaged)),
            may_damage=lambda: asyncio.run(_num_sound(uri, damaged)) > 1,
            damage=lambda: damaged.extend(asyncio.run(_damage(uri, random.Random(setting.seed)))),
            store_link=self._hosts.store,
            store=self._server,
            make_job=cluster.job,
            breath_steps=BREATH_STEPS,
            patience_s=_PATIENCE_S,
        ).run()

    def _node(
        self, name: str, setting: Setting, uri: str, place: Path, settings: Mapping[str, Any], number: int
    ) -> Node:
        forge = self._forges[number]
        for path in forge.copies.iterdir():
            shutil.rmtree(path)
        options: dict[str, object] = {"steps": setting.steps, "kind": setting.kind, "log": place / "lines"}
        options |= {"name": name, "to": uri, "pace": place / "pace", "epoch": wall_s() - boot_s()}
        options["settings"] = {**settings, **({"disk": [str(forge.copies)]} if setting.disks else {})}
        return Node(
            name=f"node{number}",
            command=script_command(SCRIPT, options),
            memory=forge.memory,
            copies=forge.copies if is_isolated() else None,
            clock=forge.clock,
            output=place,
            environment={"XDG_STATE_HOME": str(place / "state")},
            link=self._hosts.link(number),
        )


def _pace(events: Sequence[Event], struck: int, steps: int) -> int:
    """The step from which training goes slowly: that of the next event, so that it is not over before."""
    return events[struck].step + _PACE_MARGIN if struck < len(events) else steps


async def _num_sound(uri: str, damaged: Sequence[BoundaryId]) -> int:
    """Committed steps that were not damaged."""
    records = Records(open_tier(uri))
    try:
        return len(set(await records.commits()) - set(damaged))
    finally:
        await records.tier.close()


async def _damage(uri: str, rng: random.Random) -> list[BoundaryId]:
    """Flip a byte of a shard of the newest committed step; returns that step, if there is one."""
    records = Records(open_tier(uri))
    try:
        commits = await records.commits()
        if not commits:
            return []
        manifest = await records.manifest(commits[-1])
        assert manifest is not None
        shard = rng.choice(manifest.shards)
        data = bytearray(await records.tier.get(shard.key))
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        await records.tier.delete([shard.key])
        await records.tier.put(shard.key, bytes(data))
        return [commits[-1]]
    finally:
        await records.tier.close()


# ---------------------------------------------------------------------- shrinking


def shrink(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool]) -> list[Event]:
    """Leave out events as long as what is left still fails."""
    kept = list(events)
    for event in list(kept):
        fewer = [other for other in kept if other is not event]
        if fewer and fails(fewer):
            kept = fewer
    return kept


# ---------------------------------------------------------------------- the command


@contextmanager
def _node_place(place: Path) -> Iterator[Path]:
    """A node's directory: memory, copies, clock."""
    for path in (place, place / "memory", place / "copies"):
        path.mkdir(mode=0o700)
    write_number(place / "clock", 0)
    with small_disk(place / "copies", _DISK_BYTES) if is_isolated() else nullcontext():
        yield place


def _wrong_clock(root: Path) -> Path | None:
    """The library, if this machine can make it."""
    library, source = root / "wrong_clock.so", Path(__file__).with_name("wrong_clock.c")
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


@contextmanager
def open_place(num_nodes: int) -> Iterator[Place]:
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="surefoot-campaign-"))
        memory = stack.enter_context(tempfile.TemporaryDirectory(prefix="surefoot-campaign-", dir=base_directory()))
        clock = _wrong_clock(root)
        nodes = [stack.enter_context(_node_place(Path(memory) / f"node{number}")) for number in range(num_nodes)]
        hosts = stack.enter_context(machines(num_nodes))
        server = stack.enter_context(hosts.server())
        os.environ.update(server.env)
        forges = []
        for number, node in enumerate(nodes):
            forges.append(Forge(hosts, number, node, clock))
            stack.callback(forges[-1].warm.close)
        yield Place(root, hosts, forges, server)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seeds", type=int, nargs=2, default=(0, 1))
    options.add_argument("--nodes", type=int, default=3)
    options.add_argument("--events", type=Path)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--shrink", action="store_true")
    given = options.parse_args()
    isolate([sys.executable, *sys.argv])
    failed = 0
    with open_place(given.nodes) as place:
        for setting, events in _wanted(given):
            told = place.run(setting, events)
            failed += told["verdict"] != "PASS"
            print(json.dumps(told), flush=True)
            if told["verdict"] != "PASS" and given.shrink:
                few = shrink(events, partial(_fails, place, setting))
                print(json.dumps({"seed": setting.seed, "shrunk": [event.to_json() for event in few]}), flush=True)
    return 1 if failed else 0


def _fails(place: Place, setting: Setting, events: Sequence[Event]) -> bool:
    return bool(place.run(setting, events)["verdict"] != "PASS")


def _wanted(given: argparse.Namespace) -> Iterator[tuple[Setting, list[Event]]]:
    if given.events is not None:
        events = [Event.from_json(data) for data in json.loads(given.events.read_text())]
        yield Setting.of(given.seed, given.nodes), events
        return
    first, count = given.seeds
    for seed in range(first, first + count):
        setting = Setting.of(seed, given.nodes)
        yield setting, schedule(setting, links=is_isolated())


if __name__ == "__main__":
    sys.exit(main())
