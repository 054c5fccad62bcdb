"""A bucket when things go wrong: refusals, outages, answers that break off, and secrets that must not be told."""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from contract import SEVERAL_CHUNKS, SHARD, aligned, chunked, noise
from hypothesis import given
from hypothesis import strategies as st
from plain_s3 import PlainS3
from scripted_server import Answer, Request, error, scripted

from surefoot.errors import ObjectExistsError, ObjectMissingError, TierDeniedError, TierError, TierFullError
from surefoot.scenario.s3_server import S3Server
from surefoot.tiers.base import Tier
from surefoot.tiers.object_store import ObjectTier
from surefoot.tiers.store_errors import redacted
from surefoot.tiers.upload import MAX_PARTS, MIN_PART_BYTES, part_bytes

SECRET = "Secret0123456789Secret0123456789Secret01"
TOKEN = "Token0123456789Token0123456789"
KEY_ID = "AKIA0123456789ABCDEF"

VERBS: dict[str, Callable[[Tier], Awaitable[object]]] = {
    "get": lambda tier: tier.get("run.json"),
    "size": lambda tier: tier.size("run.json"),
    "read_into": lambda tier: tier.read_into("run.json", 0, memoryview(bytearray(4))),
    "list": lambda tier: tier.list("commits/"),
    "put": lambda tier: tier.put("run.json", b"{}"),
    "put_if_absent": lambda tier: tier.put_if_absent("run.json", b"{}"),
    "put_stream": lambda tier: tier.put_stream(SHARD, chunked(aligned(noise(SEVERAL_CHUNKS))), SEVERAL_CHUNKS),
    "small put_stream": lambda tier: tier.put_stream(SHARD, chunked(aligned(b"x")), 1),
    "delete": lambda tier: tier.delete(["run.json"]),
}
every_verb = pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS.keys())


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials whose every part is recognisable."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)
    monkeypatch.setenv("AWS_REGION", "us-east-1")


async def failure(
    verb: Callable[[Tier], Awaitable[object]], *, bucket: str = "bucket", stall_s: float = 30
) -> TierError:
    """The error of one verb, in full view of a traceback without a secret in it."""
    tier = ObjectTier.open("s3", bucket, "run", stall_s=stall_s)
    try:
        await verb(tier)
    except TierError as caught:
        told = "".join(traceback.format_exception(caught)) + repr(caught)
        assert not any(secret in told for secret in (SECRET, TOKEN, KEY_ID)), told
        return caught
    finally:
        await tier.close()
    raise AssertionError("no error")


def answered(
    monkeypatch: pytest.MonkeyPatch,
    verb: Callable[[Tier], Awaitable[object]],
    answer: Callable[[Request], Answer],
    stall_s: float = 30,
) -> TierError:
    """The error of one verb against a server that answers so."""

    async def story() -> TierError:
        async with scripted(answer) as endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            return await failure(verb, stall_s=stall_s)

    return asyncio.run(story())


@every_verb
def test_wrong_secret(
    s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Tier], Awaitable[object]]
) -> None:
    """A wrong secret is a refusal in every verb, and is not told."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    caught = asyncio.run(failure(verb, bucket="surefoot"))
    assert isinstance(caught, TierDeniedError)
    assert "403" in str(caught)
    assert "SignatureDoesNotMatch" in str(caught)
    assert s3_env.access_key not in str(caught)


@every_verb
def test_missing_bucket(s3_env: S3Server, verb: Callable[[Tier], Awaitable[object]]) -> None:
    """A bucket that is not there is a fault in every verb, never an absent object or an empty list; none is made."""
    caught = asyncio.run(failure(verb, bucket="none"))
    assert type(caught) is TierError
    assert "the bucket does not exist" in str(caught)


@every_verb
def test_no_server(keys: None, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Tier], Awaitable[object]]) -> None:
    """A server that is down is a fault in every verb, after a bounded time."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    caught = asyncio.run(failure(verb, stall_s=0.3))
    assert type(caught) is TierError
    assert "no connection" in str(caught)


@every_verb
def test_silent_server(keys: None, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Tier], Awaitable[object]]) -> None:
    """A server that takes everything and never answers is given up."""
    caught = answered(monkeypatch, verb, lambda _request: Answer(silent=True), stall_s=0.3)
    assert type(caught) is TierError
    assert "no answer in time" in str(caught)


@every_verb
def test_secrets_that_a_server_echoes(
    keys: None, monkeypatch: pytest.MonkeyPatch, verb: Callable[[Tier], Awaitable[object]]
) -> None:
    """A refusal that quotes key, token, signature and secret is passed on without any of them."""
    echo = (
        f"<Message>{KEY_ID} {SECRET} {TOKEN} X-Amz-Signature=00ff</Message><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId>"
        f"<StringToSign>{SECRET}</StringToSign><SignatureProvided>00ff</SignatureProvided>"
    )
    answer = Answer(403, f"<Error><Code>SignatureDoesNotMatch</Code>{echo}</Error>".encode())
    caught = answered(monkeypatch, verb, lambda _request: answer)
    assert isinstance(caught, TierDeniedError)
    assert "SignatureDoesNotMatch" in str(caught)
    assert "00ff" not in str(caught)


@pytest.mark.parametrize(
    ("answer", "kind", "said"),
    [
        (error(404, "NoSuchKey"), ObjectMissingError, "NoSuchKey"),
        (error(404, "NoSuchBucket"), TierError, "bucket does not exist"),
        (Answer(404, b"<html>Not Found</html>"), TierError, "does not name"),
        (Answer(404), TierError, "does not name"),
        (error(400, "ExpiredToken"), TierDeniedError, "renew"),
        (error(403, "RequestTimeTooSkewed"), TierDeniedError, "clock"),
        (error(401, "Unauthorized"), TierDeniedError, "401"),
        (error(507, "InsufficientStorage"), TierFullError, "507"),
        (error(403, "QuotaExceeded"), TierFullError, "QuotaExceeded"),
        (error(418, "Odd"), TierError, "418, Odd, as scripted, request id R1"),
        (Answer(200, b"cut", promised_bytes=100), TierError, "read"),
    ],
)
def test_what_answers_mean(
    keys: None, monkeypatch: pytest.MonkeyPatch, answer: Answer, kind: type[TierError], said: str
) -> None:
    """Only a store that says so in its own words makes an object absent; other answers are faults of their kind."""
    headers = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT", "ETag": '"1"'}
    answer.headers.update(headers)
    caught = answered(monkeypatch, VERBS["get"], lambda _request: answer, stall_s=1)
    assert type(caught) is kind
    assert said in str(caught)


LISTED = (
    "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken><Contents>"
    "<Key>run/commits/a</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><Size>1</Size></Contents>"
    "</ListBucketResult>"
)


@pytest.mark.parametrize(
    "second",
    [error(500, "InternalError"), error(403, "AccessDenied"), Answer(200, b""), Answer(200, LISTED[:90].encode()),
     Answer(200, LISTED[:90].encode(), promised_bytes=len(LISTED))],
)  # fmt: skip
def test_a_listing_that_breaks_off(keys: None, monkeypatch: pytest.MonkeyPatch, second: Answer) -> None:
    """A listing whose second page fails, is cut or makes no sense is a fault, not a shorter list."""

    def answer(request: Request) -> Answer:
        return second if "continuation-token" in request.target else Answer(200, LISTED.encode())

    answered(monkeypatch, VERBS["list"], answer, stall_s=1)


def test_a_first_page_that_makes_no_sense(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a first page that is empty or something else an empty list."""
    for body in (b"", b"<html>hello</html>", b"{}"):
        answered(monkeypatch, VERBS["list"], lambda _request, body=body: Answer(200, body), stall_s=1)


def test_busy_servers_are_asked_again(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """503 SlowDown and an undecided race of two writers (409) are tried again, unasked."""
    seen: list[str] = []

    def answer(request: Request) -> Answer:
        seen.append(request.method)
        if len(seen) == 1:
            return error(503, "SlowDown")
        if len(seen) == 2:
            return error(409, "ConditionalRequestConflict")
        return Answer(200, headers={"ETag": '"1"'})

    async def story() -> None:
        async with scripted(answer) as endpoint:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            tier = ObjectTier.open("s3", "bucket", "run")
            await tier.put_if_absent("run.json", b"{}")
            await tier.close()

    asyncio.run(story())
    assert seen == ["PUT"] * 3


def test_an_endless_conflict(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A race that is never decided ends: the key is said to be taken, which callers check by reading."""
    caught = answered(monkeypatch, VERBS["put_if_absent"], lambda _request: error(409, "ConditionalRequestConflict"))
    assert isinstance(caught, ObjectExistsError)


def test_upload_that_fails_half_way(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that refuses the third part is heard of, and the upload is aborted, not completed."""
    seen: list[str] = []

    def answer(request: Request) -> Answer:
        seen.append(f"{request.method} {request.target.split('?')[-1].split('&')[0].split('=')[0]}")
        if request.method == "POST":
            return Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        if "partNumber=3" in request.target:
            return error(403, "AccessDenied")
        return Answer(200 if request.method == "PUT" else 204, headers={"ETag": '"1"'})

    caught = answered(monkeypatch, VERBS["put_stream"], answer)
    assert isinstance(caught, TierDeniedError)
    assert seen.count("POST uploads") == 1
    assert "POST uploadId" not in seen
    # Parts that were already on their way may arrive after it.
    assert seen.count("DELETE uploadId") == 1


def test_a_completion_that_fails(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 may answer 200 to a completion and say in the body that it failed: that is a failure."""

    def answer(request: Request) -> Answer:
        if request.method == "POST" and "uploads" in request.target:
            return Answer(200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>")
        if request.method == "POST":
            return Answer(200, b"<Error><Code>InternalError</Code><Message>try again</Message></Error>")
        return Answer(200, headers={"ETag": '"1"'})

    answered(monkeypatch, VERBS["put_stream"], answer, stall_s=1)


def test_a_server_that_dies_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server killed half-way through an upload is a fault, after a bounded time."""
    with S3Server() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)

        async def source() -> object:
            for start in range(0, 40 << 20, 4 << 20):
                if start == 20 << 20:
                    server.kill()
                yield memoryview(bytes(4 << 20))

        caught = asyncio.run(
            failure(lambda tier: tier.put_stream(SHARD, source(), 40 << 20), bucket="surefoot", stall_s=1)
        )
    assert type(caught) is TierError


def test_profile_credentials_are_read_again(s3_env: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keys of a profile come through boto3, read anew from the file that somebody rotates; here a stand-in for it."""
    credentials = tmp_path / "credentials"
    (tmp_path / "boto3.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    credentials.write_text(f"{s3_env.access_key} {SECRET}")
    caught = asyncio.run(failure(VERBS["put"], bucket="surefoot"))
    assert isinstance(caught, TierDeniedError)
    credentials.write_text(f"{s3_env.access_key} {s3_env.secret_key}")

    async def story() -> None:
        tier = ObjectTier.open("s3", "surefoot", "profile")
        await tier.put("run.json", b"by profile")
        await tier.close()

    asyncio.run(story())
    assert PlainS3(s3_env).read("profile/run.json") == b"by profile"
    monkeypatch.delitem(sys.modules, "boto3")


STAND_IN = """
import os
from types import SimpleNamespace

class Session:
    def get_credentials(self):
        access_key, secret_key = open(os.environ["AWS_SHARED_CREDENTIALS_FILE"]).read().split()
        frozen = SimpleNamespace(access_key=access_key, secret_key=secret_key, token=None)
        return SimpleNamespace(get_frozen_credentials=lambda: frozen)
"""


def test_redaction(keys: None) -> None:
    """What is or looks like a secret is blacked out, the rest of a text stays."""
    text = (
        f"GET http://me:{SECRET}@host/x?X-Amz-Credential={KEY_ID}/2026&X-Amz-Signature=abc&sig=def&part=3 "
        f"Authorization: AWS4 {TOKEN}"
    )
    told = redacted(text)
    assert told == "GET http://…@host/x?X-Amz-Credential=…&X-Amz-Signature=…&sig=…&part=3 Authorization: …"
    assert redacted("status 404, NoSuchKey, a plain message") == "status 404, NoSuchKey, a plain message"


@given(st.integers(min_value=0, max_value=5 << 40))
def test_part_sizes(size_bytes: int) -> None:
    """Up to 5 TiB there are never more parts than S3 allows, none too small or too large, all whole pages."""
    part = part_bytes(size_bytes)
    assert -(-size_bytes // part) <= MAX_PARTS < 10_000
    assert MIN_PART_BYTES <= part <= 5 << 30
    assert part % 4096 == 0
