"""Turns errors of an object store, or of the way to it, into our errors, without secrets.

The library's own messages quote whole answers, and some stores answer a bad signature with the key, the token and
the string that was signed. So nothing is passed on as it came: status, code, message and request id are picked out,
and what may be a secret is blacked out of those.
"""

from __future__ import annotations

import os
import re

from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)

from surefoot.errors import (
    ObjectExistsError,
    ObjectMissingError,
    TierDeniedError,
    TierError,
    TierFullError,
)

_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})")
_REQUEST_ID = re.compile(r"<RequestId>([^<]{1,80})</RequestId>")
_TRANSPORT = re.compile(r"kind: (Timeout|Connect|Decode|Interrupted|Request)\b")

# The codes by which stores report explicitly that an object is not there. A bare 404 may also be a missing
# bucket, a proxy or a wrong endpoint. S3 and its kin and Google's XML API: NoSuchKey; Azure: BlobNotFound.
_MISSING = frozenset({"NoSuchKey", "BlobNotFound"})
# AWS answers 400, not 403, to an expired token.
_DENIED = frozenset({"AccessDenied", "ExpiredToken", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"})
_FULL = frozenset({"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "StorageFull", "AccountIsFull"})
_CONFLICT = "ConditionalRequestConflict"
_HINTS = {
    "NoSuchBucket": "the bucket does not exist and is never made here; make it, or correct the name",
    "ContainerNotFound": "the container does not exist and is never made here; make it, or correct the name",
    "RequestTimeTooSkewed": "set this machine's clock",
    "ExpiredToken": "renew the credentials",
    "PermanentRedirect": "set AWS_REGION to the bucket's region",
    "AuthorizationHeaderMalformed": "set AWS_REGION to the bucket's region",
}
_TRANSPORT_TEXTS = {
    "Timeout": "no answer in time; check that the store works, and the network to it",
    "Connect": "no connection; check the endpoint and the network",
    "Decode": "the answer broke off or makes no sense",
    "Interrupted": "the connection was lost",
    "Request": "the request could not be sent",
}

_SECRET_ENV = re.compile(r"(SECRET|TOKEN|PASSWORD|ACCESS_KEY|ACCOUNT_KEY|SAS|SERVICE_ACCOUNT_KEY|CREDENTIAL)", re.I)
_SECRET_TEXT = re.compile(
    r"((?:X-Amz-(?:Signature|Credential|Security-Token)|Signature|Credential|sig|AWSAccessKeyId)=)[^&\s,<>\"']+"
    r"|(Authorization: )[^\n\"]+"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b"
    r"|(//)[^/@\s]+(@)",
    re.I,
)


def translated(error: BaseException, verb: str, place: str) -> TierError:
    """Our error for whatever the library raised while it tried to `verb` `place`."""
    if isinstance(error, TierError):
        return error
    text = str(error)
    code = _first(_CODE, text)
    message = f"object store: cannot {verb} {redacted(place)}: {_reason(error, text, code)}"
    hint = _HINTS.get(code) or _unclear(error, code)
    return _kind(error, text, code)(f"{message}; {hint}" if hint else message)


def is_conflict(error: BaseException) -> bool:
    """True where the store did not decide who was first, and asks to try again."""
    return _CONFLICT in str(error)


def redacted(text: str) -> str:
    """`text` without this process's credentials and without anything that looks like one."""
    for name, value in os.environ.items():
        if len(value) >= 8 and _SECRET_ENV.search(name):
            text = text.replace(value, "…")
    return _SECRET_TEXT.sub(_blacked_out, text)


def _blacked_out(match: re.Match[str]) -> str:
    *before, after = (group or "" for group in match.groups())
    return f"{''.join(before)}…{after}"


def _kind(error: BaseException, text: str, code: str) -> type[TierError]:
    if isinstance(error, AlreadyExistsError):
        return ObjectExistsError
    if code in _MISSING and isinstance(error, FileNotFoundError):
        return ObjectMissingError
    if code in _FULL or _first(_STATUS, text) == "507":
        return TierFullError
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or code in _DENIED:
        return TierDeniedError
    return TierError


def _reason(error: BaseException, text: str, code: str) -> str:
    status = _first(_STATUS, text)
    parts = [f"status {status}" if status else "", code, _first(_MESSAGE, text)]
    request_id = _first(_REQUEST_ID, text)
    parts.append(f"request id {request_id}" if request_id else "")
    said = ", ".join(part for part in parts if part)
    return redacted(said or _without_answer(error, text))


def _unclear(error: BaseException, code: str) -> str:
    if isinstance(error, FileNotFoundError) and not code:
        return "the answer does not name the object as missing; check endpoint and bucket"
    return ""


def _without_answer(error: BaseException, text: str) -> str:
    """There was no answer, or the library could not read it."""
    transport = _first(_TRANSPORT, text)
    if transport:
        return _TRANSPORT_TEXTS[transport]
    if isinstance(error, UnauthenticatedError):
        return "no usable credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a profile"
    first_line = text.split("\n", 1)[0][:300]
    return first_line if isinstance(error, BaseError | ValueError) else f"{type(error).__name__}: {first_line}"


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
