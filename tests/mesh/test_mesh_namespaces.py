"""Two nodes as network namespaces with a cable between them: over TLS, cut and healed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mesh_processes import actors

_ADDRESSES = ("192.0.2.1", "192.0.2.2")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Names of two namespaces that are joined by a pair of virtual interfaces, called `cable` in both."""
    names = (f"surefoot-{os.getpid()}-1", f"surefoot-{os.getpid()}-2")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for name, address in zip(names, _ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"network namespaces cannot be made here: {why.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.holds("machine-disappears")
def test_a_cut_cable_loses_both_sides_and_a_healed_one_brings_them_back(cable: tuple[str, str], tmp_path: Path) -> None:
    """Nothing passes, nothing is reset: each loses the other in time; healed, both are back, the same processes."""
    with actors(tmp_path, 2) as nodes:
        a, b = (
            nodes.start(name, rank, host=_ADDRESSES[rank], within=["ip", "netns", "exec", cable[rank]])
            for rank, name in enumerate("ab")
        )
        for node in (a, b):
            node.wait_for("ready")
        a.order(tell={"op": "note", "number": 1})
        b.wait_for("told", "a", {"op": "note", "number": 1})
        _ip("-n", cable[0], "link", "set", "cable", "down")
        a.wait_for("lost", "b")
        b.wait_for("lost", "a")
        _ip("-n", cable[0], "link", "set", "cable", "up")
        a.wait_for("back", "b")
        b.wait_for("back", "a")
        assert a.reports("linked", "b")[-1] == ["linked", "b", False]
        b.order(tell={"op": "note", "number": 2})
        a.wait_for("told", "b", {"op": "note", "number": 2})
        assert (len(a.reports("lost")), len(b.reports("lost"))) == (1, 1)
