"""The training script's log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surefoot.errors import CorruptError
from surefoot.scenario.log import Line, gather, read


def _text(step: int, t: float) -> str:
    data = {"run": "disturbed", "attempt": 1, "rank": 0, "step": step, "samples": [5, 3], "loss_bits": "0a", "t": t}
    return json.dumps(data)


def test_parts_are_gathered_by_time_and_read_back(tmp_path: Path) -> None:
    """Lines of several processes come in the order in which their steps ended, unchanged."""
    (tmp_path / "a").write_text(f"{_text(0, 1.0)}\n{_text(2, 3.0)}\n")
    (tmp_path / "b").write_text(f"{_text(1, 2.0)}\n")
    gather([tmp_path / "a", tmp_path / "b"], tmp_path / "log")
    assert (tmp_path / "log").read_text() == "".join(f"{_text(step, step + 1.0)}\n" for step in range(3))
    assert read(tmp_path / "log") == [Line("disturbed", 1, 0, step, (5, 3), "0a", step + 1.0) for step in range(3)]


def test_a_line_without_its_end_is_left_out(tmp_path: Path) -> None:
    """What a killed process was writing when it died is no evidence of a step."""
    for torn in (_text(1, 2.0)[:-9], _text(1, 2.0)):
        (tmp_path / "a").write_text(f"{_text(0, 1.0)}\n{torn}")
        gather([tmp_path / "a"], tmp_path / "log")
        assert [line.step for line in read(tmp_path / "log")] == [0]


@pytest.mark.parametrize("bad", ["{", "[]", "{}", '{"run": "disturbed"}', _text(0, 1.0).replace("[5, 3]", "7")])
def test_a_line_that_is_none_is_refused(tmp_path: Path, bad: str) -> None:
    """A whole line that cannot be read is an error that shows it, never a step less."""
    (tmp_path / "a").write_text(f"{bad}\n")
    with pytest.raises(CorruptError, match="not a line of a training log"):
        gather([tmp_path / "a"], tmp_path / "log")
