"""`python -m benchmarks scale`, tiny: every decision is counted at every size that is not left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measuring import answer, run

from benchmarks import scale

_OF_RANKS = {
    "commit decision",
    "manifest",
    "manifest to its document",
    "manifest from its document",
    "listing to candidates",
    "recovery choice",
    "retention",
    "abandoned steps",
}
_OF_TENSORS = {
    "plan, replicated",
    "replicas, replicated",
    "plan, sharded",
    "all ranks' images",
    "plan from its document",
}


def test_every_figure_is_there_and_large_plans_are_left_out() -> None:
    """Two sizes each; of the four plans the one beyond the bound is not made."""
    rows = answer("scale", "--rounds=1", "--ranks=2,6", "--tensors=3,5", "--largest-report=20")["results"]
    assert {(row["what"], row["ranks"]) for row in rows if not row["tensors"]} == {
        (what, ranks) for what in _OF_RANKS for ranks in (2, 6)
    }
    assert {(row["what"], row["ranks"], row["tensors"]) for row in rows if row["tensors"]} == {
        (what, *size) for what in _OF_TENSORS for size in ((2, 3), (2, 5), (6, 3))
    }
    assert all(row["ms"] >= 0 for row in rows)
    assert any(row["ms"] > 0 for row in rows)


def test_the_decisions_have_work_to_do() -> None:
    """What is counted comes to the results that the made-up jobs have: nothing is decided of nothing."""
    made: dict[str, Any] = {}

    def take(what: str, _ranks: int, _tensors: int, work: Callable[[], Any]) -> Any:
        made[what] = work()
        return made[what]

    scale._commits(6, take)
    scale._plans(6, 5, take)
    assert set(made) == _OF_RANKS | _OF_TENSORS
    assert [shard.id.rank for shard in made["commit decision"]] == list(range(6))
    assert made["manifest from its document"] == made["manifest"]
    assert len(made["manifest"].shards) == 6
    assert len(made["listing to candidates"]) == 300
    assert (made["recovery choice"].source.at.boundary, made["recovery choice"].source.place) == (302, "ram")
    assert made["plan from its document"] == made["plan, sharded"]
    # Six ranks have a block of four by eight float32 numbers of each of five tensors.
    assert made["all ranks' images"] >= 6 * 5 * 4 * 8 * 4


def test_a_wrong_count_names_its_option() -> None:
    """The message says which option is meant."""
    done = run("scale", "--ranks=2,x")
    assert done.returncode == 2
    assert "--ranks is '2,x'" in done.stderr
