"""The mix: never dearer than any plan tried by hand, never below its bound, within its limits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from surefoot.errors import ConfigError
from surefoot.money import mix
from surefoot.money.deadlines import offered
from surefoot.money.hazards import Renewal
from surefoot.money.traces import load_trace

PERIODS = 6
ASKED = mix.MixRequest(
    work_node_h=100.0, nodes=4, period_h=5.0, on_demand_usd=80.0, spot_usd=25.0, reserved_usd=50.0, miss_share=0.1
)


def _yielded(seed: int = 1, scenarios: int = 10) -> np.ndarray:
    offer = offered(load_trace("bamboo-p3"), 4)
    return mix.yields(mix.windows(offer.nodes, offer.tick_s, 5.0, PERIODS, scenarios, seed), PERIODS, 4)


def _expected_usd(asked: mix.MixRequest, reserved: int, bought: int, target: int, yielded: np.ndarray) -> float:
    fixed = asked.period_h * PERIODS * (reserved * (asked.reserved_usd or 0) + bought * asked.on_demand_usd)
    return fixed + asked.period_h * (asked.spot_usd or 0) * float(yielded[:, :, target].sum(axis=1).mean())


def _on_time(asked: mix.MixRequest, reserved: int, bought: int, target: int, yielded: np.ndarray) -> bool:
    work = asked.period_h * (yielded[:, :, target].sum(axis=1) + PERIODS * (reserved + bought))
    return (work < asked.work_node_h - 1e-9).mean() <= asked.miss_share + 1e-9


def test_no_constant_plan_is_cheaper() -> None:
    """Every constant plan of reserved, on-demand and spot nodes that is on time costs at least the optimum."""
    yielded = _yielded()
    found = mix.solve(ASKED, yielded)
    tried = [
        _expected_usd(ASKED, r, o, m, yielded)
        for r in range(5)
        for o in range(5)
        for m in range(5)
        if r + o + m <= 4 and _on_time(ASKED, r, o, m, yielded)
    ]
    assert len(tried) > 5
    assert found.objective_usd <= min(tried) + 1e-6
    assert found.bound_usd <= found.objective_usd + 1e-6
    assert found.gap <= 1e-3


def test_the_limits_are_kept() -> None:
    """Nodes of each period within the fleet, on time in all but a tenth of the scenarios."""
    found = mix.solve(ASKED, _yielded())
    for bought, target in zip(found.on_demand, found.spot, strict=True):
        assert 0 <= found.reserved + bought + target <= 4
    assert found.on_time_share >= 0.9


def test_a_stable_core_is_kept_and_costs() -> None:
    """Two nodes that are not spot, in every period; never cheaper than without."""
    free, core = mix.solve(ASKED, _yielded()), mix.solve(replace(ASKED, core_nodes=2), _yielded())
    assert all(core.reserved + bought >= 2 for bought in core.on_demand)
    assert core.objective_usd >= free.bound_usd - 1e-6


def test_allowed_world_sizes_are_kept() -> None:
    """Only 0, 2 or 4 nodes in a period."""
    found = mix.solve(replace(ASKED, world_sizes=(0, 2, 4)), _yielded())
    sizes = {found.reserved + bought + target for bought, target in zip(found.on_demand, found.spot, strict=True)}
    assert sizes <= {0, 2, 4}


def test_what_cannot_be_is_said() -> None:
    """Too little money for the work in time: infeasible, found at once, with the limits named."""
    with pytest.raises(mix.InfeasibleMixError, match="budget 100"):
        mix.solve(replace(ASKED, budget_usd=100.0), _yielded())
    with pytest.raises(mix.InfeasibleMixError):
        mix.solve(replace(ASKED, work_node_h=1000.0), _yielded())


def test_without_spot_and_reserved_it_is_on_demand() -> None:
    """100 node-hours in whole nodes of 5 h: 20 of them, 8,000 USD."""
    asked = replace(ASKED, spot_usd=None, reserved_usd=None)
    found = mix.solve(asked, _yielded())
    assert (found.reserved, sum(found.on_demand), sum(found.spot)) == (0, 20, 0)
    assert found.expected_usd == pytest.approx(8000)


def test_a_valued_hour_of_delay_brings_the_end_forward() -> None:
    """With 10,000 USD for an hour the plan ends sooner and costs no less."""
    slow, quick = mix.solve(ASKED, _yielded()), mix.solve(replace(ASKED, delay_usd_per_h=10_000.0), _yielded())
    assert np.mean(quick.scenario_finish_h) < np.mean(slow.scenario_finish_h)


def test_fear_of_dear_scenarios_is_paid_for() -> None:
    """With tail weight the expected cost is no lower, the worst tenth no higher."""
    plain, careful = mix.solve(ASKED, _yielded()), mix.solve(replace(ASKED, tail_weight=5.0), _yielded())
    dollars = [_scenario_usd(found, _yielded()) for found in (plain, careful)]
    assert dollars[1].mean() >= dollars[0].mean() - 1.0
    assert dollars[1].max() <= dollars[0].max() + 1.0


def _scenario_usd(found: mix.Mix, yielded: np.ndarray) -> np.ndarray:
    got = yielded[:, np.arange(PERIODS), np.array(found.spot)].sum(axis=1)
    return 5.0 * (25.0 * got + 80.0 * sum(found.on_demand) + 50.0 * found.reserved * PERIODS)


def test_polishing_never_costs_more_and_ends_no_later() -> None:
    """All spot nodes that fit, where nodes are given back at the end."""
    yielded = _yielded()
    found = mix.solve(ASKED, yielded)
    better = mix.polish(found, ASKED, yielded)
    before, after = mix.replay(found, ASKED, yielded), mix.replay(better, ASKED, yielded)
    assert after[0].mean() <= before[0].mean() * (1 + 1e-4)
    assert (after[1] <= before[1] + 1e-9).all()


def test_availability_from_a_hazard() -> None:
    """One node away for an hour after each loss: on average 1 − 1 h ÷ gap of it is there."""
    nodes = mix.from_hazard(Renewal(mean_gap_s=10 * 3600.0), 8, 3600.0, 60.0, 60 * 24 * 300, 1)
    assert 8 - np.mean(nodes) == pytest.approx(0.1, rel=0.1)


def test_without_scipy_the_extra_is_named() -> None:
    """The solver is an extra: its absence is one sentence, and the rest of the planner does not import it."""
    code = (
        "import sys; sys.modules['scipy'] = None; sys.modules['scipy.optimize'] = None\n"
        "import numpy as np\n"
        "from surefoot.money import mix, planner\n"
        "from surefoot.errors import ConfigError\n"
        "asked = mix.MixRequest(work_node_h=1, nodes=1, period_h=1, on_demand_usd=1, spot_usd=1)\n"
        "try:\n    mix.solve(asked, np.ones((1, 1, 2)))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "the mix needs scipy: pip install 'surefoot[plan]'\n"


def test_config_errors_are_config_errors() -> None:
    """An infeasible mix is no mistake in the request."""
    assert not issubclass(mix.InfeasibleMixError, ConfigError)


def test_the_solver_keeps_quiet(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing of the solver's own reaches standard output, where our JSON goes."""
    mix.solve(ASKED, _yielded())
    assert capfd.readouterr().out == ""
