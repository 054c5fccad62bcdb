"""One script for one GPU, under five minutes: does staging tear, what does it cost, how fast does it come back?

    python benchmarks/gpu.py --state-gb 13 --out results.json

Everything is measured in one run on one machine; the reference (a plain copy into pinned memory) is part of it. The
result is one JSON object, written to a file and to standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import surefoot
from surefoot.trainer.stage.streams import register, unregister

_LAYERS = 24


class Training:
    """Parameters with AdamW's two moments, `state_bytes` in all, and a step of matrix work as long as is asked for."""

    def __init__(self, state_bytes: int) -> None:
        rows = max(1024, int((state_bytes / 12 / _LAYERS) ** 0.5) // 8 * 8)
        self.model = nn.Sequential(*[nn.Linear(rows, rows, bias=False, device="cuda") for _ in range(_LAYERS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self._left = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self._product = torch.empty_like(self._left)
        self.rounds = 1
        self.optimizer.step()

    @property
    def state_bytes(self) -> int:
        return sum(3 * parameter.nbytes for parameter in self.model.parameters())

    def calibrate(self, at_least_s: float) -> None:
        took_s = _timed(lambda: self._compute(8))
        self.rounds = max(1, int(8 * at_least_s / took_s) + 1)

    def step(self) -> None:
        self._compute(self.rounds)
        self.optimizer.step()

    def _compute(self, rounds: int) -> None:
        for _ in range(rounds):
            torch.mm(self._left, self._left, out=self._product)


def hunt_torn_copies(place: Path, steps: int) -> dict[str, Any]:
    """Random compute, random delays on the copying stream; every sealed image against a clone made at its boundary."""
    from surefoot.trainer.stage.streams import _side_stream

    training = Training(400_000_000)
    torn: list[str] = []
    compared: set[int] = set()
    truth: dict[int, dict[str, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(1)
    with surefoot.Run(place / "hunt", interval_s=1e9, m=training.model, optimizer=training.optimizer) as run:
        for step in run.steps(steps):
            training.rounds = int(torch.randint(1, 20, (1,), generator=generator))
            if torch.rand(1, generator=generator) < 0.5:
                with torch.cuda.stream(_side_stream(torch.device("cuda", 0))):
                    torch.cuda._sleep(int(torch.randint(1, 40_000_000, (1,), generator=generator)))  # type: ignore[no-untyped-call]
            training.step()
            truth[step + 1] = {f"m.{n}": p.detach().clone() for n, p in training.model.named_parameters()}
            torn += _compare(run, truth, compared)
            truth = {known: value for known, value in truth.items() if known > step - 4}
    return {"steps": steps, "images_compared": len(compared), "torn": torn}


def _compare(run: Any, truth: dict[int, dict[str, torch.Tensor]], compared: set[int]) -> list[str]:
    stager = run._session._boundary._stager
    torn: list[str] = []
    for sealed in stager.segment.all_sealed() if stager is not None else []:
        known = truth.get(sealed.at.boundary)
        if known is None or sealed.at.boundary in compared:
            continue
        views = zip(stager.names, stager._views[sealed.slot], strict=True)
        wrong = [name for name, view in views if name in known and not torch.equal(view, known[name].cpu())]
        if stager.segment.seq(sealed.slot) == sealed.seq:
            compared.add(sealed.at.boundary)
            torn += [f"step {sealed.at.boundary}: {name}" for name in wrong]
    return torn


def measure_stall(place: Path, training: Training, copy_s: float, *, hidden: bool) -> dict[str, float]:
    """Steps of which each one is staged, beside the same steps without; the program may run ahead in both."""
    training.calibrate(1.5 * copy_s if hidden else 0.02)
    steps = 10
    quiet_s = _timed(lambda: _repeat(training.step, steps)) / steps
    run = surefoot.Run(
        place / f"hidden-{hidden}", interval_s=1e9, stage=1, m=training.model, optimizer=training.optimizer
    )
    run.restore()
    first_s = _timed(lambda: _one(training, run))
    _repeat(lambda: _one(training, run), 3)
    boundaries_s: list[float] = []
    staged_s = _timed(lambda: _repeat(lambda: _one(training, run, boundaries_s), steps)) / steps
    run.close()
    return {
        "quiet_step_s": quiet_s,
        "staged_step_s": staged_s,
        "stall_per_step_s": staged_s - quiet_s,
        "boundary_host_p50_s": statistics.median(boundaries_s),
        "boundary_host_max_s": max(boundaries_s),
        "first_step_with_plan_s": first_s,
    }


def _one(training: Training, run: surefoot.Run, boundaries_s: list[float] | None = None) -> None:
    training.step()
    started_s = time.perf_counter()
    run.step_done()
    if boundaries_s is not None:
        boundaries_s.append(time.perf_counter() - started_s)


def measure_copies(state_bytes: int) -> dict[str, Any]:
    """Registration of ordinary memory, and copies into it beside copies into memory that torch has pinned."""
    size_bytes = min(state_bytes, 4_000_000_000)
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    ordinary = torch.zeros(size_bytes, dtype=torch.uint8)
    said: list[str] = []
    plain_s = _best(lambda: ordinary.copy_(source))
    registration_s = _timed(lambda: register(ordinary, said.append))
    registered_s = _best(lambda: ordinary.copy_(source, non_blocking=True))
    unregister(ordinary)
    pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    pinned_s = _best(lambda: pinned.copy_(source, non_blocking=True))
    return {
        "bytes": size_bytes,
        "pageable_gb_per_s": size_bytes / plain_s / 1e9,
        "registered_gb_per_s": size_bytes / registered_s / 1e9,
        "pinned_gb_per_s": size_bytes / pinned_s / 1e9,
        "registered_over_pinned": pinned_s / registered_s,
        "registration_s_per_gb": registration_s / size_bytes * 1e9,
        "refused": said,
    }


def measure_restore(place: Path, training: Training) -> dict[str, Any]:
    """Out of the agent's memory into the live tensors, and whether every bit came back."""
    run = surefoot.Run(place / "restore", interval_s=1e9, m=training.model, optimizer=training.optimizer)
    run.restore()
    for _ in range(2):
        training.step()
        run.step_done()
    run.save(wait=True)
    training.step()
    run.step_done()
    truth = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    run.close()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.zero_()
    again = surefoot.Run(place / "restore", m=training.model, optimizer=training.optimizer)
    took_s = _timed(again.restore)
    same = all(torch.equal(parameter, truth[name]) for name, parameter in training.model.named_parameters())
    again.close()
    return {"seconds": took_s, "gb_per_s": training.state_bytes / took_s / 1e9, "equal": same, "from_step": again.step}


def _repeat(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started_s = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started_s


def _best(work: Callable[[], object], rounds: int = 3) -> float:
    return min(_timed(work) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-gb", type=float, default=13.0)
    parser.add_argument("--hunt-steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("gpu-results.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}

    def note(name: str, value: Any) -> None:
        results[name] = value
        options.out.write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps({name: value}), flush=True)

    with tempfile.TemporaryDirectory(prefix="surefoot-gpu-") as directory:
        place = Path(directory)
        note("hunt", hunt_torn_copies(place, options.hunt_steps))
        torch.cuda.empty_cache()
        copies = measure_copies(int(options.state_gb * 1e9))
        note("copies", copies)
        training = Training(int(options.state_gb * 1e9))
        copy_s = training.state_bytes / copies["registered_gb_per_s"] / 1e9
        note("state_bytes", training.state_bytes)
        note("stall_hidden", measure_stall(place, training, copy_s, hidden=True))
        note("stall_unhidden", measure_stall(place, training, copy_s, hidden=False))
        note("restore", measure_restore(place, training))


if __name__ == "__main__":
    main()
