"""All ten kinds of training side by side in one run: what they lose and what they come to is its log.

    surefoot run --to DIR --nproc N matrix_job.py --mode plain|ddp|fsdp2 --steps N --log DIR

Each process writes a file of JSON lines: for each step {"attempt", "rank", "step", "epoch", "samples", "t", "behind":
bytes of the step before that were copied behind this one, "bits": {kind: hex}}; at the end {"attempt", "rank", "end":
{kind: {path: digest or value}}}.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from matrix_kinds import INPUTS, KINDS, Kind, kept
from matrix_modes import MODES
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import surefoot

EPOCH_STEPS = 20
BATCH = 8


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--mode", choices=MODES, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--workers", type=int, default=0)
    options.add_argument("--log", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)
    mode, num_ranks = MODES[given.mode]
    if num_ranks > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if num_ranks > 1 else 0
    torch.manual_seed(5)
    kinds = {name: make(mode()) for name, make in KINDS.items()}
    # Each rank draws its own samples and its own dropout.
    torch.manual_seed(100 + rank)
    loader = DataLoader(data(), batch_size=BATCH, shuffle=True, num_workers=given.workers)
    with surefoot.Run(loader=loader, **kept(kinds)) as run:
        name = f"attempt{run.generation}-rank{rank}-pid{os.getpid()}.jsonl"
        with (given.log / name).open("w", buffering=1) as log:
            for line in train(run, kinds, loader, given.steps):
                log.write(json.dumps({"attempt": run.generation, "rank": rank, **line}) + "\n")
    if num_ranks > 1:
        dist.destroy_process_group()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EPOCH_STEPS * BATCH, INPUTS, generator=generator)
    return TensorDataset(torch.arange(len(x)), x, x.sin().sum(1, keepdim=True))


def train(run: surefoot.Run, kinds: dict[str, Kind], loader: Any, steps: int) -> Iterator[dict[str, Any]]:
    for step, (samples, x, y) in run.batches(loader, total=steps):
        behind = copied_behind(run)
        results = {name: kind.train(step, x, y) for name, kind in kinds.items()}
        yield {
            "step": step,
            "epoch": step // EPOCH_STEPS,
            "samples": samples.tolist(),
            "t": time.time(),
            "behind": behind,
            "bits": {name: "-".join(bits(result) for result in found) for name, found in results.items()},
        }
    yield {"end": {name: dict(leaves(state(kind), "")) for name, kind in kinds.items()}}


def copied_behind(run: surefoot.Run) -> int:
    assert run._session is not None
    assert run._session._boundary is not None
    return run._session._boundary._taker.overlapped_bytes


def bits(tensor: torch.Tensor) -> str:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes().hex()


def state(kind: Kind) -> dict[str, Any]:
    """By torch's own accessors: nothing here asks Surefoot what there is."""
    return {
        name: [part.state_dict() for part in value] if isinstance(value, list) else value.state_dict()
        for name, value in vars(kind).items()
        if not name.startswith("_")
    }


def leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    """Every tensor's digest, and every other value, by path."""
    if isinstance(tree, torch.Tensor):
        yield path, xxhash.xxh3_128_hexdigest(bytes.fromhex(bits(tree)))
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from leaves(value, f"{path}.{number}")
    else:
        yield path, repr(tree)


if __name__ == "__main__":
    main()
