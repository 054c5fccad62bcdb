"""Jobs, timings and hazards for tests; random ones from a seed."""

from __future__ import annotations

import random
from functools import partial

from surefoot.money.form import Form, example_options, request_of
from surefoot.money.hazards import Renewal
from surefoot.money.job import Job, Timing
from surefoot.money.request import Request
from surefoot.money.survival import group_survival

H = 3600.0


def one_node_job(work_s: float, step_s: float = 1.0) -> Job:
    return Job(work_s=work_s, state_bytes=1e9, step_s=step_s, nodes=1)


def brief_job() -> Job:
    return Job(work_s=72 * H, state_bytes=840e9, step_s=12.0, nodes=8)


def brief_request() -> Request:
    return request_of(Form(**example_options("brief")))


def every(gap_s: float) -> Renewal:
    return Renewal(mean_gap_s=gap_s)


class Case:
    """A random parameter set inside what the closed form covers exactly."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.kind = rng.choice(["blocking", "bucket", "memory", "replica", "shrink", "shrink", "shrink"])
        self.nodes = rng.choice([4, 8, 16, 32])
        self.gap_s = rng.uniform(0.5, 8.0) * H
        self.job = Job(
            work_s=rng.uniform(8.0, 40.0) * self.gap_s,
            state_bytes=840e9,
            step_s=rng.uniform(2.0, 30.0),
            nodes=self.nodes,
        )
        self.announced = rng.choice([0.0, 0.5, 0.9, 1.0])
        self.hazard = Renewal(mean_gap_s=self.gap_s, sizes=self._sizes(rng))
        self.timing = self._timing(rng)

    def _sizes(self, rng: random.Random) -> dict[int, float]:
        return rng.choice([{1: 1.0}, {1: 0.8, 2: 0.2}, {1: 0.6, 2: 0.25, 3: 0.15}])

    def _timing(self, rng: random.Random) -> Timing:
        blocking = self.kind == "blocking"
        # Replacements are back long before the next event: overlaps are for the simulation alone.
        replacement_s = rng.uniform(0.0, 0.02) * self.gap_s
        hot = self.kind in ("memory", "replica", "shrink")
        return Timing(
            interval_s=rng.uniform(0.02, 0.5) * self.gap_s,
            stall_s=rng.uniform(20.0, 600.0) if blocking else rng.uniform(0.0, 2.0),
            lag_s=0.0 if blocking else rng.uniform(0.0, 0.1) * self.gap_s,
            load_s=rng.uniform(0.0, 0.05) * self.gap_s,
            restart_s=rng.uniform(5.0, 120.0),
            rejoin_s=rng.uniform(0.0, 60.0),
            replacement_s=replacement_s,
            shrink=self.kind == "shrink",
            hot_interval_s=self.job.step_s * rng.choice([1, 1, 4]) if hot else 0.0,
            hot_lag_s=rng.uniform(0.0, 40.0),
            hot_announced=rng.random() < 0.7,
            replica_survival=partial(group_survival, self.nodes, 2) if self.kind in ("replica", "shrink") else None,
        )
