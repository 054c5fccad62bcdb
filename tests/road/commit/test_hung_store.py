"""Agents on a real S3 server that stands still for a while: what they say, how long they wait, and what they keep."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import evidence
import pytest
from machines import Machine, MakeMachine
from plain_s3 import PlainS3

from surefoot.exits import EVICTED, EVICTED_UNSAVED, FINISHED
from surefoot.ipc import wire
from surefoot.scenario.s3_server import S3Server

SMALL = {"stall_s": 1.0}
"""After which a request is given up."""
IMPATIENT = {"tiers.silence.SILENT_AFTER_S": 0.3}


class Place:
    """A run on the server."""

    def __init__(self, server: S3Server, machine: MakeMachine) -> None:
        self._server = server
        self._machine = machine
        self._prefix = f"hung-{uuid.uuid4().hex[:8]}"
        self.uri = server.url(self._prefix)

    def machine(self) -> Machine:
        return self._machine(self.uri, env=self._server.env, bounds=IMPATIENT)

    @contextmanager
    def hangs(self) -> Iterator[None]:
        self._server.pause()
        try:
            yield
        finally:
            self._server.go_on()

    def steps(self) -> list[int]:
        """Of which a whole checkpoint is there."""
        plain = PlainS3(self._server)
        found = {key: plain.read(key) for key in plain.keys(f"{self._prefix}/")}
        here = {key.removeprefix(f"{self._prefix}/"): data for key, data in found.items() if data is not None}
        return sorted(step for step, _generation in evidence.checkpoints(here))


@pytest.fixture
def place(s3_server: S3Server, machine: MakeMachine) -> Place:
    return Place(s3_server, machine)


def _notice(machine: Machine, grace_s: float) -> None:
    assert machine.agent is not None
    with wire.connect(machine.agent.answer["socket"], 10.0) as sock:
        wire.send(sock, {"role": "cli", "op": "evict", "grace_s": grace_s})
        assert wire.receive(sock) is not None
    machine.wait_for_event("notice")


def _check_said(place: Place, event: dict[str, Any]) -> None:
    assert (event["tier"], event["place"]) == ("object", place.uri)
    assert event["what"].split(" ", 1)[0] in ("write", "put", "create", "get", "look", "list", "read")


def test_a_save_is_made_when_the_store_goes_on(place: Place) -> None:
    """It is said what is waited for, then that a try failed, why, and what to look at; training may go on meanwhile;
    nothing that was committed is lost, and the save is committed as soon as there are answers again."""
    here = place.machine()
    assert here.begin(2, SMALL) is None
    here.saved(1)
    with place.hangs():
        here.tell_all("save", step=2)
        _check_said(place, here.wait_for_event("tier_silent"))
        why = here.wait_for_event("save_failed", step=2)["why"]
        assert place.uri in why
        assert "no answer in time; check that the store works, and the network to it" in why
    assert all(answer.get("ok") for answer in here.answers())
    _check_said(place, here.wait_for_event("tier_answers"))
    assert place.steps() == [1, 2]
    assert here.finish(2) == FINISHED
    assert place.machine().begin(2) == 2


def test_an_eviction_is_saved_if_the_store_goes_on_in_time(place: Place) -> None:
    """The newest step is committed within the window, and until then the log says what is waited for."""
    here = place.machine()
    here.begin(1, SMALL)
    here.saved(1)
    with place.hangs():
        _notice(here, 60.0)
        here.do_all("save", step=2, trigger="emergency", wait=False)
        _check_said(place, here.wait_for_event("tier_silent"))
        here.wait_for_event("save_failed", step=2)
    here.wait_for_event("committed", step=2, trigger="emergency")
    here.do_all("bye", step=2, finished=False)
    here.end_trainers()
    assert here.agent is not None
    # Which of the two depends on whether it hears of the launch's end or of the commit first.
    assert here.agent.exit_code() in (FINISHED, EVICTED)
    assert place.steps() == [1, 2]


def test_an_eviction_ends_in_time_if_the_store_does_not_go_on(place: Place) -> None:
    """The agent leaves when the window is over and says that the step is not safe. The memory stays, as long as the
    machine does: started again there, the run goes on from that step."""
    here = place.machine()
    here.begin(1, SMALL)
    here.saved(1)
    with place.hangs():
        _notice(here, 3.0)
        here.do_all("save", step=2, trigger="emergency", wait=False)
        _check_said(place, here.wait_for_event("tier_silent"))
        evicted = here.wait_for_event("evicted")
        here.end_trainers()
        assert here.agent is not None
        assert here.agent.exit_code() == EVICTED_UNSAVED
    assert (evicted["step"], evicted["safe"], evicted["committed"]) == (2, False, 1)
    assert here.begin(1) == 2
    here.saved(3)


def test_an_agent_that_cannot_start_says_why(place: Place) -> None:
    """The first thing it asks is not answered: said while it waits, and one error at the end that names the place and
    what to look at. With a store that answers the same start goes on where the run was."""
    here = place.machine()
    here.begin(1, SMALL)
    here.saved(1)
    assert here.finish(1) == FINISHED
    with place.hangs():
        agent = here.start(1, SMALL)
        assert agent.error is not None
        assert place.uri in agent.error
        assert "check that the store works, and the network to it" in agent.error
        assert f"surefoot: waiting for {place.uri}: no answer for" in agent.said()
        here.kill()
    assert here.begin(1) == 1


def test_a_start_says_what_it_waits_for_and_ends(place: Place) -> None:
    """Trainers that start again while the store stands still are told so in one error each; the next start has all."""
    here = place.machine()
    here.begin(2, SMALL, owner_pid=os.getpid())
    here.saved(1)
    with place.hangs():
        answers = here.restart_trainers(2)
        _check_said(place, here.wait_for_event("tier_silent"))
        here.kill_trainers()
    assert len({answer["error"] for answer in answers}) == 1
    assert place.uri in answers[0]["error"]
    assert "check that the store works, and the network to it" in answers[0]["error"]
    (said,) = [event["what"] for event in here.events("warning") if "cannot start" in event["what"]]
    assert answers[0]["error"] in said
    assert here.went_on_from(here.restart_trainers(2)) == 1
    here.saved(2)
