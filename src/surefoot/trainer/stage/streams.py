"""Copies from an accelerator's memory behind its computation, by streams.

Boundary leaves are copied in the compute stream, in program order. Overlapped leaves are copied by a side stream that
waits for the compute stream's boundary; before the optimizer changes them the compute stream waits for the side
stream, so that the program itself never stands still. "Sealed" is then an event on the device and no point in the
program: the copier's thread waits for the event and seals.

The host side is registered with the driver once per segment, since only then are the copies asynchronous; where that
fails they are slower, and still correct.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from surefoot.trainer.stage.copying import HOST, Pair, copy_groups
from surefoot.trainer.stage.witness import Witness

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device of this process."""


def accelerators(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """The CUDA devices on which these tensors lie, each once."""
    return sorted({tensor.device for tensor in tensors if tensor.is_cuda}, key=lambda device: device.index)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class StreamLane:
    """Sources on CUDA devices, and some in ordinary memory."""

    host_must_wait = False

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._copied: dict[torch.device, torch.cuda.Event] = {}
        self._boundary: dict[torch.device, torch.cuda.Event] = {}

    def boundary(self, pairs: Sequence[Pair]) -> None:
        by_device = _by_device(pairs)
        copy_groups(by_device.pop(HOST, []))
        for device, group in by_device.items():
            with torch.cuda.device(device):
                copy_groups(group, non_blocking=True)
        for device in self._devices:
            self._boundary[device] = torch.cuda.current_stream(device).record_event()

    def offer(self, pairs: Sequence[Pair]) -> None:
        return

    def help(self) -> None:
        return

    def behind(self, pairs: Sequence[Pair], witness: Witness | None) -> None:
        by_device = _by_device(pairs)
        # Ordinary memory is copied first: the host itself fences it.
        copy_groups(by_device.pop(HOST, []))
        if witness is not None:
            witness.compare(HOST)
        for device in self._devices:
            side = _side_stream(device)
            with torch.cuda.device(device), torch.cuda.stream(side):
                side.wait_event(self._boundary[device])
                copy_groups(by_device.get(device, []), non_blocking=True)
                if witness is not None:
                    witness.compare(device)
                self._copied[device] = side.record_event()

    def wait(self) -> None:
        for event in self._copied.values():
            # Releases Python's lock while it waits.
            event.synchronize()

    def hold_optimizer(self) -> None:
        for device, event in self._copied.items():
            torch.cuda.current_stream(device).wait_event(event)


def register(memory: torch.Tensor, warn: Callable[[str], None]) -> bool:
    """Register ordinary memory with the driver, for copies that do not hold up the host. False if it cannot be."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return False
    code = int(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, _REGISTER_PORTABLE))
    if code:
        warn(f"the driver does not register {memory.nbytes} bytes of host memory (error {code}): copies are slower")
    return code == 0


def unregister(memory: torch.Tensor) -> None:
    """Undo a registration, before the memory is unmapped."""
    _runtime().cudaHostUnregister(memory.data_ptr())


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _by_device(pairs: Iterable[Pair]) -> dict[torch.device, list[Pair]]:
    groups: dict[torch.device, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair[1].device].append(pair)
    return groups
