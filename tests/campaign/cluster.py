"""A launcher for campaigns: one launch a node, forked from a process that has torch imported, all started together.

As a cluster's launcher does: if a launch ends badly all are waited for, and all are started again, with a fresh port.
"""

from __future__ import annotations

import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "road" / "usage"))

from warm import Job as Launch
from warm import Warm, free_port

from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED, SUPERSEDED
from surefoot.host.clock import boot_s
from surefoot.ipc.home import BASE_VARIABLE
from surefoot.scenario.job import Job, Node
from surefoot.scenario.machines import Machines
from surefoot.scenario.processes import MARK_VARIABLE, find_marked, send, wait_for_end

_NOT_AGAIN = (EVICTED, EVICTED_UNSAVED, SUPERSEDED)
"""Codes after which a launch is not started again unasked."""
_MOST_UNASKED = 25
"""Launches after ones that ended badly."""
_LOOK_EVERY_S = 0.1


class Forge:
    """What a node's launches are forked from, one job after another."""

    def __init__(self, machines: Machines, number: int, place: Path, clock: Path | None) -> None:
        """`place` is the node's directory; `clock` a library that makes its clock wrong."""
        self.memory, self.copies = place / "memory", place / "copies"
        self.clock = None if clock is None else place / "clock"
        self.mark = secrets.token_hex(8)
        # A scenario that gives up has every process say where it is.
        environment = {BASE_VARIABLE: str(self.memory), MARK_VARIABLE: self.mark, "PYTHONFAULTHANDLER": "1"}
        if clock is not None:
            environment |= {"LD_PRELOAD": str(clock), "WRONG_CLOCK": str(self.clock)}
        self.warm = Warm(machines.command(number, []), environment)


class ClusterJob(Job):
    """A node's part in the job. Its launch is the cluster's; its other processes are its own."""

    def __init__(self, node: Node, cluster: Cluster, number: int) -> None:
        super().__init__(node)
        self._cluster = cluster
        self._number = number
        self._mark = cluster.forges[number].mark
        self._warm = cluster.forges[number].warm
        self._launch: Launch | None = None
        self.wanted = False
        """Asked to be started, and not yet."""

    def start(self) -> None:
        if self._launch is not None and self._launch.code is None:
            # The cluster was quicker. A wish that were left would start it once more after its next end.
            return
        self.starts += 1
        self.wanted = True
        self._cluster.look(now=True)

    def begin(self, address: str, port: int) -> None:
        """Fork the ranks of this node."""
        cluster, (script, *arguments) = self._cluster, self.node.command
        self.wanted = False
        self._launch = self._warm.start(
            Path(script),
            arguments,
            self.output,
            dict(self.node.environment),
            ranks=cluster.num_ranks,
            world=cluster.num_ranks * len(cluster.jobs),
            first_rank=cluster.num_ranks * self._number,
            address=address,
            port=port,
        )

    def code(self) -> int | None:
        """Of the newest launch; None while it runs, or if there was none."""
        return None if self._launch is None else self._launch.code

    def exit_code(self) -> int | None:
        return self._cluster.exit_code(self)

    def noticed_pid(self, rank: int) -> int | None:
        return self.trainer_pid(rank)

    def members(self) -> list[int]:
        return [pid for pid in find_marked(self._mark) if pid != self._warm.pid]

    def kill(self) -> list[int]:
        found: list[int] = []
        while new := [pid for pid in self.members() if pid not in found]:
            for pid in new:
                send(pid, signal.SIGSTOP)
            found += new
        for pid in found:
            send(pid, signal.SIGKILL)
        for pid in found:
            wait_for_end(pid)
        return found


class Cluster:
    """All nodes' launches of one job."""

    def __init__(self, machines: Machines, forges: Sequence[Forge], num_ranks: int) -> None:
        self.machines = machines
        self.forges = forges
        self.num_ranks = num_ranks
        self.jobs: list[ClusterJob] = []
        self._codes: dict[ClusterJob, int | None] = {}
        self._begun = False
        self._unasked = 0
        self._looked_s = 0.0

    def job(self, node: Node) -> ClusterJob:
        job = ClusterJob(node, self, len(self.jobs))
        self.jobs.append(job)
        return job

    def exit_code(self, job: ClusterJob) -> int | None:
        """None as long as it runs, or will be started again."""
        self.look()
        code = self._codes.get(job)
        again = job.wanted or (code not in (FINISHED, *_NOT_AGAIN) and self._unasked < _MOST_UNASKED)
        return None if again else code

    def look(self, *, now: bool = False) -> None:
        """Start all again, once all have ended and some are to go on."""
        if not now and boot_s() < self._looked_s + _LOOK_EVERY_S:
            return
        self._looked_s = boot_s()
        self._codes = {job: job.code() for job in self.jobs}
        if self._begun and any(code is None for code in self._codes.values()):
            return
        if all(job.wanted or self._codes[job] not in _NOT_AGAIN for job in self.jobs) and self._is_needed():
            self._begin()

    def _is_needed(self) -> bool:
        if not self._begun:
            return all(job.wanted for job in self.jobs)
        return any(job.wanted or self._codes[job] != FINISHED for job in self.jobs)

    def _begin(self) -> None:
        if self._begun and not any(job.wanted for job in self.jobs):
            if self._unasked >= _MOST_UNASKED:
                return
            self._unasked += 1
        self._begun = True
        address, port = self.machines.hosts[0].address if self.machines.hosts else "127.0.0.1", free_port()
        for job in self.jobs:
            job.begin(address, port)
        self._codes = dict.fromkeys(self.jobs)


def script_command(script: Path, options: dict[str, object]) -> Sequence[str]:
    """The script's command line."""
    words = [str(script)]
    for name, value in options.items():
        words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
