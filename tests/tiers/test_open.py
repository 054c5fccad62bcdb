"""What a person writes, and which tier it means."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.tiers.disk import DiskTier
from surefoot.tiers.drives import DrivesTier
from surefoot.tiers.object_store import ObjectTier
from surefoot.tiers.open import open_disks, open_tier


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("/a/b", "/a/b"),
        ("/a/b/", "/a/b"),
        ("runs/7", "{here}/runs/7"),
        ("./s3", "{here}/s3"),
        ("./name:with:colons", "{here}/name:with:colons"),
        ("~/runs", "{home}/runs"),
        ("/a b/100%/%20/#1/ü?", "/a b/100%/%20/#1/ü?"),
        ("file:///a%20b/c", "/a b/c"),
        ("file://localhost/a", "/a"),
    ],
)
def test_directories(text: str, path: str, tmp_path: Path) -> None:
    """Paths are taken as they are, relative ones from here; only file URIs are decoded."""
    tier = open_tier(text)
    assert isinstance(tier, DiskTier)
    assert tier.uri == path.format(here=tmp_path, home=tmp_path / "home")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/user=me/a b", "az://container/user=me/a b"),
    ],
)
def test_buckets(text: str, uri: str) -> None:
    """Buckets are named by scheme, bucket and prefix; opening one touches no network."""
    tier = open_tier(text)
    assert isinstance(tier, ObjectTier)
    assert (tier.name, tier.uri) == ("object", uri)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not a place"),
        ("  ", "not a place"),
        ("a\nb", "not a place"),
        ("s3:/bucket/x", "no //"),
        ("s3:bucket", "no //"),
        ("s3:", "no //"),
        ("S3://bucket/x", "lower case"),
        ("File:///x", "lower case"),
        ("s3://", "no bucket"),
        ("s3:///x", "no bucket"),
        ("s3:// bucket/x", "no bucket"),
        ("s3://key:secret@bucket/x", "no bucket"),
        ("s3://bucket//x", "component"),
        ("s3://bucket/a/../x", "component"),
        ("s3://bucket/a?versionId=1", "differently"),
        ("s3://bucket/a%20b", "differently"),
        ("s4://bucket/x", "unknown scheme"),
        ("http://host/bucket", "unknown scheme"),
        ("remote:bucket/x", "unknown scheme"),
        ("file:x", "absolute"),
        ("file://host/x", "absolute"),
        ("./s3:/bucket/x", "made a path"),
        ("/home/me/s3:/bucket/x", "made a path"),
        ("/home/me/S3:", "made a path"),
        ("file:///home/me/gs:/x", "made a path"),
    ],
)
def test_what_is_refused(text: str, said: str, tmp_path: Path) -> None:
    """Whatever looks like a misspelt URI is one clear error, and never a directory."""
    with pytest.raises(ConfigError, match=said) as caught:
        open_tier(text)
    assert "secret" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_uri_that_was_made_a_path() -> None:
    """pathlib turns s3://b/x into s3:/b/x: that is said, not obeyed."""
    with pytest.raises(ConfigError):
        open_tier(Path("s3://bucket/x"))
    with pytest.raises(ConfigError, match="made a path"):
        open_tier(Path("s3://bucket/x").absolute())


def test_disks(tmp_path: Path) -> None:
    """No drive is no tier, one is a directory, several are spread over; a bucket or a repetition is refused."""
    assert open_disks([]) is None
    one = open_disks([tmp_path / "a"])
    assert isinstance(one, DiskTier)
    assert one.uri == str(tmp_path / "a")
    several = open_disks([tmp_path / "a", str(tmp_path / "b")])
    assert isinstance(several, DrivesTier)
    assert several.uri == f"{tmp_path / 'a'} + {tmp_path / 'b'}"
    for wrong in (["s3://bucket/x"], [tmp_path / "a", f"{tmp_path}/a/"], [""]):
        with pytest.raises(ConfigError):
            open_disks(wrong)
    asyncio.run(several.close())


@pytest.mark.parametrize("name", ["AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE"])
def test_profiles_need_boto3(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Credentials in a file are not silently passed over: what to install is said; keys in the environment win."""
    monkeypatch.setenv(name, "work")
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install boto3"):
        open_tier("s3://bucket/x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert open_tier("s3://bucket/x").uri == "s3://bucket/x"


def test_az_without_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment lacks is said when the tier is opened, as a configuration error."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(ConfigError, match="Account must be specified"):
        open_tier("az://container/x")
