"""What the demo trains: a small transformer on the sources of Python's standard library, byte by byte, under DDP.

No checkpointing here: each way to survive adds its own, and all write the same log.
"""

from __future__ import annotations

import json
import os
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

CONTEXT = 64
BATCH = 4
WIDTH, HEADS, LAYERS = 128, 4, 2
TEXT_BYTES = 64_000
"""Small, so that the run goes through several epochs."""

Batch = tuple[Tensor, Tensor]
"""Ids of the samples, and their bytes."""


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
    """A byte-level language model, with dropout."""

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


class Task:
    """Model, optimizer, schedule and data of one rank. The same seed gives the same training."""

    def __init__(self, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        # The order in which three ranks or more add gradients follows from DDP's buckets, and DDP makes new ones after
        # its first step, so also after a restart. With this it does not, and a restart changes no bit.
        keep_buckets = dist.get_world_size() > 2
        self.model = DistributedDataParallel(Model(), find_unused_parameters=keep_buckets)
        torch.manual_seed(seed * 1000 + dist.get_rank())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=steps)
        data = Text(read_text())
        self.sampler: DistributedSampler[tuple[int, Tensor]] = DistributedSampler(data, seed=seed)
        self.loader = DataLoader(data, batch_size=BATCH, sampler=self.sampler, drop_last=True)

    def gradients(self, batch: Batch) -> Tensor:
        """Forward and backward; returns the loss."""
        _samples, text = batch
        logits = self.model(text[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def update(self) -> None:
        self.optimizer.step()
        self.scheduler.step()


class LogWriter:
    """This rank's part of the log (`scenario.log`), one file per attempt. Its name shows which process writes."""

    def __init__(self, directory: Path, run: str, attempt: int) -> None:
        self._head = {"run": run, "attempt": attempt, "rank": dist.get_rank()}
        name = f"{run}-attempt{attempt}-rank{dist.get_rank()}-pid{os.getpid()}.jsonl"
        self._file = (directory / name).open("w", buffering=1)

    def write(self, step: int, batch: Batch, loss: Tensor) -> None:
        """A step whose update is done."""
        line = {
            **self._head,
            "step": step,
            "samples": batch[0].tolist(),
            "loss_bits": loss.numpy().tobytes().hex(),
            "t": time.time(),
        }
        self._file.write(json.dumps(line) + "\n")


def read_text() -> bytes:
    """The beginning of the standard library, in alphabetical order."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return text[:TEXT_BYTES]
