"""Machines made of namespaces: names, addresses, and links that obey."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.scenario.machines import machines
from surefoot.scenario.network import Network, can_isolate

needs_namespaces = pytest.mark.skipif(not can_isolate(), reason="this machine allows no network namespaces")
_ACTOR = Path(__file__).with_name("network_actor.py")


@needs_namespaces
def test_links_carry_and_are_cut_and_heal() -> None:
    """Each machine has its own name and address and reaches the others; over a cut link nothing arrives until it is
    healed, and a slow one carries what it is allowed to; afterwards nothing of it is left."""
    done = subprocess.run([sys.executable, str(_ACTOR)], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["names"] == [["a", "10.77.0.1"], ["b", "10.77.0.2"]]
    assert told["arrived"] == [b"before".hex(), None, b"cut".hex()]
    assert told["slow_bytes_per_s"] < 1.5 * told["limit_bytes_per_s"]
    assert told["left"] == []


def test_outside_of_a_network_of_ones_own_none_is_made() -> None:
    """The machine's own network is never touched: refused, and several nodes share one address instead."""
    with pytest.raises(ConfigError, match="isolate"), Network(["a"]):
        pass
    with machines(3) as shared:
        assert shared.meet.startswith("127.0.0.1:")
        assert shared.command(2, ["x"]) == ["x"]
        assert shared.link(1) is None
        assert not shared.can_cut
