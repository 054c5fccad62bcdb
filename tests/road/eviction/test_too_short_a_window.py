"""Evictions in the middle of a periodic save behind a slow link: the newest step that fits in time is committed.

Agents, storage and links are real, the trainers stand still where the test wants them. Windows are made of the time
that the first save was measured to take.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from machines import Machine, MakeMachine, wait_for
from slow_link import SlowLink

from surefoot.ipc import wire
from surefoot.scenario.s3_server import S3Server

IMAGE_BYTES = 3_000_000
LINK_BYTES_PER_S = 1e6
"""Of the slowest node: an image takes 3 s."""
BEGUN_SHARE = 0.5
"""Of the periodic save that has passed the slowest link when the notice comes."""
WINDOW_SHARE = 0.8
"""Of a save's time, left for uploads after the notice: enough for the other half of the one, not for a whole."""
PATIENT = {"agent.evict.precedence._REPORTED_WITHIN_S": 20.0}
"""A machine that is busy with other tests is no silent node."""

Nodes = Callable[[int], "Cluster"]


class Cluster:
    """Machines with a fake trainer and a link to the bucket of their own each; the last one's is the slowest."""

    def __init__(self, machine: MakeMachine, server: S3Server, uri: str, number: int, stack: ExitStack) -> None:
        speeds = [LINK_BYTES_PER_S * 1.5**index for index in reversed(range(number))]
        self.links = [stack.enter_context(SlowLink(server.endpoint, speed)) for speed in speeds]
        self.machines = [
            machine(uri, bounds=PATIENT, env={**server.env, "AWS_ENDPOINT_URL": link.endpoint}) for link in self.links
        ]
        self._fresh = lambda: machine(uri, env=server.env)

    def begin(self) -> None:
        """Every machine's trainer opens the run, which is new, and a first save shows how fast links are."""
        world = len(self.machines)
        for number, one in enumerate(self.machines):
            agent = one.start()
            assert agent.error is None, agent.error
            nodes = {"round": "round-0001", "first": number, "here": 1} if world > 1 else None
            (trainer,) = one.trainers
            place = {"socket": agent.answer["socket"], "rank": number, "world_size": world}
            trainer.tell("open", **place, own_bytes=IMAGE_BYTES, nodes=nodes)
        for one in self.machines:
            assert Machine.went_on_from(one.answers()) is None
        assert all(answer.get("ok") for answer in self.save(1, "periodic", wait=True))

    def save(self, step: int, trigger: str, *, wait: bool) -> list[dict[str, Any]]:
        for one in self.machines:
            one.tell_all("save", step=step, trigger=trigger, wait=wait)
        return [answer for one in self.machines for answer in one.answers()]

    def measured_s(self) -> float:
        """What a save takes."""
        return max(float(one.wait_for_event("committed", step=1)["seconds"]) for one in self.machines)

    def save_partly(self, step: int) -> None:
        """Begin a periodic save, and wait until a good part of it has passed the slowest link."""
        before = self.links[-1].passed_bytes
        self.save(step, "periodic", wait=False)
        wait_for(lambda: self.links[-1].passed_bytes - before >= BEGUN_SHARE * IMAGE_BYTES, "part of a save")

    def evict(self, upload_s: float) -> None:
        """A notice on the last machine, with so much time for uploads."""
        # At most two seconds, or a quarter of the window, are kept for what comes after them.
        grace_s = min(upload_s / 0.75, upload_s + 2.0)
        agent = self.machines[-1].agent
        assert agent is not None
        with wire.connect(agent.answer["socket"], 10.0) as sock:
            wire.send(sock, {"role": "cli", "op": "evict", "grace_s": grace_s})
            assert wire.receive(sock) is not None
        for one in self.machines:
            one.wait_for_event("notice")

    def codes(self) -> list[int]:
        return [one.agent.exit_code() for one in self.machines if one.agent is not None]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for one in self.machines for event in one.events(kind)]

    def goes_on_from(self) -> int | None:
        """Where trainers on new machines, with nothing but the bucket, start: every byte is compared."""
        fresh = self._fresh()
        return fresh.begin(len(self.machines))


@pytest.fixture
def nodes(machine: MakeMachine, s3_server: S3Server) -> Iterator[Nodes]:
    """So many machines on a new run."""
    uri = s3_server.url(f"run-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        yield lambda number: Cluster(machine, s3_server, uri, number, stack)


@pytest.mark.holds("evictions-lose-nothing", "no-time-to-save")
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_newest_step_does_not_fit(nodes: Nodes, number: int) -> None:
    """It cannot be uploaded in time from the slowest node, the rest of a periodic save can from all: that one is
    finished and loads, the events say what did not fit, and the launch that the newest step was not saved."""
    cluster = nodes(number)
    cluster.begin()
    took_s = cluster.measured_s()
    cluster.save_partly(2)
    cluster.evict(WINDOW_SHARE * took_s)
    cluster.save(3, "emergency", wait=False)
    assert cluster.codes() == [74] * number
    (found,) = cluster.events("unfit")
    assert (found["step"], found["first"]) == (3, 2)
    assert found["needed_s"] > found["left_s"]
    assert {event["step"] for event in cluster.events("committed")} == {1, 2}
    assert {(event["step"], event["safe"], event["committed"]) for event in cluster.events("evicted")} == {
        (3, False, 2)
    }
    assert cluster.goes_on_from() == 2


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_the_newest_step_fits(nodes: Nodes, number: int) -> None:
    """With time enough the periodic save is given up for the newest step, whatever is left of it; the slot that it was
    read from is free again."""
    cluster = nodes(number)
    cluster.begin()
    took_s = cluster.measured_s()
    cluster.save_partly(2)
    cluster.evict(20 * took_s)
    cluster.save(3, "emergency", wait=False)
    for one in cluster.machines:
        one.wait_for_event("committed", step=3)
        wait_for(lambda one=one: one.do_all("pins") == [[]], "every pin's end")  # type: ignore[misc]
    for one in cluster.machines:
        one.do_all("bye", step=3, finished=False)
    for one in cluster.machines:
        one.end_trainers()
    assert set(cluster.codes()) <= {0, 75}
    assert cluster.events("unfit") == []
    assert {event["step"] for event in cluster.events("committed")} == {1, 3}
    assert cluster.goes_on_from() == 3
