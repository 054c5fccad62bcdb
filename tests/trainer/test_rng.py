"""Random states: captured without a draw, put back whole, also into generators that a script made for itself."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from surefoot.errors import UnsupportedStateError
from surefoot.trainer.state import rng


def _draws() -> list[float]:
    return [random.random(), random.gauss(), float(np.random.rand()), np.random.randn(), torch.randn(3).tolist()]


def test_put_back_and_not_moved_by_capture() -> None:
    """What is drawn after a restore is what was drawn after the capture; capturing twice says the same."""
    random.gauss()
    np.random.randn()
    torch.randn(1)
    state = rng.capture()
    assert rng.capture() == state
    drawn = [_draws() for _ in range(3)]
    rng.restore(state)
    assert [_draws() for _ in range(3)] == drawn
    with rng.undisturbed():
        after = _draws()
    assert _draws() == after


@pytest.mark.parametrize(
    ("make", "draw"),
    [
        (lambda: torch.Generator().manual_seed(3), lambda one: torch.randn(5, generator=one).tolist()),
        (lambda: random.Random(3), lambda one: [one.gauss(), one.random()]),
        (lambda: np.random.RandomState(3), lambda one: one.randn(3).tolist()),
        (lambda: np.random.default_rng(3), lambda one: [*one.normal(size=3), one.integers(9, dtype=np.int32)]),
        (lambda: np.random.Generator(np.random.Philox(3)), lambda one: one.normal(size=3).tolist()),
        (lambda: np.random.Generator(np.random.MT19937(3)), lambda one: one.spawn(1)[0].normal(size=3).tolist()),
    ],
    ids=["torch", "python", "numpy_legacy", "numpy", "philox", "spawning"],
)
def test_generators_of_a_script_s_own(make: Any, draw: Any) -> None:
    """The very object goes on where the saved one stood, what it spawns included."""
    saved = make()
    draw(saved)
    state = rng.capture_own(saved)
    expected = [draw(saved) for _ in range(3)]
    fresh = make()
    held_elsewhere = fresh
    rng.restore_own(fresh, state)
    assert [draw(held_elsewhere) for _ in range(3)] == expected


@pytest.mark.holds("unreadable-values")
def test_what_cannot_go_on_is_refused() -> None:
    """Another kind of generator; children of a seed that nobody knows any more."""
    with pytest.raises(UnsupportedStateError, match=r"has NumPy's Philox, here it is PCG64"):
        rng.restore_own(np.random.default_rng(1), rng.capture_own(np.random.Generator(np.random.Philox(1))))
    spawning = np.random.default_rng()
    spawning.spawn(2)
    with pytest.raises(UnsupportedStateError, match=r"has spawned 2 others was made without the seed"):
        rng.restore_own(np.random.default_rng(), rng.capture_own(spawning))


@pytest.mark.holds("pinned-without-cuda")
def test_cuda_stays_asleep() -> None:
    """Capture and restore without CUDA in use initialise nothing and ask no device for anything."""
    script = (
        "import torch\n"
        "from surefoot.trainer.state import rng\n"
        "def refuse(*_args): raise SystemExit('CUDA was asked')\n"
        "torch.cuda.init = torch.cuda._lazy_init = torch.cuda.device_count = torch.cuda.is_available = refuse\n"
        "torch.manual_seed(1)\n"
        "rng.restore(rng.capture())\n"
        "print(torch.cuda.is_initialized(), torch.randn(1).item() == torch.randn(1, generator="
        "torch.Generator().manual_seed(1)).item())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("False True\n", "", 0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_s_generators_come_back() -> None:
    """Each device draws on where it stood; also in a process that seeds first and initialises CUDA only afterwards."""
    torch.randn(5, device="cuda")
    state = rng.capture()
    drawn = [torch.randn(4, device=f"cuda:{device}").tolist() for device in range(torch.cuda.device_count())]
    rng.restore(state)
    again = [torch.randn(4, device=f"cuda:{device}").tolist() for device in range(torch.cuda.device_count())]
    assert again == drawn
    script = (
        "import json, sys, torch\n"
        "from surefoot.trainer.state import rng\n"
        "torch.manual_seed(99)\n"
        "rng.restore(json.load(sys.stdin))\n"
        "print(torch.randn(4, device='cuda').tolist())\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(state), capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{drawn[torch.cuda.current_device()]}\n"
