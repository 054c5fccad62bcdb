"""One story for all kinds of fault: two ranks commit step 1, the fault is armed, step 2 is saved under it. Afterwards
another machine, whose memory knows nothing, must find a whole step and go on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import evidence
from machines import Machine

RANKS = 2
LAST_GOOD = (1, 1)


def save_under(place: Machine, arm: Path, faults: dict[str, Any]) -> dict[str, Any]:
    """Step 1 in peace, step 2 under the fault. Returns the first rank's answer to its wish to see step 2 committed."""
    place.begin(RANKS, faults)
    place.saved(1)
    arm.touch()
    place.tell_all("save", step=2)
    return place.trainers[0].answer()


def check_and_go_on(read: Callable[[], dict[str, bytes]], elsewhere: Machine) -> int:
    """Nothing torn is visible, the last good checkpoint is there, and training goes on from a whole step."""
    before = evidence.checkpoints(read())
    assert LAST_GOOD in before, f"the last good checkpoint is gone, there is {sorted(before)}"
    step = elsewhere.begin(RANKS)
    after = evidence.checkpoints(read())
    assert set(before) <= set(after)
    assert step == max(after)[0], f"went on from {step}, there is {sorted(after)}"
    assert step in (1, 2)
    elsewhere.saved(step + 1)
    elsewhere.kill()
    assert (step + 1, 2) in evidence.checkpoints(read())
    return step
