"""Captures and restores random number generators: without being asked, each rank's own, and last of all.

Invariant: nothing here draws, except `diverge`; and nothing initialises CUDA in a process that does not use it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from surefoot.core.values import decode, encode
from surefoot.errors import UnsupportedStateError
from surefoot.trainer.state.numpy_values import EXTRAS

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Types of generators that a script may make for itself."""


def capture() -> Any:
    """States of Python's, NumPy's, torch's and each device's generator, encoded."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": _bytes(torch.get_rng_state()),
    }
    # Asking for a device's state would initialise CUDA; while it is not, no device has drawn anything.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_bytes(torch.cuda.get_rng_state(device)) for device in _devices()]
    return encode(state, "rng", extras=EXTRAS)


def restore(encoded: Any) -> None:
    """Put captured states back. Nothing may draw between this and the next step."""
    state = decode(encoded, extras=EXTRAS)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    saved = state.get("cuda", [])
    if saved and torch.cuda.is_available():
        # Else the states would be queued until CUDA is initialised, and an earlier torch.manual_seed(), which is
        # queued too, would come after them.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for device, one in zip(_devices(), saved, strict=False):
            torch.cuda.set_rng_state(_tensor(one), device)


@contextmanager
def undisturbed() -> Iterator[None]:
    """After it, the global generators stand where they stood before, even if code inside draws."""
    now = capture()
    try:
        yield
    finally:
        restore(now)


def diverge(rank: int) -> None:
    """Give a rank that has no state of its own a stream of its own, derived from the state that it was given."""
    seed = torch.randint(0, 2**31 - 1, (1,)).item() + 0x9E3779B1 * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_own(generator: Any) -> Any:
    """State of a generator that a script made for itself, encoded."""
    if isinstance(generator, torch.Generator):
        return encode(_bytes(generator.get_state()), "generator")
    if isinstance(generator, random.Random):
        return encode(generator.getstate(), "generator")
    return encode(generator, "generator", extras=EXTRAS)


def restore_own(generator: Any, encoded: Any) -> None:
    """Put such a state back into this same generator object, which other objects hold too."""
    state = decode(encoded, extras=EXTRAS)
    if isinstance(generator, torch.Generator):
        generator.set_state(_tensor(state))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        continue_as(generator, state)


def continue_as(live: Any, saved: Any) -> None:
    """Take a NumPy generator of either make to the point where another one stands.

    Raises:
        UnsupportedStateError: they are of different kinds, or the saved one has spawned children that the live one
            cannot spawn.
    """
    if isinstance(live, np.random.RandomState):
        live.set_state(saved.get_state())
    else:
        _take_over(live.bit_generator, saved.bit_generator)


def _take_over(live: np.random.BitGenerator, saved: np.random.BitGenerator) -> None:
    if type(live) is not type(saved):
        raise UnsupportedStateError(
            f"the checkpoint has NumPy's {type(saved).__name__}, here it is {type(live).__name__}: use the one "
            "that the run was started with"
        )
    _spawn_as(live.seed_seq, saved.seed_seq)
    live.state = saved.state


def _spawn_as(live: Any, saved: Any) -> None:
    """Go on spawning where the saved generator stopped. The number of children can be raised, but not set."""
    spawned = getattr(saved, "n_children_spawned", 0)
    if not spawned:
        return
    missing = spawned - live.n_children_spawned
    if (live.entropy, live.spawn_key) != (saved.entropy, saved.spawn_key) or missing < 0:
        raise UnsupportedStateError(
            f"a NumPy generator that has spawned {spawned} others was made without the seed that it had: give it one "
            "(numpy.random.default_rng(SEED))"
        )
    if missing:
        live.spawn(missing)


def _devices() -> list[int]:
    """Devices in use from this process's own on: a rank's may have another number after a restart."""
    count = torch.cuda.device_count()
    return [(torch.cuda.current_device() + number) % count for number in range(count)]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
