"""The run's place: a store with put-if-absent, reads, listings and deletes, each an effect of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sim_kernel import Request

from surefoot.core.recovery import Copy
from surefoot.errors import ObjectExistsError, ObjectMissingError


@dataclass(frozen=True, slots=True)
class Stored(Copy):
    """One rank's image as a shard, whose key stands in the place of a node's name."""


Watch = Callable[[str, "bytes | None", "bytes | None"], None]


class Store:
    """Objects. `watch` sees every change as key, bytes before, bytes after, at the moment at which it happens."""

    def __init__(self) -> None:
        self.watch: Watch = lambda _key, _before, _after: None
        self._places: dict[str, dict[str, bytes]] = {}
        self.request_s = 0.02

    def peek(self, key: str) -> bytes | None:
        return self._places.get(_place(key), {}).get(key)

    def keys(self, prefix: str) -> list[str]:
        return [key for place, held in self._places.items() if place.startswith(prefix) for key in held]

    def write(self, key: str, data: bytes | None) -> None:
        before = self.peek(key)
        held = self._places.setdefault(_place(key), {})
        if data is None:
            held.pop(key, None)
        else:
            held[key] = data
        self.watch(key, before, data)

    def damage(self, key: str) -> None:
        """Flip a bit, unseen by anybody."""
        data = self._places[_place(key)][key]
        self._places[_place(key)][key] = data[:-1] + bytes([data[-1] ^ 1])

    # ------------------------------------------------------------------ requests

    def get(self, key: str) -> Request:
        return Request(f"get {key}", lambda: self._get(key), self.request_s)

    def put(self, key: str, data: bytes, seconds: float | None = None) -> Request:
        return Request(f"put {key}", lambda: self.write(key, data), seconds or self.request_s)

    def put_if_absent(self, key: str, data: bytes) -> Request:
        return Request(f"put {key}", lambda: self._put_if_absent(key, data), self.request_s)

    def delete(self, key: str) -> Request:
        return Request(f"delete {key}", lambda: self.write(key, None), self.request_s)

    def list(self, prefix: str) -> Request:
        return Request(f"list {prefix}", lambda: self.keys(prefix), self.request_s)

    def size(self, key: str) -> Request:
        return Request(f"size {key}", lambda: len(self._get(key)), self.request_s)

    def _get(self, key: str) -> bytes:
        data = self.peek(key)
        if data is None:
            raise ObjectMissingError(key)
        return data

    def _put_if_absent(self, key: str, data: bytes) -> None:
        if self.peek(key) is not None:
            raise ObjectExistsError(key)
        self.write(key, data)


def _place(key: str) -> str:
    return key.rpartition("/")[0] + "/"
