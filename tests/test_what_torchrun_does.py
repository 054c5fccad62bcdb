"""Facts about torchrun on which the supervisor stands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PATIENCE_S = 120.0

_WORKER = """
import os, signal, sys, time
place, rank = sys.argv[1], os.environ["RANK"]
deaf = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
with open(f"{place}/+{rank}", "w") as file:
    file.write(f"{deaf} {os.getpid()}")
os.rename(f"{place}/+{rank}", f"{place}/started-{rank}")
while not os.path.exists(f"{place}/go"):
    time.sleep(0.02)
sys.exit(int(sys.argv[2]) if rank == "1" else 0)
"""


@contextmanager
def _launched(place: Path, module: str, *options: str, code: int = 0, deaf: bool) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher with two workers, all in a session of their own, which wait for a file called `go`."""
    (place / "worker.py").write_text(_WORKER)

    def ignore() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    launcher = subprocess.Popen(
        [
            *(sys.executable, "-m", module, "--standalone", "--nproc-per-node=2", "--monitor-interval=0.1", *options),
            *(str(place / "worker.py"), str(place), str(code)),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=ignore if deaf else None,
    )
    try:
        yield launcher
    finally:
        # Its workers are in sessions of their own.
        (place / "go").touch()
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def _started(place: Path, rank: int) -> tuple[bool, int]:
    """Whether a worker is deaf to SIGTERM, and its pid."""
    end_s = time.monotonic() + _PATIENCE_S
    path = place / f"started-{rank}"
    while not path.exists():
        assert time.monotonic() < end_s, f"rank {rank} never started"
        time.sleep(0.02)
    deaf, pid = path.read_text().split()
    return deaf == "True", int(pid)


@pytest.mark.holds("deaf-workers")
def test_started_deaf_it_and_its_workers_live_through_a_sigterm_to_everybody(tmp_path: Path) -> None:
    """SIGTERM ignored at its start and not among the signals that it handles: workers inherit that, a SIGTERM to the
    launcher, to its whole group and to each worker does nothing, and the job ends well."""
    with _launched(tmp_path, "torch.distributed.run", "--signals-to-handle=SIGQUIT", deaf=True) as launcher:
        workers = [_started(tmp_path, rank) for rank in (0, 1)]
        assert [deaf for deaf, _pid in workers] == [True, True]
        launcher.send_signal(signal.SIGTERM)
        os.killpg(launcher.pid, signal.SIGTERM)
        for _deaf, pid in workers:
            os.kill(pid, signal.SIGTERM)
        (tmp_path / "go").touch()
        assert launcher.wait(_PATIENCE_S) == 0


@pytest.mark.holds("torchruns-code")
def test_it_ends_with_one_whatever_its_script_ended_with_and_our_launcher_does_not(tmp_path: Path) -> None:
    """A worker's own exit code is in its record of the first failure, where `surefoot.launch.torchrun` takes it
    from."""
    for module, expected in (("torch.distributed.run", 1), ("surefoot.launch.torchrun", 75)):
        place = tmp_path / module
        place.mkdir()
        (place / "go").touch()
        with _launched(place, module, code=75, deaf=False) as launcher:
            assert launcher.wait(_PATIENCE_S) == expected
