"""A run's own events become inputs of its forecast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.events import make_event
from surefoot.money.measured import load_events


def _event(kind: str, t: float, node: str = "n0", **fields: Any) -> dict[str, Any]:
    return make_event(kind, t=t, run="r", launch="l", node=node, generation=1, **fields)


def _log(tmp_path: Path, events: list[dict[str, Any]]) -> Path:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_figures_of_a_log(tmp_path: Path) -> None:
    """Step, stall, durable lag, restart, announced share, and losses of two nodes within a minute as one."""
    events = [
        _event("agent_started", 0.0, adopted=0, restart=False),
        *(_event("step", 10.0 * i, step=i, step_s=2.0 + 0.1 * (i % 3)) for i in range(1, 30)),
        _event("stall", 50.0, step=5, stall_s=0.02),
        _event("committed", 100.0, step=10, tier="object", bytes=5_000, seconds=7.0, trigger="periodic", tag=None),
        _event("notice", 3_580.0, node="n1", source="file", grace_s=30.0),
        _event("evicted", 3_600.0, node="n1", step=100, safe=True, seconds=5.0),
        _event("evicted", 3_630.0, node="n2", step=100, safe=True, seconds=5.0),
        _event("resumed", 3_700.0, from_step=100, tier="ram", redone_steps=0, phases={"restore": 3.0, "start": 9.0}),
        _event("evicted", 9_000.0, node="n3", step=300, safe=False, seconds=0.0),
        _event("left", 36_000.0, step=900, finished=True),
    ]
    found = load_events([_log(tmp_path, events)])
    assert (found.step_s, found.stall_s, found.durable_lag_s, found.restart_s) == pytest.approx((2.1, 0.02, 7.0, 12.0))
    assert (found.loss_times_s, found.loss_sizes) == ((3_600.0, 9_000.0), (2, 1))
    assert found.announced == 0.5
    assert found.state_bytes == 5_000
    hazard = found.hazard(8)
    assert hazard.mean_gap_s == pytest.approx(18_000)
    assert hazard.sizes == pytest.approx({1: 0.5, 2: 0.5})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense\n", "events.jsonl:1: no event"),
        ('{"t": 1, "event": "step"}\n{"event": "step"}\n', "events.jsonl:2: no event"),
        ('{"t": -5, "event": "step"}\n', "events.jsonl:1: negative time"),
        ('{"t": 1, "event": 7}\n', "events.jsonl:1: negative time or no event name"),
        ('{"t": 1, "event": "step"}\n', "fewer than two events"),
    ],
)
def test_bad_logs_get_one_clear_line(tmp_path: Path, text: str, words: str) -> None:
    """File, line and what is wrong."""
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_events([path])


def test_a_missing_log_is_named(tmp_path: Path) -> None:
    """By its path."""
    with pytest.raises(ConfigError, match="no event log"):
        load_events([tmp_path / "none"])
