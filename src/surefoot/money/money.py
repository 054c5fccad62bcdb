"""Dollars from phases, and who earned the saving.

Invariants: the lines of a cost add up to it; price saving + scheme saving = net saving; a saving is never above the
counterfactual, the on-demand run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from surefoot.money.closed_form import Outcome
from surefoot.money.hazards import Floats
from surefoot.money.phases import PHASES, Phase
from surefoot.money.simulate import Runs
from surefoot.money.transfer import MoveRates
from surefoot.money.units import HOUR_S


@dataclass(frozen=True, slots=True)
class NodeRates:
    """Dollars for an hour of one node."""

    node_usd_per_h: float
    standby_usd_per_h: float


@dataclass(frozen=True, slots=True)
class CostLine:
    """One component of a cost: quantity × price."""

    name: str
    unit: str
    quantity: float
    usd_per_unit: float
    cost_usd: float


@dataclass(frozen=True, slots=True)
class Saving:
    """Against an on-demand run of the same work; the baseline is the scheme that a spot user has anyway."""

    on_demand_usd: float
    baseline_usd: float
    cost_usd: float

    @property
    def net(self) -> float:
        return self._share(self.on_demand_usd - self.cost_usd)

    @property
    def price(self) -> float:
        """What spot prices save with the baseline scheme, as a share of the on-demand cost."""
        return self._share(self.on_demand_usd - self.baseline_usd)

    @property
    def scheme(self) -> float:
        """What this scheme saves beyond that."""
        return self._share(self.baseline_usd - self.cost_usd)

    def _share(self, saved_usd: float) -> float:
        return saved_usd / self.on_demand_usd if isfinite(saved_usd) else -np.inf


def cost_lines(outcome: Outcome, rates: NodeRates, moves: MoveRates) -> list[CostLine]:
    """Every component of a run's cost, zero ones left out."""
    lines = []
    for phase in PHASES:
        node_h = outcome.node_s.get(phase, 0.0) / HOUR_S
        usd = rates.standby_usd_per_h if phase is Phase.STANDBY else rates.node_usd_per_h
        lines.append(CostLine(phase.value, "node-hour", node_h, usd, node_h * usd))
    for name, unit, quantity, usd in (
        ("requests", "save", outcome.saves, moves.puts_usd_per_save),
        ("transfer_to_store", "save", outcome.saves, moves.route_usd_per_save),
        ("transfer_from_store", "load", outcome.loads, moves.back_usd_per_load),
        ("transfer_to_peers", "save", outcome.saves, moves.peers_usd_per_save),
        ("storage", "hour", outcome.wall_s / HOUR_S, moves.storage_usd_per_wall_s * HOUR_S),
    ):
        lines.append(CostLine(name, unit, quantity, usd, quantity * usd))
    return [line for line in lines if line.cost_usd]


def cost_usd(outcome: Outcome, rates: NodeRates, moves: MoveRates) -> float:
    """Sum of `cost_lines`; infinite for a run that never ends."""
    if not isfinite(outcome.wall_s):
        return np.inf
    return sum(line.cost_usd for line in cost_lines(outcome, rates, moves))


def costs_usd(runs: Runs, rates: NodeRates, moves: MoveRates) -> Floats:
    """The same for every simulated run."""
    total = np.zeros(len(runs.wall_s))
    for phase, node_s in runs.node_s.items():
        usd = rates.standby_usd_per_h if phase is Phase.STANDBY else rates.node_usd_per_h
        total += node_s / HOUR_S * usd
    per_save = moves.puts_usd_per_save + moves.route_usd_per_save + moves.peers_usd_per_save
    total += runs.saves * per_save + runs.loads * moves.back_usd_per_load
    total += runs.wall_s * moves.storage_usd_per_wall_s
    return total


def moving_usd(lines: Sequence[CostLine]) -> float:
    """The part that is neither compute nor standby."""
    compute = {phase.value for phase in PHASES}
    return sum(line.cost_usd for line in lines if line.name not in compute)
