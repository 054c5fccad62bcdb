"""Interruption models: when nodes of the job are lost, and how many at once.

The clock of all of them is the job's exposure: seconds of training or loading with all nodes present (with n of N nodes
it runs n ÷ N as fast). An event takes ``k`` of the job's nodes together with the probabilities ``sizes``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import comb, gamma, log
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from surefoot.errors import ConfigError
from surefoot.money.traces import Trace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SINGLE = {1: 1.0}


class Sampler(Protocol):
    """The events of many runs, one after the other."""

    def draw(self, who: Ints) -> tuple[Floats, Ints]:
        """For the runs ``who``: exposure until the next event, in seconds, and the nodes it takes."""
        ...


class Hazard(Protocol):
    """An interruption model."""

    @property
    def label(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def mean_gap_s(self) -> float:
        """Mean exposure between two events that hit the job."""
        ...

    @property
    def sizes(self) -> Mapping[int, float]:
        """P(k nodes of the job are lost together | an event hits it)."""
        ...

    @property
    def memoryless(self) -> bool:
        """True when the closed form is exact for it."""
        ...

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler: ...


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """Independent gaps: exponential, Weibull (shape below 1: many short lives, a few long), or Lomax (heavy-tailed)."""

    mean_gap_s: float
    kind: str = "exponential"
    shape: float = 1.0
    sizes: Mapping[int, float] = None  # type: ignore[assignment]  # filled below, once, with SINGLE
    label: str = ""
    source: str = "assumed"

    def __post_init__(self) -> None:
        if not self.mean_gap_s > 0:
            raise ConfigError(f"mean time between interruptions is {self.mean_gap_s} s: give a positive time")
        least = {"exponential": 0.0, "weibull": 0.0, "lomax": 1.0}.get(self.kind)
        if least is None or not self.shape > least:
            raise ConfigError(
                f"hazard {self.kind!r} with shape {self.shape}: use exponential, weibull (> 0), lomax (> 1)"
            )
        object.__setattr__(self, "sizes", dict(self.sizes or SINGLE))
        object.__setattr__(self, "label", self.label or self._label())

    @property
    def memoryless(self) -> bool:
        return self.kind == "exponential"

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        return _RenewalSampler(self, rng)

    def _label(self) -> str:
        shape = "" if self.memoryless else f" of shape {self.shape:g}"
        return f"{self.kind}{shape}, one event in {self.mean_gap_s / 3600:.2f} h"


class _RenewalSampler:
    def __init__(self, hazard: Renewal, rng: np.random.Generator) -> None:
        self._hazard = hazard
        self._rng = rng
        self._sizes = np.array(sorted(hazard.sizes), dtype=np.int64)
        self._cumulated = np.cumsum([hazard.sizes[int(k)] for k in self._sizes])

    def draw(self, who: Ints) -> tuple[Floats, Ints]:
        ranks = np.searchsorted(self._cumulated, self._rng.random(len(who)) * self._cumulated[-1], side="right")
        return self._gaps(len(who)), self._sizes[np.minimum(ranks, len(self._sizes) - 1)]

    def _gaps(self, count: int) -> Floats:
        hazard = self._hazard
        if hazard.kind == "weibull":
            scale = hazard.mean_gap_s / gamma(1.0 + 1.0 / hazard.shape)
            return scale * self._rng.weibull(hazard.shape, count)
        if hazard.kind == "lomax":
            return hazard.mean_gap_s * (hazard.shape - 1.0) * self._rng.pareto(hazard.shape, count)
        return self._rng.exponential(hazard.mean_gap_s, count)


@dataclass(frozen=True)
class Replay:
    """A trace's events from a random start, wrapped around, in their order: correlated sizes and clusters stay.

    The job's nodes are a random draw from the fleet, so that of ``lost`` nodes of the fleet a hypergeometric number is
    the job's; events that miss the job are skipped.
    """

    label: str
    source: str
    nodes: int
    gaps_s: tuple[float, ...]
    """Before each event; the first one's is the wrapped rest of the trace."""
    lost: tuple[int, ...]
    fleet: tuple[int, ...]
    memoryless: bool = False

    @property
    def hits(self) -> float:
        """Expected number of the trace's events that hit the job."""
        return sum(1.0 - self._share(i, 0) for i in range(len(self.lost)))

    @property
    def mean_gap_s(self) -> float:
        return sum(self.gaps_s) / self.hits

    @property
    def sizes(self) -> Mapping[int, float]:
        weights = {k: sum(self._share(i, k) for i in range(len(self.lost))) for k in range(1, self.nodes + 1)}
        return {k: weight / self.hits for k, weight in weights.items() if weight > 0}

    def sampler(self, rng: np.random.Generator, runs: int) -> Sampler:
        return _ReplaySampler(self, rng, runs)

    def _share(self, event: int, k: int) -> float:
        return hypergeometric(self.fleet[event], self.lost[event], self.nodes, k)


class _ReplaySampler:
    def __init__(self, replay: Replay, rng: np.random.Generator, runs: int) -> None:
        self._rng = rng
        self._gaps = np.array(replay.gaps_s)
        self._lost = np.array(replay.lost, dtype=np.int64)
        self._kept = np.array(replay.fleet, dtype=np.int64) - self._lost
        self._sample = np.minimum(replay.nodes, np.array(replay.fleet, dtype=np.int64))
        self._next = rng.integers(len(self._gaps), size=runs)
        # A run starts somewhere between two events, not right after one: long gaps are met more often.
        starts = np.searchsorted(np.cumsum(self._gaps), rng.random(runs) * self._gaps.sum(), side="right")
        self._next = np.minimum(starts, len(self._gaps) - 1)
        self._first = rng.random(runs)

    def draw(self, who: Ints) -> tuple[Floats, Ints]:
        gaps = np.zeros(len(who))
        sizes = np.zeros(len(who), dtype=np.int64)
        waiting = np.arange(len(who))
        while len(waiting):
            runs = who[waiting]
            at = self._next[runs]
            gaps[waiting] += self._gaps[at] * self._first[runs]
            self._first[runs] = 1.0
            self._next[runs] = (at + 1) % len(self._gaps)
            sizes[waiting] = self._rng.hypergeometric(self._lost[at], self._kept[at], self._sample[at])
            waiting = waiting[sizes[waiting] == 0]
        return gaps, sizes


def from_trace(trace: Trace, nodes: int) -> Replay:
    """Bootstrap of ``trace`` for a job of ``nodes`` nodes. `ConfigError` when the trace has no loss."""
    if not trace.losses:
        raise ConfigError(f"{trace.name}: no node was lost in it; use an exponential hazard instead")
    times = [loss.time_s for loss in trace.losses]
    wrapped = trace.length_s - times[-1] + times[0]
    gaps = [wrapped, *(later - earlier for earlier, later in pairwise(times))]
    return Replay(
        label=f"replay of {trace.name}, {len(times)} events",
        source=trace.note or trace.name,
        nodes=nodes,
        gaps_s=tuple(gaps),
        lost=tuple(loss.lost for loss in trace.losses),
        fleet=tuple(loss.running_before for loss in trace.losses),
    )


def from_event_times(times_s: Sequence[float], sizes: Sequence[int], length_s: float, nodes: int, name: str) -> Replay:
    """Bootstrap of the job's own losses: each event takes its recorded number of the job's nodes."""
    if not times_s:
        raise ConfigError(f"{name}: no loss in it; use an exponential hazard instead")
    wrapped = max(length_s - times_s[-1] + times_s[0], 1.0)
    gaps = [wrapped, *(later - earlier for earlier, later in pairwise(times_s))]
    lost = tuple(min(size, nodes) for size in sizes)
    return Replay(f"replay of {name}, {len(gaps)} events", name, nodes, tuple(gaps), lost, (nodes,) * len(gaps))


def from_monthly_share(interrupted: float, nodes: int, life_s: float, label: str, source: str) -> Renewal:
    """Exponential from "this share of instances was interrupted over their life".

    AWS publishes the share for a month and not how long the instances lived, so ``life_s`` is an assumption; with the
    whole month the hazard is a lower bound.
    """
    if not 0.0 < interrupted < 1.0:
        raise ConfigError(f"share of interrupted instances is {interrupted}: give a share between 0 and 1")
    node_mtbf_s = life_s / -log(1.0 - interrupted)
    return Renewal(mean_gap_s=node_mtbf_s / nodes, label=label, source=source)


def hypergeometric(fleet: int, lost: int, drawn: int, k: int) -> float:
    """P(k of ``drawn`` random members are among the ``lost`` of ``fleet``)."""
    drawn = min(drawn, fleet)
    if k > min(lost, drawn) or drawn - k > fleet - lost:
        return 0.0
    return comb(lost, k) * comb(fleet - lost, drawn - k) / comb(fleet, drawn)


def mean_survival(sizes: Mapping[int, float], survival: Mapping[int, float]) -> float:
    """P(an event is outlived), from the sizes of events and P(outlived | size)."""
    return sum(share * survival[k] for k, share in sizes.items())
