"""Random number generators: kept unasked, each rank its own, restored last."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from surefoot.core.values import decode, encode
from surefoot.trainer.numpy_values import EXTRAS


def capture() -> Any:
    """States of Python's, NumPy's, torch's and each device's generator, encoded."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": _bytes(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_bytes(torch.cuda.get_rng_state(device)) for device in range(torch.cuda.device_count())]
    return encode(state, "rng", extras=EXTRAS)


def restore(encoded: Any) -> None:
    """Put captured states back. Nothing may draw between this and the next step."""
    state = decode(encoded, extras=EXTRAS)
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(_tensor(state["torch"]))
    devices = state.get("cuda", [])
    for device in range(min(len(devices), torch.cuda.device_count())):
        torch.cuda.set_rng_state(_tensor(devices[device]), device)


def diverge(rank: int) -> None:
    """Give a rank that has no state of its own a stream of its own, derived from the state that it was given."""
    seed = torch.randint(0, 2**31 - 1, (1,)).item() + 0x9E3779B1 * rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
