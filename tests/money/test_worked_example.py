"""The worked example: every figure of the brief has its verdict, and the page in docs is what its script writes."""

from __future__ import annotations

import re
from pathlib import Path

import write_page as worked
from brief_figures import HOLDS, NOT, UNDER, figures

from surefoot.money.planner import Plan

DOCS = Path(__file__).parents[2] / "docs"


def test_every_figure_has_a_verdict_and_a_reason(brief_plan: Plan) -> None:
    """Thirty-odd figures; what does not plainly hold says why."""
    found = figures(brief_plan)
    assert len(found) >= 30
    for figure in found:
        assert figure.verdict in (HOLDS, UNDER, NOT)
        assert figure.computed
        assert figure.why or figure.verdict == HOLDS, figure.claim


def test_the_figures_that_matter(brief_plan: Plan) -> None:
    """By claim: the verdict and the number in it."""
    by_claim = {figure.claim: figure for figure in figures(brief_plan)}

    def one(words: str) -> tuple[str, str]:
        (figure,) = (f for claim, f in by_claim.items() if words in claim)
        return figure.verdict, f"{figure.computed} {figure.why}"

    for words, verdict, number in (
        ("451,584 against 142,848", HOLDS, "451,584 and 142,848"),
        ("3.1 GB/s takes 271 s", HOLDS, "271.0 s"),
        ("13.12 GB for each", HOLDS, "13.125 GB"),
        ("64 GB/s takes 0.85 s", NOT, "0.205 s"),
        ("under 0.3 %", UNDER, "0.283 %"),
        ("38 % of the compute budget", NOT, "20.3 %"),
        ("16 evictions", HOLDS, "16"),
        ("68.4 % net", NOT, "68.37 %"),
        ("never loses more than 5 minutes", NOT, "572 s"),
        ("2 GB at 200 MB/s", UNDER, "70B parameters are not 2 GB"),
        ("warm standby", NOT, "17.36 USD"),
        ("resize takes under 18 s", UNDER, "second resize"),
        ("6 min for the autoscaler", NOT, "42 min"),
        ("0.26 s", UNDER, "0.2625 s"),
        ("840 GB of state", UNDER, "560"),
    ):
        found_verdict, text = one(words)
        assert found_verdict == verdict, words
        assert number in text, words


def test_the_page_in_docs_is_what_its_script_writes(brief_plan: Plan) -> None:
    """Answer, figures, formulas, money, assumptions, word for word; the replays of traces are too slow here."""
    written = (DOCS / "builders" / "worked-example.md").read_text()
    for part in (worked._intro, worked._answer, worked._figures, worked._simple, worked._money, worked._assumed):
        assert part(brief_plan) in written, part.__name__
    assert re.search(r"\| A100, Google Cloud us-east1-b.*\| 10\.1 h \|", written)


def test_the_money_page_tells_of_every_command_and_file() -> None:
    """Commands, the extension points, the phases and the limits of the model."""
    text = (DOCS / "guides" / "money.md").read_text()
    for words in (
        "surefoot plan",
        "surefoot prices",
        "--schemes",
        "--events",
        "wasted_progress_from_disruption",
        "No public trace has H100s",
        "worked-example.md",
        "Poisson",
    ):
        assert words in text, words
