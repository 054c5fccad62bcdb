"""Agents as real processes: killed, stopped, replaced."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from mesh_processes import actors


def test_a_killed_agent_is_lost_and_a_new_one_is_back(tmp_path: Path) -> None:
    """SIGKILL of one of three: the others lose it and go on; another process at its port comes back to both."""
    with actors(tmp_path, 3) as nodes:
        a, b, c = (nodes.start(name, rank) for rank, name in enumerate("abc"))
        for node in (a, b, c):
            node.wait_for("ready")
        port = b.wait_for("listening")[1]
        b.kill()
        for node in (a, c):
            node.wait_for("lost", "b")
        a.order(tell={"op": "note", "number": 1})
        assert a.wait_for("not told")[1] == ["b"]
        assert c.wait_for("told")[1:] == ["a", {"op": "note", "number": 1}]
        again = nodes.start("b", 1, port=port, instead=True)
        again.wait_for("ready")
        for node in (a, c):
            node.wait_for("back", "b")
            assert node.reports("linked", "b") == [["linked", "b", True]] * 2
            assert len(node.reports("lost")) == 1
        c.order(ask=["b", {"op": "where"}])
        assert c.wait_for("answer")[1] == {"node": "b"}


@pytest.mark.holds("liveness-by-counters")
def test_a_stopped_agent_wakes_harmlessly(tmp_path: Path) -> None:
    """SIGSTOP of one, until the others have lost it, and SIGCONT: it loses nobody, and they have it back."""
    with actors(tmp_path, 3) as nodes:
        a, b, c = (nodes.start(name, rank) for rank, name in enumerate("abc"))
        for node in (a, b, c):
            node.wait_for("ready")
        b.signal(signal.SIGSTOP)
        for node in (a, c):
            node.wait_for("lost", "b")
        a.order(tell={"op": "note", "number": 1})
        assert c.wait_for("told")[2] == {"op": "note", "number": 1}
        b.signal(signal.SIGCONT)
        for node in (a, c):
            node.wait_for("back", "b")
        # The same process as before: what it knows still holds.
        assert [report[2] for report in a.reports("linked", "b")][1:] == [False] * (len(a.reports("linked", "b")) - 1)
        b.order(tell={"op": "note", "number": 2})
        assert b.wait_for("not told")[1] == []
        for node in (a, c):
            node.wait_for("told", "b", {"op": "note", "number": 2})
        assert any("stood still" in text for _, text in b.reports("said"))
        assert b.reports("lost") == []
        assert (len(a.reports("lost")), len(c.reports("lost"))) == (1, 1)
