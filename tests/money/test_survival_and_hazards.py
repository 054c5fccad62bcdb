"""Which losses replicas outlive, and what the interruption models draw."""

from __future__ import annotations

from itertools import combinations
from math import comb, log

import numpy as np
import pytest

from surefoot.errors import ConfigError
from surefoot.money.advisor import advices, hazard_from_advice
from surefoot.money.hazards import (
    Hazard,
    Renewal,
    from_event_times,
    from_monthly_share,
    from_trace,
    hypergeometric,
    mean_survival,
)
from surefoot.money.survival import group_survival
from surefoot.money.traces import SHIPPED, load_trace


@pytest.mark.parametrize(("lost", "survive"), [(1, 1.0), (2, 24 / 28), (3, 32 / 56), (4, 16 / 70), (5, 0.0)])
def test_pairs_of_eight(lost: int, survive: float) -> None:
    """C(4, k)·2^k ÷ C(8, k): 85.7 %, 57 %, 23 %."""
    assert group_survival(8, 2, lost) == pytest.approx(survive)


@pytest.mark.parametrize(("nodes", "group"), [(8, 2), (8, 4), (9, 2), (7, 3), (6, 6), (5, 1)])
def test_survival_counts_subsets(nodes: int, group: int) -> None:
    """By counting every subset of lost nodes; a remainder of nodes belongs to the last group."""
    full = nodes // group
    starts = [index * group for index in range(full)]
    groups = [set(range(start, start + group)) for start in starts]
    groups[-1] |= set(range(full * group, nodes))
    for lost in range(nodes + 1):
        lived = sum(not any(g <= set(gone) for g in groups) for gone in combinations(range(nodes), lost))
        assert group_survival(nodes, group, lost) == pytest.approx(lived / comb(nodes, lost))


def test_hypergeometric_is_a_distribution() -> None:
    """Over all k it adds up to 1, with the mean that a random draw has."""
    shares = [hypergeometric(64, 36, 8, k) for k in range(9)]
    assert sum(shares) == pytest.approx(1.0)
    assert sum(k * share for k, share in enumerate(shares)) == pytest.approx(8 * 36 / 64)


def _draw(hazard: Hazard, runs: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    sampler = hazard.sampler(np.random.default_rng(1), runs)
    drawn = [sampler.draw(np.arange(runs)) for _ in range(rounds)]
    return np.array([gaps for gaps, _ in drawn]), np.array([sizes for _, sizes in drawn])


@pytest.mark.parametrize(
    ("kind", "shape", "variation"), [("exponential", 1.0, 1.0), ("weibull", 0.5, 5**0.5), ("lomax", 4.0, 2**0.5)]
)
def test_renewals_have_their_mean_and_spread(kind: str, shape: float, variation: float) -> None:
    """Mean gap as asked; coefficient of variation 1, √5 (Weibull 0.5) and √2 (Lomax 4)."""
    gaps, sizes = _draw(Renewal(mean_gap_s=1000.0, kind=kind, shape=shape, sizes={1: 0.7, 3: 0.3}), 2000, 50)
    assert gaps.mean() == pytest.approx(1000.0, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.08)
    assert (sizes == 3).mean() == pytest.approx(0.3, abs=0.01)


@pytest.mark.parametrize("name", SHIPPED)
def test_replays_have_the_traces_mean_and_sizes(name: str) -> None:
    """Bootstrapped gaps and sizes have the means that the trace's events give by counting."""
    hazard = from_trace(load_trace(name), 8)
    gaps, sizes = _draw(hazard, 1500, 60)
    assert gaps[1:].mean() == pytest.approx(hazard.mean_gap_s, rel=0.05)
    expected_size = sum(k * share for k, share in hazard.sizes.items())
    assert sizes.mean() == pytest.approx(expected_size, rel=0.05)
    assert sizes.min() >= 1
    assert sizes.max() <= 8


def test_replays_keep_correlated_losses() -> None:
    """Of the losses that hit an 8-node job in the V100 trace about half take two nodes or more; pairs outlive 81 %."""
    sizes = from_trace(load_trace("bamboo-v100"), 8).sizes
    assert 1 - sizes[1] == pytest.approx(0.51, abs=0.03)
    lived = {k: group_survival(8, 2, k) for k in sizes}
    assert mean_survival(sizes, lived) == pytest.approx(0.807, abs=0.01)


def test_a_users_own_losses_are_replayed_as_they_were() -> None:
    """Three events in 10 h: gaps of the log, in its order, wrapped around."""
    hazard = from_event_times([3600, 7200, 18_000], [1, 2, 1], 36_000, 8, "log")
    assert hazard.mean_gap_s == pytest.approx(12_000)
    assert hazard.sizes == pytest.approx({1: 2 / 3, 2: 1 / 3})
    gaps, _ = _draw(hazard, 10, 7)
    assert set(np.round(gaps[1:], 6).ravel()) == {3600.0, 10_800.0, 21_600.0}


def test_advisor_buckets() -> None:
    """577 GPU rows; p5.48xlarge in us-east-1 is above 20 %: eight nodes are hit each 720 h ÷ 8 ÷ −ln 0.75."""
    assert len(advices()) == 577
    hazard = hazard_from_advice("us-east-1", "p5.48xlarge", 8)
    assert hazard.mean_gap_s / 3600 == pytest.approx(720 / 8 / -log(0.75))
    shorter = hazard_from_advice("us-east-1", "p5.48xlarge", 8, life_s=24 * 3600.0)
    assert shorter.mean_gap_s == pytest.approx(hazard.mean_gap_s / 30)
    with pytest.raises(ConfigError, match=r"no p5\.48xlarge in mars-1"):
        hazard_from_advice("mars-1", "p5.48xlarge", 8)


def test_impossible_hazards_are_refused() -> None:
    """A mean of nothing, an unknown kind, a tail without a mean, a share of everybody."""
    with pytest.raises(ConfigError):
        Renewal(mean_gap_s=0.0)
    with pytest.raises(ConfigError):
        Renewal(mean_gap_s=1.0, kind="poisson")
    with pytest.raises(ConfigError):
        Renewal(mean_gap_s=1.0, kind="lomax", shape=1.0)
    with pytest.raises(ConfigError):
        from_monthly_share(1.0, 8, 3600.0, "", "")
    with pytest.raises(ConfigError):
        from_event_times([], [], 10.0, 8, "log")
