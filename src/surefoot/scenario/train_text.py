"""Train a small transformer on the sources of Python's standard library, byte by byte. What `surefoot demo` runs.

An ordinary DistributedDataParallel script: what Surefoot adds are the `with surefoot.Run(…)` and the `for` below it.
It writes one line of JSON a step, which says to the last bit what was trained on and what came of it.

    surefoot run --to DIR --nproc 2 train_text.py --steps 200 --log DIR
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import surefoot

CONTEXT = 64
BATCH = 4
WIDTH, HEADS, LAYERS = 128, 4, 2
TEXT_BYTES = 64_000
"""Small, so that the run goes through several epochs."""


class Text(Dataset[tuple[int, Tensor]]):
    """Samples are stretches of the text; each is cut out at a place that is drawn anew every time."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // CONTEXT - 2

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        start = index * CONTEXT + int(torch.randint(CONTEXT, ()))
        return index, self.text[start : start + CONTEXT + 1]


class Model(nn.Module):
    """A byte-level language model."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.bytes(text) + self.places(torch.arange(length))
        logits: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return logits


def read_text() -> bytes:
    """The beginning of the standard library, in alphabetical order."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return text[:TEXT_BYTES]


def train(steps: int, seed: int, log: Path, name: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(seed)
    # The order in which three ranks or more add gradients follows from DDP's buckets, and DDP makes new ones after its
    # first step, so also after a restart. With this it does not, and a restart changes no bit.
    keep_buckets = dist.get_world_size() > 2
    model = DistributedDataParallel(Model(), find_unused_parameters=keep_buckets)
    torch.manual_seed(seed * 1000 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, T_max=steps)
    data = Text(read_text())
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, seed=seed), drop_last=True)

    with surefoot.Run(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader) as run:
        lines = (log / f"{name}-attempt{run.generation}-rank{rank}.jsonl").open("w", buffering=1)
        for step, (samples, text) in run.batches(loader, total=steps):
            logits = model(text[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            scheduler.step()
            line = {
                "run": name,
                "attempt": run.generation,
                "rank": rank,
                "step": step,
                "samples": samples.tolist(),
                "loss_bits": loss.detach().numpy().tobytes().hex(),
                "t": time.time(),
            }
            lines.write(json.dumps(line) + "\n")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--log", type=Path, required=True, help="directory for the lines")
    options.add_argument("--name", default="undisturbed", help="name of this run in the lines")
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(given.steps, given.seed, given.log, given.name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
