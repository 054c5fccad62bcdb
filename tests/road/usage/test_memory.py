"""What a run costs in memory and descriptors, and where there is little of either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from stage import SCENES, Stage


def said(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("total", [120, pytest.param(400, marks=pytest.mark.soak)])
def test_memory_is_flat(stage: Stage, total: int) -> None:
    """Over many saves neither trainer nor agent nor shared memory grows, and no descriptor is left open."""
    lines = said(stage.play("many_saves", total=total))
    first, last = lines[1], lines[-1]
    assert len({line[3] for line in lines}) == 1
    assert last[1] - first[1] < 4 << 20, lines
    assert last[2] - first[2] < 8 << 20, lines
    # A file may be open at the moment: events are written now and then. One that is left open is open to the end.
    assert first[4] in [line[4] for line in lines[-4:]], lines


@pytest.mark.parametrize("count", [1_000, pytest.param(5_000, marks=pytest.mark.soak)])
def test_ten_thousand_tensors(stage: Stage, count: int) -> None:
    """Each parameter has two. With 1024 descriptors allowed: saved and resumed, every bit."""
    before = said(stage.play("many_tensors", count=count, steps=3))
    after = said(stage.play("many_tensors", count=count, steps=1))
    assert before[-1][1] == after[0][1] == 3
    assert after[0] == before[-1]
    assert after[-1][2] != after[0][2]


@pytest.mark.holds("shared-memory-vanishes")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_sixty_four_megabytes_of_shared_memory(stage: Stage) -> None:
    """Docker's mount is too small for the slots: memory without a name carries them, through the agent's death too."""

    def play(total: int) -> str:
        options = json.dumps({"to": str(stage.run), "total": total})
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m none "$SUREFOOT_SHM" && exec "$@"', "sh",
             sys.executable, str(SCENES), "in_little_shared_memory", options],
            env={**os.environ, "SUREFOOT_SHM": str(stage.memory)},
            stdout=(stage.place / "out").open("w"),
            stderr=subprocess.STDOUT,
            check=False,
        )  # fmt: skip
        text = Path(stage.place / "out").read_text()
        assert done.returncode == 0, text
        return text

    text = play(6)
    assert "memfd" in text
    assert said(text) == [["begins", 0, [0.0]], ["ends", 6, [6.0]]]
    assert text.count("agent restarted") == 2
    assert said(play(7)) == [["begins", 6, [6.0]], ["ends", 7, [7.0]]]
