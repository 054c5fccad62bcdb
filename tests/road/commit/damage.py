"""Ways in which bytes at rest go bad, on a directory: by hand, past the product."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def shorten(path: Path) -> None:
    """By the last byte."""
    path.write_bytes(path.read_bytes()[:-1])


def delete(path: Path) -> None:
    path.unlink()


def swap(one: Path, other: Path) -> None:
    between = one.with_suffix(".between")
    one.rename(between)
    other.rename(one)
    between.rename(other)


KINDS: dict[str, Callable[[Path], None]] = {
    "flip": flip,
    "empty": empty,
    "halve": halve,
    "shorten": shorten,
    "delete": delete,
}


def copy_of(template: Path, to: Path) -> Path:
    shutil.copytree(template, to)
    return to
