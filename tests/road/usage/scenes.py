"""Training scripts as a user would write them. `scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import atexit
import gc
import hashlib
import json
import os
import random
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import surefoot
import surefoot.errors
from surefoot.ipc.home import base_directory

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def _say(*words: object) -> None:
    """A line by one write, so that two ranks' lines do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def say(*values: Any) -> None:
    """A line as JSON, in one write: several ranks share the output."""
    os.write(1, (json.dumps(values) + "\n").encode())


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
    frozen = gc.get_freeze_count()
    atexit.register(lambda: print("ends, garbage spared:", gc.get_freeze_count() > frozen, flush=True))
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


def rank_local(to: str, total: int, values: bool, differ: bool = False) -> None:
    """Values of one name that differ between ranks, beside what DDP keeps equal; a rank without any tensor."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)))
    optimizer = torch.optim.Adam(model.parameters())
    if differ and RANK == 1:
        with torch.no_grad():
            model.module[1].bias += 1.0
    objects: dict[str, Any] = {"t": torch.full((2,), RANK + 1.0), "dl": {"pos": 100 + RANK}}
    only = {"only0": torch.arange(5)} if RANK == 0 else {}
    if not values:
        objects = {"t": torch.zeros(2), "dl": {"pos": 0}}
        only = {"only0": torch.zeros(5, dtype=torch.int64)} if RANK == 0 else {}
    with surefoot.Run(to, stage=1, model=model, optimizer=optimizer, **objects, **only) as run:
        say("state", RANK, run.step, objects["t"].tolist(), objects["dl"]["pos"])
        say("draw", RANK, torch.rand(1).item())
        say("bias", RANK, model.module[1].bias[0].item().hex(), sum(len(value) for value in only.values()))
        for _ in run.steps(total):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).sum().backward()
            if not differ:
                optimizer.step()


def restart_alone(to: str) -> None:
    """The state of two ranks in one."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    t, dl = torch.zeros(2), {"pos": 0}
    only = torch.zeros(5, dtype=torch.int64)
    with surefoot.Run(to, stage=1, model=model, optimizer=optimizer, t=t, dl=dl, only0=only) as run:
        say(run.step, t.tolist(), dl["pos"], model[1].bias[0].item().hex(), only.tolist())
        run.step_done()


def changing(to: str, total: int, stop: bool) -> None:
    """The structure changes in many ways, on one rank only or on both; both say what they finished with."""
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    state: dict[str, Any] = {"t": torch.zeros(2), "list": []}
    with surefoot.Run(to, stage=1, state=state) as run:
        for step in run.steps(total):
            dist.barrier()
            state["list"].append(step)
            if step == 5 and RANK == 1:
                state["born"] = torch.full((3,), 5.0)
            if step == 8:
                state["t"] = torch.full((4 + step,), float(step))
            if step == 11 and RANK == 0:
                state["text"] = "x" * 200_000
            if step >= 14 and RANK == 1 and stop:
                state["last"] = torch.full((2,), float(step))
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.evicting:
                    pass
                stop = False
            state["sum"] = state["t"].sum().item() + step
            kept = {key: (value.tolist() if isinstance(value, torch.Tensor) else value) for key, value in state.items()}
            Path(f"{to}-{RANK}-{step + 1}").write_text(json.dumps(kept))
    _say("done", RANK)


def show(to: str) -> None:
    """What a checkpoint of `changing` gives back."""
    dist.init_process_group("gloo")
    state: dict[str, Any] = {}
    with surefoot.Run(to, state=state) as run:
        kept = {key: (value.tolist() if isinstance(value, torch.Tensor) else value) for key, value in state.items()}
        _say("restored", RANK, run.step, json.dumps(kept))


def lonely_save(to: str, at: int, deed: str, catch: bool = False) -> None:
    """save() on rank 0 only."""
    dist.init_process_group("gloo")
    w = torch.zeros(2)
    try:
        with surefoot.Run(to, stage=1, w=w) as run:
            for step in run.steps(6 if deed != "total" or RANK else 3):
                w += 1
                dist.barrier() if deed != "total" else None
                if step == at and RANK == 0 and deed == "save":
                    run.save("alone", wait=True)
    except surefoot.errors.UsageError as error:
        _say("told", RANK, error)
        sys.exit(9)
    _say("done", RANK)


def opened_on_one(to: str) -> None:
    """The run is opened on rank 0 only."""
    dist.init_process_group("gloo")
    if RANK == 0:
        sys.executable = os.environ["SUREFOOT_TEST_PYTHON"]
        with surefoot.Run(to, w=torch.zeros(1)):
            print("entered", flush=True)
    dist.barrier()


def rss_bytes() -> int:
    """Anonymous memory of this process; what it maps of shared memory is not its own."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) * 1024


def many_saves(to: str, total: int) -> None:
    """Says what memory it and its agent use, as it goes."""
    w = torch.zeros(1 << 20)
    with surefoot.Run(to, stage=1, w=w) as run:
        for step in run.steps(total):
            w += 1
            run.save(wait=True)
            if step % 20 == 19:
                agent = Path(f"/proc/{agent_pid()}")
                anonymous = int(agent.joinpath("status").read_text().split("RssAnon:")[1].split()[0]) * 1024
                files = [path.stat().st_size for path in base_directory().glob("*/*.seg")]
                fds = [len(os.listdir(place / "fd")) for place in (Path("/proc/self"), agent)]
                say(step, rss_bytes(), anonymous, sum(files), fds)


def many_tensors(to: str, count: int, steps: int) -> None:
    """Thousands of small parameters; says the hash of all state before it leaves and after it comes back."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
    torch.manual_seed(0)
    model = torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.randn(3)) for i in range(count)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    with surefoot.Run(to, stage=1, model=model, optimizer=optimizer) as run:
        say("state", run.step, state_hash(model, optimizer))
        for _ in run.steps(run.step + steps):
            for parameter in model.values():
                parameter.grad = parameter.detach().clone()
            optimizer.step()
        say("state", run.step, state_hash(model, optimizer))


def state_hash(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    hashed = hashlib.sha256()
    for tensor in model.state_dict().values():
        hashed.update(tensor.numpy().tobytes())
    for values in optimizer.state_dict()["state"].values():
        hashed.update(values["momentum_buffer"].numpy().tobytes())
    return hashed.hexdigest()


def in_little_shared_memory(to: str, total: int) -> None:
    """A state larger than the mount for shared memory; the agent is killed on the way."""
    w = torch.zeros(8 << 20)
    with surefoot.Run(to, stage=1, w=w) as run:
        say("begins", run.step, w.unique().tolist())
        for step in run.steps(total):
            w += 1
            run.save(wait=True)
            if step in (1, 3):
                os.kill(agent_pid(), signal.SIGKILL)
        say("ends", run.step, w.unique().tolist())


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
