"""Opens the tier that a user names: a URI or a directory.

    s3://bucket/prefix   gs://bucket/prefix   az://container/prefix     an object store
    file:///path                                                        a directory; %20 and the like are decoded
    /path   ./path   ~/path                                             a directory; every character is itself

Nothing that looks like a misspelt URI ever becomes a directory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from surefoot.errors import ConfigError
from surefoot.tiers.base import Tier
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.drives import DrivesTier

OBJECT_SCHEMES = ("s3", "gs", "az")

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):")
_SCHEME_COMPONENT = re.compile(r"^(s3a?|s3n|gs|gcs|az|abfss?|adl|wasbs?|file|https?|hdfs):$", re.IGNORECASE)
_BUCKET = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_USE = "write s3://bucket/prefix, gs://…, az://…, file:///path or a directory"


def open_tier(uri: str | os.PathLike[str]) -> Tier:
    """The tier that `uri` names. Nothing is read, written or looked up before the tier's first use.

    Raises:
        ConfigError: not a URI of a known kind, no bucket, or a path that is a misspelt URI.
    """
    text = os.fspath(uri)
    if not text.strip() or _CONTROL.search(text):
        raise ConfigError(f"not a place to keep a run: {text!r}; {_USE}")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return DiskTier(_directory(text))
    if scheme[1] == "file":
        return DiskTier(_directory(_file_path(text)))
    if scheme[1] in OBJECT_SCHEMES:
        return _open_store(text, scheme[1])
    raise ConfigError(_unknown(text, scheme[1]))


def open_disks(paths: Sequence[str | os.PathLike[str]]) -> Tier | None:
    """The tier of ``disk=[…]``: None for no drive, one directory, or whole files spread over several.

    Raises:
        ConfigError: an entry is not a directory path, or is named twice.
    """
    drives = [open_tier(path) for path in paths]
    disks = [drive for drive in drives if isinstance(drive, DiskTier)]
    if len(disks) != len(drives):
        raise ConfigError(f"disk= names local directories, not object stores: {[os.fspath(p) for p in paths]}")
    if len({disk.uri for disk in disks}) != len(disks):
        raise ConfigError(f"disk= names a directory twice: {[disk.uri for disk in disks]}")
    if len(disks) > 1:
        return DrivesTier(disks)
    return disks[0] if disks else None


def _open_store(text: str, scheme: str) -> Tier:
    # Imported when needed: the object store's library costs start-up time that a directory does not need.
    from surefoot.tiers.object_store import ObjectTier

    rest = text[len(scheme) + 1 :]
    if not rest.startswith("//"):
        raise ConfigError(f"{text!r} has no // after {scheme}:; write {scheme}://bucket/prefix")
    bucket, _, prefix = rest[2:].partition("/")
    if not _BUCKET.match(bucket):
        # The text is not repeated: what stands where the bucket belongs may be a key and its secret.
        raise ConfigError(f"the {scheme} URI names no bucket, or an impossible one; write {scheme}://bucket/prefix")
    return ObjectTier.open(scheme, bucket, _prefix(text, prefix))


def _prefix(text: str, prefix: str) -> str:
    prefix = prefix.rstrip("/")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise ConfigError(f"{text!r} has an empty, . or .. component in its prefix")
    if re.search(r"[?#%*\\]", prefix):
        raise ConfigError(f"{text!r} has one of ? # % * \\ in its prefix, which stores treat differently")
    return prefix


def _file_path(text: str) -> str:
    rest = text[len("file:") :]
    for host in ("//localhost/", "///"):
        if rest.startswith(host):
            return "/" + unquote(rest[len(host) :])
    raise ConfigError(f"{text!r} is not an absolute file URI; write file:///path")


def _directory(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    odd = next((part for part in path.parts if _SCHEME_COMPONENT.match(part)), None)
    if odd:
        raise ConfigError(f"{text!r} has the component {odd!r}: a URI that was made a path? {_USE}")
    return path


def _unknown(text: str, scheme: str) -> str:
    known = (*OBJECT_SCHEMES, "file")
    if scheme.lower() in known:
        return f"{text!r}: write the scheme in lower case, {scheme.lower()}://…"
    return f"{text!r} has an unknown scheme {scheme!r}; {_USE} (./{text} if it is a directory's name)"
