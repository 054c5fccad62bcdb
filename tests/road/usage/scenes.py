"""Training scripts as a user would write them. `scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import surefoot
from surefoot.home import base_directory

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


class Augmented(torch.utils.data.Dataset[tuple[int, float]]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()


def agent_pid() -> int:
    (lock,) = base_directory().glob("surefoot-*.lock")
    return int(json.loads(lock.read_text())["pid"])


def long_call() -> None:
    """A call that no Python handler can interrupt."""
    print("calling", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"a", b"b", 4_000_000)
    print("called", flush=True)


def deed(what: str, run: surefoot.Run) -> bool:
    """Something that happens inside a step's body; True to leave the loop."""
    if what == "break":
        return True
    if what == "raise":
        raise ValueError("boom")
    if what == "exit":
        sys.exit(7)
    if what in ("term", "term_twice"):
        for _ in range(2 if what == "term_twice" else 1):
            os.kill(os.getpid(), signal.SIGTERM)
        while not run.evicting:
            pass
    if what == "save_and_term":
        run.save("kept", wait=True, metrics={"loss": 0.5})
        os.kill(os.getpid(), signal.SIGTERM)
    if what == "save":
        run.save("named", wait=True)
    if what == "kill_agent":
        os.kill(agent_pid(), signal.SIGKILL)
    if what == "long_call":
        long_call()
    if what == "hang":
        print("hanging", flush=True)
        threading.Event().wait()
    return False


def train(
    to: str | None, total: int, log: str, deeds: dict[str, str] | None = None, workers: int = 0, grace_s: float = 30.0
) -> None:
    """Dropout, augmentation, a schedule; one line a step, written by the step's own body."""
    torch.manual_seed(1)
    random.seed(2)
    if WORLD > 1:
        dist.init_process_group("gloo")
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
    if WORLD > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    data = Augmented()
    sampler = torch.utils.data.DistributedSampler(data) if WORLD > 1 else None
    loader = torch.utils.data.DataLoader(
        data, 5, shuffle=sampler is None, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    losses: list[float] = []
    deeds = deeds or {}
    with surefoot.Run(
        to,
        grace_s=grace_s,
        stage=1,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        loader=loader,
        losses=losses,
    ) as run:
        print("entered at", run.step, flush=True)
        for step, (ids, drawn) in run.batches(loader, total):
            x = torch.randn(5, 4) + (ids[:, None] * 0.01 + (drawn[:, None] if not workers else 0)).float()
            loss = (model(x) - x).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if deed(deeds.get(str(step), deeds.get(f"{step}@{RANK}", "")), run):
                break
            losses.append(loss.item())
            line = [RANK, step, ids.tolist(), loss.item().hex(), scheduler.get_last_lr()[0], len(losses)]
            with Path(f"{log}{RANK}").open("a") as out:
                print(json.dumps(line), file=out)
    print("after the run", run.finished, flush=True)


def two_phases(to: str, log: str, stop: int | None) -> None:
    """Two loaders without names, one after the other; left by an exception at a step."""
    torch.manual_seed(0)
    loaders = [torch.utils.data.DataLoader(torch.arange(start, start + 9), 2, shuffle=True) for start in (0, 100)]
    with surefoot.Run(to, stage=1, t=torch.zeros(1)) as run:
        for loader, total in zip(loaders, (7, 14), strict=True):
            for step, ids in run.batches(loader, total):
                if step == stop:
                    raise KeyError("stop")
                with Path(log).open("a") as out:
                    print(step, ids.tolist(), file=out)
            print("finished", run.finished)


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
