"""Killed and resumed for real: each rank's own samples, draws and bits."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from stage import Stage

SCENES = Path(__file__).with_name("exact_scenes.py")


def _play(stage: Stage, scene: str, ranks: int = 1, **options: Any) -> str:
    job = stage.start(scene, ranks=ranks, scenes=SCENES, **options)
    assert job.wait() == 0, job.output
    return job.output


def _lines(log: Path) -> dict[int, Any]:
    """The last word of each step; a step that was done twice said the same both times."""
    found: dict[int, Any] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        assert found.setdefault(entry[1], entry) == entry
    return found


@pytest.mark.holds("same-run", "values-collapse", "second-resume-in-epoch")
def test_each_rank_gets_its_own(stage: Stage) -> None:
    """Two ranks of other seeds, generators and places in their data, killed twice in one epoch: samples,
    every generator before and after each step, and losses are those of the undisturbed run, rank by rank."""
    straight, log = stage.place / "straight", stage.place / "log"
    _play(stage, "each_its_own", 2, to=str(stage.place / "other"), total=14, log=str(straight), stop=-1)
    for stop in (2, 3):
        job = stage.start("each_its_own", ranks=2, scenes=SCENES, total=14, log=str(log), stop=stop)
        for rank in (0, 1):
            job.until_printed(f"hanging {rank}")
        job.signal_group(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        stage.until_quiet()
    assert "entered 0 3" in _play(stage, "each_its_own", 2, total=14, log=str(log))
    whole = [_lines(Path(f"{straight}{rank}")) for rank in (0, 1)]
    assert [_lines(Path(f"{log}{rank}")) for rank in (0, 1)] == whole
    # The comparison means something: the ranks had nothing in common.
    for step in range(14):
        mine, its = (whole[rank][step] for rank in (0, 1))
        assert all(a != b for a, b in zip(mine[2:], its[2:], strict=True))


@pytest.mark.holds("samples-with-other-ranks")
def test_samples_and_what_workers_draw_for_any_number_of_ranks(stage: Stage) -> None:
    """Two ranks, then one, then three, with and without workers: each step's rows are those of one rank alone."""

    def rows(log: Path) -> dict[str, list[list[float]]]:
        found: dict[str, list[list[float]]] = {}
        for path in sorted(stage.place.glob(f"{log.name}*-*")):
            found.setdefault(path.name[len(log.name) :].split("-")[0], []).extend(json.loads(path.read_text()))
        return found

    straight, log = stage.place / "straight", stage.place / "log"
    _play(stage, "by_seed", to=str(stage.place / "other"), total=7, log=str(straight), workers=0, batch=5)
    for ranks, total, workers in ((2, 2, 1), (1, 3, 0), (3, 7, 1)):
        output = _play(stage, "by_seed", ranks, total=total, log=str(log), workers=workers, batch=5)
        assert "are not those that the run was trained on" not in output
        stage.until_quiet()
    assert rows(log) == rows(straight)
    assert len(rows(straight)) == 7


@pytest.mark.parametrize("workers", [0, 1])
def test_saving_changes_nothing(stage: Stage, workers: int) -> None:
    """Dropout, a shuffled loader, a save at every step: each loss and each generator as in a loop without Surefoot."""
    assert "same 17" in _play(stage, "same_with_and_without", total=16, workers=workers)
