"""Speed: how far a delivery is, and how fast this node's link was seen to be."""

from __future__ import annotations

from collections import deque

from surefoot.clock import boot_s

_REMEMBERED = 8
"""Deliveries. The best of them is taken, so that one that was disturbed does not count; older ones may be of a link
that is no more."""
_HELD_SHARE = 0.1
"""What the bandwidth cap may hold back of a delivery's time for the rest to be a measurement of the link."""


class Transfer:
    """One try at uploading this node's part of a step."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._begun_s = boot_s()
        self._handed_bytes = 0
        self._held_s = 0.0

    def handed(self, size_bytes: int, held_s: float) -> None:
        """So many bytes were handed to the tier; the bandwidth cap had held them back for so long."""
        self._handed_bytes += size_bytes
        self._held_s += held_s

    def left_bytes(self, bytes_per_s: float) -> int:
        """What is still to be uploaded, at a link of that speed.

        A tier takes bytes before it has sent them (a part of an object as a whole, several at once), and does not tell.
        So it is assumed to have sent what it was handed, but nothing faster than the link.
        """
        sent_bytes = min(self._handed_bytes, (boot_s() - self._begun_s) * bytes_per_s)
        return max(0, self.size_bytes - int(sent_bytes))

    def bytes_per_s(self) -> float | None:
        """Measured from its begin to now, which is its end; None if it says nothing of the link."""
        took_s = boot_s() - self._begun_s
        if not self.size_bytes or took_s <= 0 or self._held_s > _HELD_SHARE * took_s:
            return None
        return self.size_bytes / took_s


class Speed:
    """What this node's link can do: the best of the last deliveries.

    Assumed is that an eviction's uploads reach what the best of the last ones did. A link that was slow only because
    training used it, too, or the bucket was busy, is so taken for what it can be. Deliveries that the bandwidth cap
    held back are no measurement: the cap is lifted in an eviction, and how fast the link is without it is not known.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, transfer: Transfer) -> None:
        """All of it is uploaded now."""
        bytes_per_s = transfer.bytes_per_s()
        if bytes_per_s is not None:
            self._last.append(bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        """0 before anything was measured."""
        return max(self._last, default=0.0)
