"""One of two ranks ends its loop before the other: nobody waits for it, and nobody hangs."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import Stage

SCENES = Path(__file__).with_name("leaving_scenes.py")
_TOTAL = 8


def _steps_of(output: str, rank: int) -> list[int]:
    return [step for step in range(_TOTAL) if f'["did", {rank}, {step}]' in output]


@pytest.mark.holds("early-leavers")
def test_a_rank_that_breaks_off_holds_up_nobody(stage: Stage) -> None:
    """Rank 1 leaves its loop and ends well; rank 0 does all of its steps, and only its last save, which would need
    rank 1, is an error that names it. What was whole before stays."""
    job = stage.start("one_breaks", ranks=2, scenes=SCENES, total=_TOTAL, at=3, how="break")
    assert job.wait() != 0
    assert (_steps_of(job.output, 0), _steps_of(job.output, 1)) == (list(range(_TOTAL)), [0, 1, 2])
    assert '["ends", 1, 3]' in job.output
    assert f"rank 0 takes step {_TOTAL} (save(), or its last step), and rank(s) [1] does not" in job.output
    stage.until_quiet()
    assert 1 <= max(int(path.name[:8]) for path in stage.run.glob("commits/*.json")) <= 4


@pytest.mark.holds("early-leavers")
def test_a_rank_that_raises_tells_its_agent_and_not_its_group(stage: Stage) -> None:
    """The script's own error is what is printed, and the other rank is ended or ends, whatever it was doing."""
    job = stage.start("one_breaks", ranks=2, scenes=SCENES, total=100_000, at=3, how="raise")
    assert job.wait() != 0
    assert "ArithmeticError: the loss is not finite" in job.output
    assert '["ends"' not in job.output
    stage.until_quiet()
    assert max(int(path.name[:8]) for path in stage.run.glob("commits/*.json")) >= 1
