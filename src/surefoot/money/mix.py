"""The mix: integer nodes of each kind over periods, by mixed-integer programming (HiGHS through scipy).

Here and now: reserved nodes r for the whole horizon. For each period p: on-demand nodes o_p, and a spot target m_p (one
binary z_{p,m} for each level m). Scenarios are windows of availability; A_{w,p,m} is the mean number of nodes that a
target of m yields in scenario w. Minimised:

    expected dollars + tail weight × CVaR of dollars + dollars an hour × expected finishing time

subject to: the work is done by the deadline in all but ⌊α·W⌋ scenarios, nodes ≤ n_max, a stable core
r + o_p ≥ n_core, a budget on the expected dollars, r + o_p + m_p one of the allowed world sizes (which leave out what
is below n_min). The CVaR is linear after Rockafellar and Uryasev (2000).

The plan has no recourse: it fixes its targets before it sees the market, so that its cost is an upper bound of what a
policy that reacts (`surefoot.money.deadlines`) pays.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import floor
from typing import Any

import numpy as np

from surefoot.errors import ConfigError, SurefootError
from surefoot.money.hazards import Floats, Hazard
from surefoot.money.units import HOUR_S


@dataclass(frozen=True, kw_only=True, slots=True)
class MixRequest:
    """Work, prices and limits. Prices are dollars for a node-hour; None: not to be had."""

    work_node_h: float
    nodes: int
    period_h: float
    on_demand_usd: float
    spot_usd: float | None
    reserved_usd: float | None = None
    spot_goodput: float = 1.0
    stable_goodput: float = 1.0
    """Of reserved and on-demand nodes."""
    world_sizes: tuple[int, ...] = ()
    """Allowed numbers of nodes, 0 (the job pauses) among them if allowed; empty: any."""
    core_nodes: int = 0
    miss_share: float = 0.1
    """α: the deadline may be missed in this share of scenarios."""
    budget_usd: float | None = None
    tail_weight: float = 0.0
    tail_share: float = 0.1
    delay_usd_per_h: float = 0.0
    gap: float = 1e-4
    """Relative gap at which the solver stops. With 0.5 % a tighter problem can come out cheaper than a looser one."""
    node_limit: int = 1500
    """Branches after which the solver stops: a count and not a time, so that a busy machine finds the same plan."""


@dataclass(frozen=True, slots=True)
class Mix:
    """The best plan found, with the solver's own bound."""

    reserved: int
    on_demand: tuple[int, ...]
    spot: tuple[int, ...]
    objective_usd: float
    expected_usd: float
    bound_usd: float
    """No plan has a lower objective."""
    gap: float
    scenario_finish_h: tuple[float, ...]
    """Infinite where the deadline is missed."""

    @property
    def on_time_share(self) -> float:
        return float(np.isfinite(self.scenario_finish_h).mean())


class InfeasibleMixError(SurefootError):
    """No plan keeps the limits; the message says which were asked for."""


def windows(nodes: Sequence[int], tick_s: float, period_h: float, periods: int, count: int, seed: int) -> Floats:
    """``count`` scenarios: availability in ticks, cut from the wrapped series at random starts, a row a scenario."""
    ticks = round(periods * period_h * HOUR_S / tick_s)
    start = np.random.default_rng(seed).integers(len(nodes), size=count)
    index = (start[:, None] + np.arange(ticks)) % len(nodes)
    return np.asarray(np.array(nodes, dtype=np.float64)[index])


def from_hazard(
    hazard: Hazard, nodes: int, replacement_s: float, tick_s: float, ticks: int, seed: int
) -> tuple[int, ...]:
    """Availability that a hazard makes: lost nodes are away for ``replacement_s``."""
    sampler = hazard.sampler(np.random.default_rng(seed), 1)
    who = np.zeros(1, dtype=np.int64)
    away = np.zeros(ticks + 1)
    now = 0.0
    while True:
        gap, size = sampler.draw(who)
        now += float(gap[0])
        if now >= ticks * tick_s:
            break
        away[int(now / tick_s) : int((now + replacement_s) / tick_s) + 1] += int(size[0])
    return tuple(int(max(0, nodes - lost)) for lost in away[:ticks])


def yields(scenarios: Floats, periods: int, nodes: int) -> Floats:
    """A[w, p, m]: mean nodes that a spot target of m = 0 … nodes yields in each period."""
    count, ticks = scenarios.shape
    per_period = ticks // periods
    cut = scenarios[:, : per_period * periods].reshape(count, periods, per_period)
    return np.stack([np.minimum(cut, m).mean(axis=2) for m in range(nodes + 1)], axis=2)


def solve(request: MixRequest, yielded: Floats) -> Mix:
    """The best mix.

    Raises:
        InfeasibleMixError: no plan keeps deadline, budget and node limits together.
        ConfigError: scipy is not installed.
    """
    problem = _Problem(request, yielded)
    result = problem.solve()
    if result.x is None:
        limits = (
            f"α {request.miss_share:g}, budget {request.budget_usd}, core {request.core_nodes}, {request.nodes} nodes"
        )
        raise InfeasibleMixError(f"no mix keeps the limits ({limits}): allow more time, money or nodes")
    return problem.read(result)


def replay(mix: Mix, request: MixRequest, yielded: Floats) -> tuple[Floats, Floats]:
    """Dollars and finishing hours of a fixed plan in other scenarios; infinite where the horizon does not do."""
    spot = np.array(mix.spot)
    periods = np.arange(len(spot))
    got = yielded[:, periods, spot]
    bought = np.array(mix.on_demand)
    hours = request.period_h
    done = np.cumsum(_progress(request, got, (mix.reserved + bought)[None, :]), axis=1)
    enough = done >= request.work_node_h - 1e-6
    last = np.where(enough.any(axis=1), np.argmax(enough, axis=1), len(spot) - 1)
    row = np.arange(len(done))
    before = np.where(last > 0, done[row, np.maximum(last - 1, 0)], 0.0)
    gained = np.maximum(done[row, last] - before, 1e-12)
    part = np.minimum(1.0, (request.work_node_h - before) / gained)
    # Spot and on-demand are given back when the work is done; reserved nodes are paid for to the end.
    used = np.clip(last[:, None] + part[:, None] - periods[None, :], 0.0, 1.0)
    paid = request.on_demand_usd * bought[None, :] + (request.spot_usd or 0.0) * got
    cost = hours * ((paid * used).sum(axis=1) + (request.reserved_usd or 0.0) * mix.reserved * len(spot))
    return cost, np.where(enough.any(axis=1), hours * (last + part), np.inf)


def polish(mix: Mix, request: MixRequest, yielded: Floats) -> Mix:
    """Every spot node that fits, where that costs no more: nodes are given back when the work is done, so that a plan
    that waits for its deadline has a twin that finishes early."""
    room = [request.nodes - mix.reserved - bought for bought in mix.on_demand]
    if request.spot_usd is None or (request.world_sizes and request.nodes not in request.world_sizes):
        return mix
    early = replace(mix, spot=tuple(room))
    cost, finish = replay(early, request, yielded)
    before, _ = replay(mix, request, yielded)
    if cost.mean() > before.mean() * (1.0 + request.gap):
        return mix
    return replace(early, scenario_finish_h=tuple(map(float, finish)))


def _progress(request: MixRequest, spot: Floats, stable: Floats) -> Floats:
    return request.period_h * (request.spot_goodput * spot + request.stable_goodput * stable)


class _Problem:
    """Columns: r | o_p | z_{p,m} | f_{w,p} (1: done by the end of p) | t, u_w (tail) | s_{p,n} (1: n nodes in p)."""

    def __init__(self, request: MixRequest, yielded: Floats) -> None:
        self._request = request
        self._yield = yielded
        self._count, self._periods, levels = yielded.shape
        self._levels = levels
        self._o = 1
        self._z = self._o + self._periods
        self._f = self._z + self._periods * levels
        self._t = self._f + self._count * self._periods
        self._s = self._t + 1 + self._count
        self._size = self._s + self._periods * len(request.world_sizes)
        self._rows: list[tuple[Floats, float, float]] = []

    def solve(self) -> Any:
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
        except ImportError as error:
            raise ConfigError("the mix needs scipy: pip install 'surefoot[plan]'") from error
        self._constrain()
        matrix = np.array([row for row, _, _ in self._rows])
        low, high = np.array([low for _, low, _ in self._rows]), np.array([high for _, _, high in self._rows])
        whole = np.ones(self._size)
        whole[self._t : self._s] = 0
        with _silent_stdout():
            return milp(
                self._objective(),
                constraints=LinearConstraint(matrix, low, high),
                integrality=whole,
                bounds=Bounds(*self._bounds()),
                options={"mip_rel_gap": self._request.gap, "node_limit": self._request.node_limit},
            )

    def read(self, result: Any) -> Mix:
        x = np.rint(result.x[: self._f]).astype(int)
        spot = x[self._z : self._f].reshape(self._periods, self._levels).argmax(axis=1)
        partial = Mix(
            reserved=int(x[0]),
            on_demand=tuple(int(n) for n in x[self._o : self._z]),
            spot=tuple(int(m) for m in spot),
            objective_usd=float(result.fun),
            expected_usd=float(self._dollars(result.x).mean()),
            bound_usd=float(result.mip_dual_bound),
            gap=float(result.mip_gap),
            scenario_finish_h=(),
        )
        _, finish = replay(partial, self._request, self._yield)
        return replace(partial, scenario_finish_h=tuple(map(float, finish)))

    def _dollars(self, x: Floats) -> Floats:
        return np.array([row @ x[: self._f] for row in self._scenario_rows()])

    def _scenario_rows(self) -> list[Floats]:
        """Dollars of each scenario as a row over r, o, z."""
        request, hours = self._request, self._request.period_h
        rows = []
        for w in range(self._count):
            row = np.zeros(self._f)
            row[0] = (request.reserved_usd or 0.0) * hours * self._periods
            row[self._o : self._z] = request.on_demand_usd * hours
            row[self._z :] = (request.spot_usd or 0.0) * hours * self._yield[w].reshape(-1)
            rows.append(row)
        return rows

    def _objective(self) -> Floats:
        request = self._request
        cost = np.zeros(self._size)
        cost[: self._f] = np.mean(self._scenario_rows(), axis=0)
        # Finishing time of a scenario: one period for each period at whose end it is not done yet, and one more.
        cost[self._f : self._t] = -request.delay_usd_per_h * request.period_h / self._count
        cost[self._t] = request.tail_weight
        cost[self._t + 1 : self._s] = request.tail_weight / (request.tail_share * self._count)
        return cost

    def _bounds(self) -> tuple[Floats, Floats]:
        request = self._request
        low, high = np.zeros(self._size), np.ones(self._size)
        high[0] = request.nodes if request.reserved_usd is not None else 0
        high[self._o : self._z] = request.nodes
        if request.spot_usd is None:
            blocked = np.arange(self._levels) > 0
            high[self._z : self._f] = np.tile(~blocked, self._periods).astype(float)
        high[self._t : self._s] = np.inf
        return low, high

    def _constrain(self) -> None:
        self._sizes()
        self._done()
        if self._request.budget_usd is not None:
            row = np.zeros(self._size)
            row[: self._f] = np.mean(self._scenario_rows(), axis=0)
            self._rows.append((row, -np.inf, self._request.budget_usd))
        if self._request.tail_weight > 0:
            self._tail()

    def _sizes(self) -> None:
        request = self._request
        for p in range(self._periods):
            target, all_nodes, core = np.zeros(self._size), np.zeros(self._size), np.zeros(self._size)
            levels = slice(self._z + p * self._levels, self._z + (p + 1) * self._levels)
            target[levels] = 1
            core[[0, self._o + p]] = 1
            all_nodes[[0, self._o + p]] = 1
            all_nodes[levels] = np.arange(self._levels)
            self._rows.append((target, 1, 1))
            self._rows.append((all_nodes, 0, request.nodes))
            self._allow(p, all_nodes)
            self._rows.append((core, request.core_nodes, np.inf))

    def _allow(self, p: int, all_nodes: Floats) -> None:
        """The nodes of period p are one of the allowed world sizes."""
        sizes = self._request.world_sizes
        if not sizes:
            return
        chosen = slice(self._s + p * len(sizes), self._s + (p + 1) * len(sizes))
        one, same = np.zeros(self._size), all_nodes.copy()
        one[chosen] = 1
        same[chosen] = -np.array(sizes, dtype=np.float64)
        self._rows.append((one, 1, 1))
        self._rows.append((same, 0, 0))

    def _done(self) -> None:
        """f_{w,p} may be 1 only when the work up to p suffices; once done, done for good."""
        request = self._request
        for w in range(self._count):
            work = np.zeros(self._size)
            for p in range(self._periods):
                work[0] += request.period_h * request.stable_goodput
                work[self._o + p] = request.period_h * request.stable_goodput
                levels = slice(self._z + p * self._levels, self._z + (p + 1) * self._levels)
                work[levels] = request.period_h * request.spot_goodput * self._yield[w, p]
                row = work.copy()
                row[self._f + w * self._periods + p] = -request.work_node_h
                if request.delay_usd_per_h > 0 or p == self._periods - 1:
                    self._rows.append((row, 0, np.inf))
        last = np.zeros(self._size)
        last[self._f + self._periods - 1 : self._t : self._periods] = 1
        allowed = floor(request.miss_share * self._count + 1e-9)
        self._rows.append((last, self._count - allowed, np.inf))

    def _tail(self) -> None:
        for w, dollars in enumerate(self._scenario_rows()):
            row = np.zeros(self._size)
            row[: self._f] = dollars
            row[self._t] = -1
            row[self._t + 1 + w] = -1
            self._rows.append((row, -np.inf, 0))


@contextmanager
def _silent_stdout() -> Iterator[None]:
    """HiGHS prints lines of its own to the process's standard output, in the middle of our JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    sink = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(sink)
        os.close(kept)
