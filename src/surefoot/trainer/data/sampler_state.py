"""Captures the state that a loader's samplers hold beside the global generators: generators, counters, own state.

All of it is as of the beginning of an epoch, whose order follows from it.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import Sampler

from surefoot.trainer.data.loader_state import decode_state, encode_state, has_state
from surefoot.trainer.data.skipping import Skipping
from surefoot.trainer.state import rng

_OURS = ("torch.utils.data.", "surefoot.data.")


class SamplerState:
    """Captures and puts back the state of one loader's samplers."""

    def __init__(self, name: str, loader: Any) -> None:
        self._name = name
        self._loader = loader
        self.samplers = _samplers(loader)
        self._at_first = [_counters(sampler) for sampler in self.samplers]

    @property
    def is_own_make(self) -> bool:
        """True if one of the samplers is the script's own."""
        return any(not f"{type(sampler).__module__}.".startswith(_OURS) for sampler in self.samplers)

    def shares(self) -> list[int]:
        """Rank and number of ranks that samplers of global batches go by, which a script may set."""
        return [
            getattr(sampler, name)
            for sampler in self.samplers
            if callable(getattr(sampler, "iter_from", None))
            for name in ("rank", "world_size")
            if type(getattr(sampler, name, None)) is int
        ]

    def capture(self) -> dict[str, Any]:
        return {
            "generators": self.capture_generators(),
            "counters": [self._moved(number) for number in range(len(self.samplers))],
            "states": [encode_state(sampler, self._name) for sampler in self.samplers if has_state(sampler)],
        }

    def restore(self, saved: dict[str, Any]) -> None:
        for sampler, state in zip(filter(has_state, self.samplers), saved.get("states", []), strict=False):
            sampler.load_state_dict(decode_state(state))
        for sampler, counters in zip(self.samplers, saved.get("counters", []), strict=False):
            for name, value in counters.items():
                setattr(sampler, name, value)
        self.restore_generators(saved["generators"])

    def capture_generators(self) -> list[Any]:
        return [rng.capture_own(generator) for generator in self._generators()]

    def restore_generators(self, saved: list[Any]) -> None:
        for generator, state in zip(self._generators(), saved, strict=False):
            rng.restore_own(generator, state)

    def _moved(self, number: int) -> dict[str, Any]:
        # Only counters that have moved: a value that the script sets up differently after a restart is intended.
        first = self._at_first[number]
        return {
            name: value
            for name, value in _counters(self.samplers[number]).items()
            if name in first and value != first[name]
        }

    def _generators(self) -> list[Any]:
        """The loader's and its samplers' own generators, each once."""
        held = [getattr(self._loader, "generator", None)]
        held += [value for sampler in self.samplers for value in _attributes(sampler).values()]
        return list({id(one): one for one in held if isinstance(one, rng.GENERATORS)}.values())


def _samplers(loader: Any) -> list[Any]:
    """The loader's samplers and those that they are made of, each once."""
    found: dict[int, Any] = {}
    waiting = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while waiting:
        sampler = waiting.pop()
        if isinstance(sampler, Skipping):
            sampler = sampler.inner
        if sampler is None or id(sampler) in found:
            continue
        found[id(sampler)] = sampler
        waiting += [getattr(sampler, "sampler", None), getattr(sampler, "batch_sampler", None)]
        waiting += [value for value in _attributes(sampler).values() if isinstance(value, Sampler)]
    return list(found.values())


def _attributes(sampler: Any) -> dict[str, Any]:
    return getattr(sampler, "__dict__", {})


def _counters(sampler: Any) -> dict[str, Any]:
    return {name: value for name, value in _attributes(sampler).items() if type(value) is int}
