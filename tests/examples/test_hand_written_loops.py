"""The loops that people write by hand, and the same training with Surefoot: run, evicted, run again."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from runs import losses, run_to_its_end

from surefoot.exits import EVICTED, FINISHED

pytestmark = pytest.mark.soak
_EXAMPLES = Path(__file__).parents[2] / "examples"
_STEPS = 400
_EVICT_AT = 100


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        yield Path(path)


def _torchrun(name: str, to: Path) -> list[str]:
    to.mkdir(exist_ok=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--"]
    return [*torchrun, str(_EXAMPLES / name), "--to", str(to), "--steps", str(_STEPS), "--save-every", "150"]


def _surefoot(to: Path) -> list[str]:
    script = _EXAMPLES / "hand_written_with_surefoot.py"
    return [
        sys.executable,
        "-m",
        "surefoot.cli.main",
        "run",
        "--to",
        str(to),
        "--nproc",
        "2",
        str(script),
        "--steps",
        str(_STEPS),
    ]


def _run(command: Sequence[str], memory: Path, evict: bool = False) -> tuple[int, str]:
    """Its exit code and what it said; with `evict`, evicted once step 100 is told."""
    mark = f"{memory.name}-{len(command)}"
    return run_to_its_end(command, mark, memory, evict_at=_EVICT_AT if evict else None)


def _last_loss(said: str) -> str:
    found = losses(said)
    assert _STEPS in found, said
    return found[_STEPS]


def _resumed_from(said: str) -> int:
    found = re.search(r"resumed from step (\d+)", said)
    assert found, said
    return int(found[1])


def test_with_surefoot_and_by_hand_are_one_training(memory: Path, tmp_path: Path) -> None:
    """Each evicted at a step of its own and started again, both come to the same last loss, to the bit."""
    by_hand = _torchrun("hand_written.py", tmp_path / "by-hand")
    code, said = _run(by_hand, memory, evict=True)
    assert code != 0, said
    code, by_hand_said = _run(by_hand, memory)
    assert code == 0, by_hand_said
    assert _EVICT_AT <= _resumed_from(by_hand_said) < _STEPS
    code, said = _run(_surefoot(tmp_path / "surefoot"), memory, evict=True)
    assert code == EVICTED, said
    code, said = _run(_surefoot(tmp_path / "surefoot"), memory)
    assert code == FINISHED, said
    assert _EVICT_AT <= _resumed_from(said) < _STEPS
    assert _last_loss(said) == _last_loss(by_hand_said)


def test_the_plain_loop_comes_back_to_a_file(memory: Path, tmp_path: Path) -> None:
    """Evicted in its first third and started again, it goes on from a file that it had written, to the end."""
    command = _torchrun("torch_save_on_sigterm.py", tmp_path / "plain")
    code, said = _run(command, memory, evict=True)
    assert code != 0, said
    files = {int(path.stem.removeprefix("step_")) for path in (tmp_path / "plain").glob("step_*.pt")}
    code, said = _run(command, memory)
    assert code == 0, said
    assert _last_loss(said)
    # Where ranks saw the signal at different steps there may be no file of the eviction.
    assert (_resumed_from(said) if files else 0) == max(files, default=0)
