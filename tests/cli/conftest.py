"""Real runs, made once: one that finished, one that was evicted from an S3 server, one that was killed."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_jobs import SCRIPT, STEPS, Answer, Evicted, Finished, Job, Killed, kill, until

from surefoot.cli.main import main
from surefoot.scenario.s3_server import S3Server


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[dict[str, Job]]:
    """The jobs, the first two of them on their way side by side."""
    place = tmp_path_factory.mktemp("jobs")
    jobs = {name: Job(place / name, s3_server.env) for name in ("finished", "evicted", "killed")}
    try:
        finished = jobs["finished"]
        finished.supervise(STEPS, "--to", str(place / "run"), "--disk", str(place / "disk"), "--interval-s", "600")
        jobs["evicted"].supervise(100_000, "--to", s3_server.url("cli"), "--interval-s", "600", "--grace-s", "120")
        yield jobs
    finally:
        for job in jobs.values():
            job.end()


@pytest.fixture(scope="session")
def finished(started: dict[str, Job]) -> Finished:
    job = started["finished"]
    assert job.wait() == 0, job.output()
    return Finished(job.directory.parent / "run", job.directory.parent / "disk")


@pytest.fixture(scope="session")
def evicted(started: dict[str, Job], s3_server: S3Server) -> Evicted:
    job, uri = started["evicted"], s3_server.url("cli")
    job.wait_for_steps(4)
    until(lambda: json.loads(job.command("status", "--json").out)[0]["committed"] is not None, job.output)
    status = job.command("status", "--json")
    run_id = json.loads(status.out)[0]["run"]
    before = _names(job.memory)
    cleaned, by_id = job.command("clean", "--json"), job.command("clean", "--run", run_id)
    after = _names(job.memory)
    by_uri = job.command("status", uri)
    said = job.command("evict", uri, "--grace-s", "100", "--json")
    code = job.wait()
    steps = len(job.log.read_text().splitlines())
    gone = job.command("evict", uri)
    return Evicted(uri, run_id, status, by_uri, cleaned, by_id, after, before, said, code, steps, gone)


@pytest.fixture(scope="session")
def killed(started: dict[str, Job], finished: Finished) -> Killed:
    job = started["killed"]
    run = job.directory / "run"
    shutil.copytree(finished.run, run)
    job.start([SCRIPT, "100000", str(job.log), str(run)])
    job.wait_for_steps(4)
    assert job.process is not None
    # Stopped, or it would start another agent at once.
    job.process.send_signal(signal.SIGSTOP)
    kill(job.agent_pid())
    orphaned = job.command("clean", "--json")
    then = _names(job.memory)
    kill(job.process.pid)
    memory = _names(job.memory)
    cleaned = job.command("clean", "--json")
    return Killed(run, orphaned, then, memory, cleaned, _names(job.memory))


@pytest.fixture
def surefoot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """The command, run in this process: exit code, standard output, standard error."""

    def command(*words: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["surefoot", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return Answer(int(ended.value.code or 0), said.out, said.err)

    return command


@pytest.fixture
def run_copy(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished run, to be damaged."""
    return Path(shutil.copytree(finished.run, tmp_path / "run"))


def _names(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
