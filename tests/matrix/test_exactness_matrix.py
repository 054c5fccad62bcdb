"""The resumed run is the same run: ways to train × kinds of training × events, each cell by itself.

Where torch itself has no such combination the nearest is taken, and said: `matrix_modes`, `matrix_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from matrix_runs import EVENTS, RANKS, STEPS, Played, both

from surefoot.scenario.verdict import judge

_KINDS = (
    "adamw",
    "fused",
    "sgd",
    "two_optimizers",
    "accumulation",
    "scaler",
    "ema",
    "batchnorm",
    "frozen_mid_run",
    "in_backward",
)
Get = Callable[[str, str | None], Played]
# Kinds are trained side by side, so cells cost nothing: jobs do. Of those each way to train, and each event, has one
# in the short form.
_SHORT = (("plain", "evict"), ("ddp", "kill_trainer"), ("fsdp2", "evict_once"))
_JOBS = [
    pytest.param(mode, event, marks=() if (mode, event) in _SHORT else pytest.mark.soak)
    for mode in RANKS
    for event in EVENTS
    if event != "evict_once" or (mode, event) in _SHORT
]


@pytest.mark.holds("same-run", "resumed-twice", "scaler-begins-anew", "eviction-between-micro-batches")
@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("mode", "event"), _JOBS)
def test_a_cell(played: Get, mode: str, event: str, kind: str) -> None:
    """Samples, every bit of every loss, redone steps too, and all weights and optimizer state at the end: the same."""
    disturbed, undisturbed = played(mode, event), played(mode, None)
    lines = both(disturbed, undisturbed, kind)
    verdict = judge(lines, disturbed.outcome.strikes, steps=STEPS, num_ranks=RANKS[mode])
    assert verdict.problems == ()
    assert verdict.bit_identical
    ends, wanted = disturbed.ends(kind), undisturbed.ends(kind)
    assert sorted(ends) == list(range(RANKS[mode]))
    differing = [(rank, path) for rank in wanted for path in wanted[rank] if ends[rank].get(path) != wanted[rank][path]]
    assert differing == []
    assert ends == wanted


@pytest.mark.parametrize(("mode", "event"), _JOBS)
def test_the_jobs_are_what_they_claim(played: Get, mode: str, event: str) -> None:
    """Each event makes an attempt, evictions within one epoch; a scaler that skips; copies behind the next step."""
    disturbed, undisturbed = played(mode, event), played(mode, None)
    codes = {"evict": [75, 75, 75], "evict_once": [75], "kill_trainer": [None, None]}[event]
    assert [strike.exit_code for strike in disturbed.outcome.strikes] == codes
    assert len({line["attempt"] for line in disturbed.steps}) == len(codes) + 1
    if event != "kill_trainer":
        assert len({line["attempt"] for line in disturbed.steps if line["epoch"] == 0}) == len(codes) + 1
    for job in (disturbed, undisturbed):
        assert {kind for line in job.steps for kind in line["bits"]} == set(_KINDS)
        scales = [line["bits"]["scaler"].split("-")[1] for line in job.steps if line["rank"] == 0]
        assert len(set(scales)) > 2
        behind = [line["behind"] for line in job.steps if line["behind"]]
        assert len(behind) > STEPS // 2
        assert min(behind) > 1 << 20


def test_the_cells_can_fail(played: Get) -> None:
    """One step's loss of one kind changed by one bit is found, and named."""
    undisturbed = played("plain", None)
    lines = undisturbed.of_kind("adamw", "disturbed")
    flipped = int(lines[17].loss_bits, 16) ^ 1
    lines[17] = replace(lines[17], loss_bits=f"{flipped:08x}")
    verdict = judge([*lines, *undisturbed.of_kind("adamw", "undisturbed")], (), steps=STEPS, num_ranks=1)
    assert not verdict.bit_identical
    assert "step 17" in verdict.problems[0]
