"""A base that fits the machine once and not twice."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from lora import Lora

from surefoot.host.memory import available_bytes

QLORA = Path(__file__).with_name("qlora_job.py")
MIB = 1 << 20
FROZEN_MIB = int(os.environ.get("SUREFOOT_TEST_FROZEN_MIB", "12288"))
TRAINED_MIB = 200
SPARE_MIB = 3072
"""What the job may need beside its base: torch, three slots, gradients, the agent."""
AGENT_MIB = 3 * TRAINED_MIB + 150
"""Three slots, which it reads, and itself."""
TRAINER_MIB = 1800
"""Three slots, the trained state, its gradients, torch."""


def _peak_mib(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) // 1024


@pytest.mark.campaign
def test_a_base_of_half_the_memory(lora: Lora) -> None:
    """Runs, saves, dies and resumes, with an equal base and with another: neither process ever holds a second copy."""
    if available_bytes() < (FROZEN_MIB + SPARE_MIB) * MIB:
        pytest.skip(f"needs {FROZEN_MIB + SPARE_MIB} MiB of memory")
    lora.script = QLORA
    lora.within_s = 1800.0
    options = {"frozen_mib": FROZEN_MIB, "trained_mib": TRAINED_MIB}
    peaks: list[dict[str, int]] = []

    def note(process: subprocess.Popen[bytes]) -> None:
        (lock,) = lora.memory.glob("*.lock")
        peaks.append({"agent": _peak_mib(json.loads(lock.read_text())["pid"]), "trainer": _peak_mib(process.pid)})

    def until_saved(process: subprocess.Popen[bytes], above: int) -> None:
        lora.until(lambda: max(lora.commits(), default=0) > above or process.poll() is not None, "a checkpoint")
        assert process.poll() is None, lora.output
        note(process)
        lora.kill(process)

    until_saved(lora.launch(total=100_000, **options), 0)
    first = lora.commits()[-1]
    until_saved(lora.launch(total=100_000, **options), first + 1)
    assert lora.events("frozen_loaded") == []
    second = lora.commits()[-1]
    until_saved(lora.launch(total=100_000, seed=1, **options), second + 1)
    print(json.dumps({"peaks_mib": peaks, "events": [lora.events(f"frozen_{k}") for k in ("saved", "loaded")]}))
    assert [event["bytes"] for event in lora.events("frozen_loaded")] == [lora.frozen()[0].stat().st_size]
    assert len(lora.events("frozen_saved")) == 1
    begun = [start["begins"] for start in lora.starts()]
    assert begun[0] == 0
    assert begun[1] >= first
    assert begun[2] >= second
    assert len({start["base"] for start in lora.starts()}) == 1
    assert len(lora.steps()) == max(lora.steps()), "no step is missing, and none came out in two ways"
    (file,) = lora.frozen()
    assert file.stat().st_size // MIB == FROZEN_MIB
    assert max(peak["agent"] for peak in peaks) < AGENT_MIB, peaks
    assert max(peak["trainer"] for peak in peaks) < FROZEN_MIB + TRAINER_MIB, peaks
