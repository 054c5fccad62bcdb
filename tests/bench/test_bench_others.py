"""The measurements of a restart, a write and an eviction, tiny: what their figures must be; not how large they are."""

from __future__ import annotations

import pytest
from measuring import answer, is_quotient

from surefoot.bench.worker import Training

pytestmark = pytest.mark.soak
_SMALL = ("--state-mb=4", "--ranks=1", "--tensors=8", "--rounds=1")


def _state_bytes(rank_bytes: int) -> int:
    return Training(8, rank_bytes).state_bytes


def test_a_restart_is_measured() -> None:
    """All bytes of the state came back, the phases lie within the whole, the ratios are those of the times, and the
    worker compared every byte with what was there."""
    figures = answer("restore", *_SMALL)
    assert list(figures) == [
        "bytes",
        "restore_s",
        "choose_s",
        "verify_s",
        "load_s",
        "memcpy_s",
        "memcpy_warm_s",
        "ratio",
        "ratio_whole",
        "ratio_warm",
    ]
    assert figures["bytes"] == _state_bytes(4_000_000)
    assert figures["load_s"] > 0
    # Each of the four is rounded.
    assert figures["choose_s"] + figures["verify_s"] + figures["load_s"] <= figures["restore_s"] + 2e-4
    assert is_quotient(figures["ratio"], figures["memcpy_s"], figures["load_s"], 4)
    assert is_quotient(figures["ratio_whole"], figures["memcpy_s"], figures["restore_s"], 4)
    assert is_quotient(figures["ratio_warm"], figures["memcpy_warm_s"], figures["load_s"], 4)


def test_writes_to_disk_are_measured() -> None:
    """All bytes of the state, and the rates and the ratio are those of the times."""
    figures = answer("disk", *_SMALL)
    assert list(figures) == ["bytes", "raw_s", "surefoot_s", "raw_gb_per_s", "surefoot_gb_per_s", "ratio", "direct"]
    assert figures["bytes"] == _state_bytes(4_000_000)
    for way in ("raw", "surefoot"):
        assert is_quotient(figures[f"{way}_gb_per_s"], figures["bytes"] / 1e9, figures[f"{way}_s"], 4)
    assert is_quotient(figures["ratio"], figures["raw_s"], figures["surefoot_s"], 4)


def test_an_eviction_behind_a_link_is_measured() -> None:
    """The whole state was committed inside a window that leaves room, and never faster than the link."""
    figures = answer("link", "--state-mb=20", "--ranks=1", "--tensors=8", "--link-mb-per-s=10", "--window-s=120")
    assert list(figures) == [
        "bytes",
        "link_mb_per_s",
        "receiver_mb_per_s",
        "window_s",
        "seconds",
        "reached_mb_per_s",
        "ok",
        "compute_slowdown",
    ]
    assert (figures["link_mb_per_s"], figures["window_s"], figures["ok"]) == (10.0, 120.0, True)
    # The header of the image's file comes on top.
    assert 0 <= figures["bytes"] - _state_bytes(20_000_000) < 65_536
    # What the kernel's buffers took in has not come through the link.
    assert 0 < figures["reached_mb_per_s"] < 11.0
    assert figures["seconds"] > figures["bytes"] / 11e6
    assert figures["compute_slowdown"] > 0
