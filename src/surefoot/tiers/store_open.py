"""Finds how to reach a bucket: credentials, endpoint and time limits, from the environment.

The store library itself reads the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN,
AWS_REGION, AWS_DEFAULT_REGION, AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, web identity, container and instance
credentials; GOOGLE_… and AZURE_… likewise). What is added here is what it leaves open.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from surefoot.errors import ConfigError
from surefoot.tiers.store_errors import redacted

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config, S3Credential

_CONNECT_TIMEOUT_S = 10.0
_MAX_RETRIES = 10
_CREDENTIALS_LIFE = timedelta(minutes=5)
_OWN_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)


def open_store(scheme: str, bucket: str, stall_s: float) -> ObjectStore:
    """The library's store for a bucket. Touches no network.

    Args:
        scheme: ``s3``, ``gs`` or ``az``.
        bucket: the bucket or container, which must exist: none is ever made.
        stall_s: a request that has no whole answer after so long is given up; failing ones are repeated no
            longer than that.

    Raises:
        ConfigError: the environment cannot work.
    """
    client = _client(stall_s, allow_http=scheme == "s3" and _endpoint().startswith("http://"))
    try:
        if scheme == "s3":
            return _open_s3(bucket, client, _retry(stall_s))
        if scheme == "gs":
            return GCSStore(bucket, client_options=client, retry_config=_retry(stall_s))
        return AzureStore(bucket, client_options=client, retry_config=_retry(stall_s))
    except ConfigError:
        raise
    except (BaseError, ValueError) as error:
        reason = redacted(str(error).split("\n", 1)[0])
    raise ConfigError(f"cannot use {scheme}://{bucket}: {reason}; check the environment variables")


def _open_s3(bucket: str, client: ClientConfig, retry: RetryConfig) -> ObjectStore:
    endpoint = _endpoint()
    config: S3Config = {}
    if "AWS_VIRTUAL_HOSTED_STYLE_REQUEST" not in os.environ:
        # A dot in the bucket's name does not fit the certificate of a virtual host.
        config["virtual_hosted_style_request"] = not endpoint and "." not in bucket
    if "AWS_UNSIGNED_PAYLOAD" not in os.environ:
        # TLS already protects the payload; without it the signature must.
        config["unsigned_payload"] = not endpoint.startswith("http://")
    return S3Store(
        bucket,
        config=config,
        client_options=client,
        retry_config=retry,
        credential_provider=_credentials(),
    )


def _client(stall_s: float, *, allow_http: bool) -> ClientConfig:
    return {
        "connect_timeout": timedelta(seconds=min(_CONNECT_TIMEOUT_S, stall_s)),
        "timeout": timedelta(seconds=stall_s),
        "allow_http": allow_http,
    }


def _retry(stall_s: float) -> RetryConfig:
    return {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=stall_s)}


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""


def _credentials() -> Callable[[], S3Credential] | None:
    """A provider for credentials that lie in files, profiles or helper programs; None: the library finds them."""
    if any(os.environ.get(name) for name in _OWN_CREDENTIALS):
        return None
    source = _credentials_file()
    if importlib.util.find_spec("boto3"):
        return _from_boto3 if source else None
    if source:
        raise ConfigError(
            f"the AWS credentials are in {source}, which needs boto3 to be read: pip install boto3, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return None


def _credentials_file() -> str | None:
    for name in ("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"):
        if os.environ.get(name):
            return f"{name}={os.environ[name]}"
    default = Path("~/.aws/credentials").expanduser()
    return str(default) if default.is_file() else None


def _from_boto3() -> S3Credential:
    """Read afresh at each call, to see a file that a rotation of the keys has rewritten."""
    found = importlib.import_module("boto3").Session().get_credentials()
    if found is None:
        raise ValueError(f"no AWS credentials in {_credentials_file()}")
    frozen = found.get_frozen_credentials()
    return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.now(UTC) + _CREDENTIALS_LIFE,
    }
