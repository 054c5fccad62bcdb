"""A whole plan: recommendation, limits, warnings, and a request made from words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.money.cautions import Caution
from surefoot.money.form import Form, request_of
from surefoot.money.hazards import from_trace
from surefoot.money.planner import Plan, compare, make_plan, result_named
from surefoot.money.request import Limits, Request
from surefoot.money.results import CapacityResult
from surefoot.money.schemes import by_name
from surefoot.money.traces import load_trace
from surefoot.money.transfer import Keeping, route_named, store_named

_FEW = ("naive-tuned", "two-tier", "two-tier-shrink")


def _small(brief: Request, **changes: object) -> Request:
    schemes = tuple(by_name(brief.schemes, name) for name in _FEW)
    return replace(brief, schemes=schemes, runs=200, **changes)  # type: ignore[arg-type]


def _codes(cautions: tuple[Caution, ...]) -> set[str]:
    return {caution.code for caution in cautions}


def _row(plan: Plan, name: str) -> CapacityResult:
    return next(row for row in plan.capacity if row.name == name)


def test_the_briefs_answer(brief_plan: Plan) -> None:
    """Elastic shrink, no standby, a replica, memory before the bucket; net 68.1 %, of which the price 60.3 %."""
    advice = brief_plan.advice
    assert (advice.scheme, advice.standby, advice.replicas) == ("two-tier-shrink", 0, 1)
    assert advice.tiers == ("local_ram", "peer_ram", "object")
    assert advice.meets_limits
    assert brief_plan.best.saving.net == pytest.approx(0.6806, abs=0.0005)
    assert brief_plan.best.saving.price == pytest.approx(0.6034, abs=0.0005)
    assert not advice.standby_facts.pays


def test_four_kinds_of_capacity(brief_plan: Plan) -> None:
    """On-demand is the counterfactual, reserved a third less, spot the recommended scheme, the mix no dearer."""
    assert [row.name for row in brief_plan.capacity] == ["on-demand", "reserved", "spot", "best mix"]
    assert _row(brief_plan, "on-demand").cost.mean == pytest.approx(45_158.4)
    assert _row(brief_plan, "reserved").cost.mean == pytest.approx(45_158.4 * 0.68)
    assert _row(brief_plan, "best mix").cost.mean <= _row(brief_plan, "spot").cost.mean * 1.005
    for row in brief_plan.capacity:
        assert row.cost.p05 <= row.cost.p50 <= row.cost.p95
        assert row.wall_s.p50 <= row.wall_s.p95


def test_both_engines_are_in_the_answer(brief_plan: Plan) -> None:
    """Goodput of closed form and simulation, within half a point for every scheme."""
    for result in brief_plan.schemes:
        assert result.simulated.goodput == pytest.approx(result.closed.goodput, abs=0.005), result.scheme.name
        assert result.cost.mean == pytest.approx(result.cost_usd, rel=0.005)


def test_the_front_holds_what_nothing_beats(brief_plan: Plan) -> None:
    """No point is both cheaper and sooner than one of the front; every other one is beaten."""
    for point in brief_plan.points:
        beaten = any(
            other.cost_usd <= point.cost_usd
            and other.wall_s <= point.wall_s
            and (other.cost_usd, other.wall_s) != (point.cost_usd, point.wall_s)
            for other in brief_plan.points
        )
        assert point.on_front is not beaten


def test_the_spot_price_matters_most(brief_plan: Plan) -> None:
    """Bars by width; the base lies inside each bar or at its edge."""
    swings = [bar.swing_usd for bar in brief_plan.bars]
    assert swings == sorted(swings, reverse=True)
    assert brief_plan.bars[0].name == "spot price"
    for bar in brief_plan.bars:
        low, high = sorted((bar.low_usd, bar.high_usd))
        assert low - 1 <= brief_plan.best.cost_usd <= high + 1, bar.name


def test_warnings_of_the_brief(brief_plan: Plan) -> None:
    """The traps, the short window, the nearly full pipe, the Poisson assumption, the standby."""
    assert _codes(brief_plan.cautions) == {
        "transfer_traps",
        "window_too_short",
        "upload_nearly_fills_interval",
        "poisson_assumed",
        "standby_does_not_pay",
    }


def test_transfer_above_compute_is_warned_of(brief: Request) -> None:
    """Through a NAT gateway the transfer costs more than the GPUs."""
    nat = Keeping(store=store_named("aws"), route=route_named("nat"))
    plan = compare(_small(brief, keeping=nat))
    assert "transfer_above_compute" in _codes(plan.cautions)
    assert plan.best.moving_usd > plan.best.cost_usd / 2


def test_spot_at_on_demand_price_is_warned_of(brief: Request) -> None:
    """Then spot is not recommended."""
    prices = replace(brief.prices, spot_usd_per_node_h=brief.prices.on_demand_usd_per_node_h)
    plan = compare(_small(brief, prices=prices))
    assert {"spot_not_below_on_demand", "spot_not_worth_it"} <= _codes(plan.cautions)
    assert not plan.advice.use_spot


def test_correlated_losses_are_warned_of(brief: Request) -> None:
    """With the V100 trace pairs do not outlive a fifth of the losses; the plan says so, and does not say Poisson."""
    hazard = from_trace(load_trace("bamboo-v100"), 8)
    plan = compare(_small(brief, hazard=hazard, announced=0.0))
    assert "correlated_losses" in _codes(plan.cautions)
    assert "poisson_assumed" not in _codes(plan.cautions)
    assert plan.best.expected is plan.best.simulated


def test_slow_uploads_and_replicas_are_warned_of(brief: Request) -> None:
    """A pipe of a hundredth, peers of a hundredth."""
    costs = replace(brief.costs, bucket_bytes_per_s=0.03e9, peer_bytes_per_s=4e9)
    plan = compare(_small(brief, costs=costs))
    assert {"upload_slower_than_interval", "replica_slower_than_step"} <= _codes(plan.cautions)


def test_a_scheme_that_never_ends_is_refused(brief: Request) -> None:
    """Evictions each ten minutes and a save each 3 h on one pipe: named, and not recommended."""
    from surefoot.money.tornado import with_gap

    names = ("naive-tuned", "naive-3h", "two-tier-shrink")
    short = replace(brief, job=replace(brief.job, work_s=12 * 3600.0))
    request = replace(with_gap(short, 600.0), schemes=tuple(by_name(brief.schemes, name) for name in names), runs=40)
    plan = compare(request)
    assert "never_finishes" in _codes(plan.cautions)
    assert plan.advice.scheme == "two-tier-shrink"
    assert result_named(plan.schemes, "naive-3h").saving.net == float("-inf") or plan.schemes[1].cost_usd > 1e5


def test_an_impossible_deadline_is_said(brief: Request) -> None:
    """72.1 h for 72 h of work: no scheme on spot; the one most often on time is named."""
    plan = compare(_small(brief, limits=Limits(deadline_s=72.1 * 3600)))
    assert not plan.advice.meets_limits
    assert "limits_not_met" in _codes(plan.cautions)


def test_a_core_of_stable_nodes_is_in_the_mix(brief: Request) -> None:
    """Two nodes that are not spot, and its price."""
    plan = make_plan(_small(brief, limits=Limits(deadline_s=80 * 3600, core_nodes=2)))
    assert plan.mix is not None
    found = plan.mix.mix
    assert all(found.reserved + bought >= 2 for bought in found.on_demand)
    assert _row(plan, "best mix").cost.mean > _row(plan, "spot").cost.mean


def test_a_budget_below_every_cost_is_not_met(brief: Request) -> None:
    """5,000 USD for what costs 14,400: the mix is infeasible, in words."""
    plan = make_plan(_small(brief, limits=Limits(deadline_s=80 * 3600, budget_usd=5_000)))
    assert plan.mix is None
    assert "budget 5000" in plan.mix_note
    assert "limits_not_met" in _codes(plan.cautions)


def test_a_valued_delay_can_make_a_standby_pay(brief: Request) -> None:
    """Above 942 USD for an hour the standby is recommended."""
    names = ("naive-tuned", "two-tier-replica", "two-tier-standby")
    schemes = tuple(by_name(brief.schemes, name) for name in names)
    cheap = compare(replace(brief, schemes=schemes, runs=200))
    dear = compare(replace(brief, schemes=schemes, runs=200, delay_usd_per_h=2_000.0))
    assert (cheap.advice.scheme, dear.advice.scheme) == ("two-tier-replica", "two-tier-standby")
    assert dear.advice.standby_facts.pays


def _form(**words: object) -> Form:
    given: dict[str, object] = {
        "params": "7B",
        "work": "20 h",
        "gpus": 32,
        "instance": "p5.48xlarge",
        "region": "us-east-1",
        "evictions": "6 h",
    }
    return Form(**{**given, **words})  # type: ignore[arg-type]


def test_words_become_a_request_with_sources() -> None:
    """7B parameters are 84 GB; p5 prices have a date; AWS gives 120 s; what was not said is marked as assumed."""
    request = request_of(_form(bucket_bandwidth="2 GB/s"))
    assert request.job.state_bytes == 84e9
    assert request.job.nodes == 4
    assert request.window_s == 120.0
    assert request.prices.on_demand_usd_per_node_h == pytest.approx(55.04)
    assert request.costs.bucket_bytes_per_s == 2e9
    noted = {note.name: note for note in request.assumptions}
    assert noted["on-demand price"].as_of == "2026-09-06"
    assert noted["bandwidth to the bucket"].source == "given"
    assert noted["restart, state in memory"].source == "assumed"
    assert all(note.source for note in request.assumptions)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"work": None}, "needs --work"),
        ({"params": None}, "size of the state"),
        ({"evictions": None}, "needs --evictions"),
        ({"gpus": 30}, "no whole number of nodes"),
        ({"instance": None}, "no on-demand price of the nodes"),
        ({"instance": "a3-highgpu-8g", "region": ""}, "no spot price of a3-highgpu-8g"),
        ({"work": "20"}, "'20' is not a duration"),
        ({"evictions": "weibull:x:4 h"}, "'x' is no shape"),
        ({"evictions": "trace:nothing"}, "no trace 'nothing'"),
        ({"evictions": "log"}, "--evictions log needs --events"),
        ({"loss_sizes": "1-2"}, "--loss-sizes"),
        ({"data_in": ["eu-*"]}, "the nodes would lie in us-east-1; the data may lie in eu-"),
        ({"data_in": ["us-*"], "route": "cross-region"}, "the bucket .* would lie in an unknown region"),
        ({"baseline": "hope"}, "no scheme 'hope'"),
        ({"runs": 3}, "--runs is 3"),
        ({"store": "floppy"}, "no store 'floppy'"),
    ],
)
def test_words_that_cannot_be_used_get_one_line(words: dict[str, object], message: str) -> None:
    """What is missing or wrong, and how to say it."""
    with pytest.raises(ConfigError, match=message) as caught:
        request_of(_form(**words))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "evictions", ["6 h", "weibull:0.5:6 h", "lomax:1.5:6 h", "trace:bamboo-a100", "advisor", "advisor:24 h"]
)
def test_every_hazard_makes_a_plan(evictions: str) -> None:
    """From words to a recommendation with each interruption model."""
    form = _form(evictions=evictions, runs=100, only=["two-tier-shrink"], params="70B", bucket_bandwidth="3 GB/s")
    plan = compare(request_of(form))
    assert plan.best.finishes
    assert 0.0 < plan.best.expected.goodput <= 1.0


def test_measured_figures_replace_assumed_ones(tmp_path: Path) -> None:
    """The event log of a run: its restart, its step time, its evictions."""
    lines = [
        '{"t": 0, "event": "step", "step": 1, "step_s": 3.0, "node": "a"}',
        '{"t": 7200, "event": "evicted", "node": "a", "step": 9, "safe": true}',
        '{"t": 7300, "event": "resumed", "from_step": 9, "tier": "ram", "phases": {"load": 4.0}, "node": "a"}',
        '{"t": 36000, "event": "left", "step": 99, "finished": true, "node": "a"}',
    ]
    log = tmp_path / "events.jsonl"
    log.write_text("\n".join(lines))
    request = request_of(_form(evictions=None, events=[log]))
    assert request.job.step_s == 3.0
    assert request.costs.restart_s == 4.0
    assert request.hazard.mean_gap_s == pytest.approx(36_000)
    noted = {note.name: note.source for note in request.assumptions}
    assert noted["step time"] == "measured in events.jsonl"
