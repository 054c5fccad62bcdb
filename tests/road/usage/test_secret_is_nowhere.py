"""The run's secret lies in the run's place and nowhere else that a process or a person looks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stage import Stage
from warm import processes_with

SCENES = Path(__file__).with_name("node_scenes.py")


@pytest.mark.holds("secret-stays")
def test_no_process_log_or_event_shows_the_secret(stage: Stage) -> None:
    """Two nodes that know it: it is in no agent's arguments or environment, in nothing that they or the trainers print,
    in no event, and in no file in shared memory."""
    jobs = stage.start_nodes("train", 2, scenes=SCENES, kind="ddp", total=40, wait=True)
    for job in jobs:
        job.until_printed('["begins"')
    secret = json.loads((stage.run / "secret.json").read_text())["body"]["secret"]
    shown: dict[str, bytes] = {}
    for pid in processes_with(str(stage.memory)):
        for what in ("cmdline", "environ"):
            shown[f"{what} of {pid}"] = Path(f"/proc/{pid}/{what}").read_bytes()
    shown |= {str(path): path.read_bytes() for path in stage.memory.rglob("*") if path.is_file()}
    assert len([name for name in shown if name.startswith("cmdline")]) >= 2
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].output + jobs[1].output
    stage.until_quiet()
    shown |= {f"output {number}": job.output.encode() for number, job in enumerate(jobs)}
    shown |= {str(path): path.read_bytes() for path in stage.run.rglob("*") if path.is_file()}
    assert len(stage.events()) > 10
    found = {name for name, data in shown.items() if secret.encode() in data or bytes.fromhex(secret) in data}
    assert found == {str(stage.run / "secret.json")}
