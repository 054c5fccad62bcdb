"""The measurements about ranks and nodes together, tiny: every figure is there and possible; not how large it is."""

from __future__ import annotations

import math

import pytest
from measuring import answer, run


@pytest.mark.soak
def test_agreement_and_blocking_form_are_measured_side_by_side() -> None:
    """One row per form and number of ranks, each with figures above zero, and nothing else."""
    figures = answer("agree", "--ranks=2,3", "--rounds=2")
    assert list(figures) == ["results"]
    assert [(row["form"], row["ranks"]) for row in figures["results"]] == [
        ("agreement", 2),
        ("across_machines", 2),
        ("blocking", 2),
        ("agreement", 3),
        ("across_machines", 3),
        ("blocking", 3),
    ]
    for row in figures["results"]:
        assert list(row) == ["form", "ranks", "p50_ms", "p95_ms"]
        assert 0 < row["p50_ms"] <= row["p95_ms"] < math.inf


@pytest.mark.soak
def test_notices_are_measured() -> None:
    """In one process and in several, plain and over TLS: more than nothing, and p99 not below p50."""
    figures = answer("notice", "--nodes=3", "--processes=2", "--notices=4")
    assert list(figures) == ["results"]
    assert [(row["nodes"], row["processes"], row["tls"]) for row in figures["results"]] == [
        (3, 1, False),
        (3, 1, True),
        (2, 2, False),
        (2, 2, True),
    ]
    for row in figures["results"]:
        assert list(row) == ["nodes", "processes", "tls", "p50_ms", "p99_ms"]
        assert 0 < row["p50_ms"] <= row["p99_ms"] < math.inf


def test_one_rank_has_nobody_to_agree_with() -> None:
    """A number of ranks below two, or none, is refused with the option's name, in one sentence."""
    for ranks in ("1", "2,x", ""):
        done = run("agree", f"--ranks={ranks}")
        assert done.returncode == 2
        assert done.stderr == (
            f"benchmarks: --ranks is {ranks!r}: give numbers of at least 2, comma-separated, like 2,64\n"
        )
