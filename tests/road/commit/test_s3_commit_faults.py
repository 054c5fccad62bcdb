"""The commit path on a real S3 server, behind a proxy that goes wrong at every request of a save, and of a start."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import evidence
import pytest
from fault_proxy import Fault, FaultProxy, Request, status, unavailable
from machines import Machine, Nursery
from plain_s3 import PlainS3

from surefoot.scenario.s3_server import S3Server

SMALL = {"stall_s": 1.5}
"""A request that hangs, and the store library's own repetitions, end after this."""


class Bucket:
    """One run on the server, seen past the product."""

    def __init__(self, server: S3Server, nursery: Nursery, proxy: FaultProxy, directory: Path) -> None:
        self.prefix = f"run-{uuid.uuid4().hex[:8]}"
        self.plain = PlainS3(server)
        self.proxy = proxy
        self._server = server
        self._nursery = nursery
        self._directory = directory

    def read(self) -> dict[str, bytes]:
        keys = self.plain.keys(f"{self.prefix}/")
        found = {key.removeprefix(f"{self.prefix}/"): self.plain.read(key) for key in keys}
        return {key: data for key, data in found.items() if data is not None}

    def machine(self, name: str, *, through_proxy: bool, **settings: object) -> Machine:
        env = {**self._server.env}
        if through_proxy:
            env["AWS_ENDPOINT_URL"] = self.proxy.endpoint
        uri = self._server.url(self.prefix)
        return Machine(self._nursery, self._directory / self.prefix, uri, name, env=env, **settings)  # type: ignore[arg-type]


@pytest.fixture
def bucket(s3_server: S3Server, nursery: Nursery, tmp_path: Path) -> Iterator[Callable[[], Bucket]]:
    """Makes runs on the server, all behind one proxy."""
    with FaultProxy(s3_server.endpoint) as proxy:
        yield lambda: Bucket(s3_server, nursery, proxy, tmp_path)


def passing(_request: Request) -> None:
    return None


def at(number: int, what: str | bytes) -> Fault:
    return lambda request: what if request.number == number else None


def from_on(number: int, what: str | bytes) -> Fault:
    return lambda request: what if request.number >= number else None


def requests_of_a_save(bucket: Bucket) -> list[Request]:
    with bucket.machine("counting", through_proxy=True) as place:
        place.begin(2, SMALL)
        place.saved(1)
        with bucket.proxy.armed(passing):
            place.saved(2)
    return list(bucket.proxy.seen)


def strike(bucket: Bucket, fault: Fault, *, once: bool) -> int:
    """Save step 2 under a fault that ends at once or stays; the machine vanishes; another one goes on. From where?"""
    with (
        bucket.machine("struck", through_proxy=True) as struck,
        bucket.machine("next", through_proxy=False) as following,
    ):
        struck.begin(2, SMALL)
        struck.saved(1)
        with bucket.proxy.armed(fault):
            if once:
                struck.saved(2)
            else:
                struck.tell_all("save", step=2)
                struck.wait_for_event("save_failed", step=2)
        struck.kill()
        before = evidence.checkpoints(bucket.read())
        assert (1, 1) in before
        step = following.begin(2)
        after = evidence.checkpoints(bucket.read())
        assert set(before) <= set(after)
        assert step == max(after)[0]
        assert not once or step == 2
        following.saved(step + 1)
        assert (step + 1, 2) in evidence.checkpoints(bucket.read())
        return step


ONCE = {
    "dropped": "drop",
    "cut": "cut request",
    "half answered": "cut answer",
    "lost": "lose answer",
    "503": unavailable(),
}


@pytest.mark.parametrize("what", ONCE)
def test_one_bad_request_costs_no_save(bucket: Callable[[], Bucket], what: str) -> None:
    """Two requests of a save, others for each kind of fault, go wrong once: it is committed whole all the same."""
    number = len(requests_of_a_save(bucket()))
    assert number >= 7
    for n in range(list(ONCE).index(what), number, 5):
        assert strike(bucket(), at(n, ONCE[what]), once=True) == 2


@pytest.mark.campaign
@pytest.mark.parametrize("what", ONCE)
def test_any_bad_request_costs_no_save(bucket: Callable[[], Bucket], what: str) -> None:
    """Every request of a save goes wrong once."""
    for n in range(len(requests_of_a_save(bucket()))):
        assert strike(bucket(), at(n, ONCE[what]), once=True) == 2


@pytest.mark.holds("whole-or-absent")
@pytest.mark.parametrize("what", ["drop", "lose answer"])
def test_a_store_that_fails_from_some_request_on_keeps_whole_checkpoints_only(
    bucket: Callable[[], Bucket], what: str
) -> None:
    """The network is lost in the middle of a save, then the machine: nothing torn, the last good step or the new."""
    strike(bucket(), from_on(4, what), once=False)


@pytest.mark.campaign
@pytest.mark.parametrize("what", ONCE)
def test_a_store_that_fails_from_any_request_on_keeps_whole_checkpoints_only(
    bucket: Callable[[], Bucket], what: str
) -> None:
    """Every request of a save, and every kind of failure."""
    commits = [r.number for r in requests_of_a_save(bucket()) if r.method == "PUT" and "/commits/" in r.target]
    for n in range(commits[0] + 1):
        strike(bucket(), from_on(n, ONCE[what]), once=False)


def test_a_store_that_is_down_for_a_while_costs_nothing(bucket: Callable[[], Bucket]) -> None:
    """Saves fail while it is down, training goes on; it comes back and the same agent commits, the waiting save too."""
    run = bucket()
    with run.machine("here", through_proxy=True) as place:
        place.begin(1, {"stall_s": 0.5})
        place.saved(1)
        run.proxy.arm(from_on(0, "drop"))
        place.tell_all("save", step=2, trigger="periodic", wait=False)
        assert place.answers() == [{"slot": 1}]
        place.wait_for_event("save_failed", step=2, attempt=1)
        place.save(3, trigger=None)
        run.proxy.disarm()
        place.saved(4)
        assert place.finish(4) == 0
    assert {(1, 1), (4, 1)} <= set(evidence.checkpoints(run.read()))


def test_a_save_that_can_never_succeed_ends_in_an_error(bucket: Callable[[], Bucket]) -> None:
    """The store refuses for good: who waits for the save, and for the end, hears why, on every rank."""
    run = bucket()
    with run.machine("here", through_proxy=True) as place:
        place.begin(2, SMALL)
        place.saved(1)
        run.proxy.arm(lambda r: status(403, "AccessDenied") if r.method == "PUT" else None)
        for answer in place.save(2):
            assert not answer["ok"]
            assert "AccessDenied" in answer["error"]
        place.save(3, trigger="final", wait=False)
        for answer in place.do_all("ensure", step=3):
            assert not answer["ok"]
            assert "AccessDenied" in answer["error"]
        run.proxy.disarm()


# ------------------------------------------------------------------ starts


@pytest.fixture(scope="module")
def past(s3_server: S3Server, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    """A run with three checkpoints of two generations, behind a proxy. A refused start leaves it as it was."""
    with FaultProxy(s3_server.endpoint) as proxy:
        run = Bucket(s3_server, nursery, proxy, tmp_path_factory.mktemp("past"))
        with run.machine("past", through_proxy=False) as place:
            place.begin(1)
            place.saved(1, tag="t1")
            place.saved(2, tag="t2")
            place.finish(2)
            place.begin(1)
            place.saved(3, tag="t3")
            place.finish(3)
        yield run


def name() -> str:
    return f"here-{uuid.uuid4().hex[:6]}"


def listing(prefix: str) -> Callable[[Request], bool]:
    return lambda request: request.method == "GET" and "list-type=2" in request.target and prefix in request.target


def reading(part: str) -> Callable[[Request], bool]:
    return lambda request: (
        request.method in ("GET", "HEAD") and part in request.target and "list-type" not in request.target
    )


@pytest.mark.holds("step-0-needs-answers", "ranks-disagree-on-files")
@pytest.mark.parametrize("answer", [status(403, "AccessDenied"), status(500, "InternalError")], ids=["403", "500"])
@pytest.mark.parametrize(
    "hit",
    [
        listing("generations"),
        listing("commits"),
        listing("steps"),
        reading("run.json"),
        reading("generations/"),
        reading("commits/"),
        reading("plans/"),
        reading(".safetensors"),
    ],
    ids=["list generations", "list commits", "list steps", "run.json", "generation", "manifest", "plan", "shard"],
)
def test_what_a_store_does_not_answer_is_never_taken_for_absent(
    past: Bucket, hit: Callable[[Request], bool], answer: bytes
) -> None:
    """A start that cannot read is refused with the store's status: no step 0, no older step, nothing changed."""
    before = without_events(past.read())
    with past.machine(name(), through_proxy=True) as place:
        with past.proxy.armed(lambda request: answer if hit(request) else None):
            agent = place.start(1, {"stall_s": 0.3})
            opened = place.open()[0] if agent.error is None else agent.answer
            assert opened["kind"] in ("TierError", "TierDeniedError")
            assert "status 500" in opened["error"] or "status 403" in opened["error"]
        assert without_events(past.read()) == before
        place.kill()
        assert place.begin(1) == 3


def without_events(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: data for key, data in objects.items() if not key.startswith("events/")}


def truncated(past: Bucket, prefix: str, number: int) -> bytes:
    """A page of the first keys that says that more follow, and not how to get at them."""
    keys = list(past.plain.keys(f"{past.prefix}/{prefix}/"))[:number]
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag>"
        f"<Size>{len(past.plain.read(key) or b'')}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key in keys
    )
    head = (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>surefoot</Name>'
    )
    body = f"{head}<KeyCount>{number}</KeyCount><IsTruncated>true</IsTruncated>{entries}</ListBucketResult>".encode()
    start = "HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nConnection: close\r\n"
    return f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("prefix", ["generations", "commits", "steps"])
def test_a_listing_that_breaks_off_starts_nobody_at_an_older_step(past: Bucket, prefix: str, number: int) -> None:
    """A page that says it is truncated and names no continuation: refused, or made up for by what else is known."""
    page, hit = truncated(past, prefix, number), listing(prefix)
    with past.machine(name(), through_proxy=True, bounds={"agent.start.choosing._LISTED_WITHIN_S": 1.0}) as place:
        with past.proxy.armed(lambda request: page if hit(request) else None):
            agent = place.start(1, SMALL)
            opened = place.open()[0] if agent.error is None else agent.answer
        if prefix == "generations":
            assert "does not list" in opened["error"] or "though step" in opened["error"]
        else:
            assert opened["step"] == 3, opened
