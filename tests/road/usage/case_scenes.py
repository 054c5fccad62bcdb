"""Training scripts around failures told of other systems. `case_scenes.py NAME OPTIONS`, with the options as JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import torch
import torch.distributed as dist
from obstore.store import LocalStore

import surefoot

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def say(*words: Any) -> None:
    """A line as JSON, in one write: several ranks share the output."""
    os.write(1, (json.dumps(words) + "\n").encode())


def note(path: str, *words: Any) -> None:
    """A line of a log that outlives this process."""
    with Path(path).open("a") as out:
        out.write(json.dumps(words) + "\n")


def bits(*values: Any) -> str:
    """A digest of tensors, arrays and plain values, of their types too."""
    hashing = hashlib.sha256()
    for value in values:
        if isinstance(value, torch.Tensor):
            value = value.detach().contiguous().numpy()
        hashing.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    return hashing.hexdigest()[:16]


def hang() -> None:
    threading.Event().wait()


# ------------------------------------------------------------------ one rank


class Tally:
    """Hands out its very attributes, not copies of them."""

    def __init__(self) -> None:
        self.seen = 0
        self.names = ["a"]

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def spoiled_at_once(to: str, log: str, spoil_at: int) -> None:
    """State of every kind, overwritten in place as soon as a step is finished; then the process is killed."""
    kept: dict[str, Any] = {
        "tensor": torch.zeros(1 << 18),
        "array": np.zeros(5000),
        "list": [0],
        "deque": deque([0], maxlen=4),
        "ordered": OrderedDict(a=0),
        "tally": Tally(),
    }
    array: Any = kept["array"]

    def change(by: int) -> None:
        kept["tensor"] += by
        array[:] += by
        kept["list"].append(by)
        kept["deque"].append(by)
        kept["ordered"][str(by)] = by
        kept["ordered"].move_to_end("a")
        kept["tally"].seen += by
        kept["tally"].names.append(str(by))

    def digest(state: dict[str, Any]) -> str:
        plain = [state[name] for name in ("tensor", "array", "list", "deque", "ordered")]
        return bits(*plain, vars(kept["tally"]))

    with surefoot.Run(to, stage=1, **kept) as run:
        # Plain values come back in the run's state.
        kept |= {name: run.state[name] for name in kept if name in run.state}
        array = kept["array"]
        say("begins", run.step, digest(kept))
        for step in run.steps(spoil_at + 1):
            if step == spoil_at:
                change(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            change(step + 1)
            note(log, step + 1, digest(kept))


def locks_are_held(to: str) -> None:
    """A thread holds the locks that a process forked now would wait for for ever; a store's client has threads."""
    store = LocalStore(str(Path(to).parent))
    obstore.put(store, "beside", b"x")
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with handler.lock, logging._lock:  # type: ignore[union-attr, attr-defined]
            held.set()
            over.wait()

    threading.Thread(target=hold).start()
    held.wait()
    w = torch.zeros(3)
    with surefoot.Run(to, stage=1, w=w) as run:
        for _ in run.steps(3):
            w += 1
    assert bytes(obstore.get(store, "beside").bytes()) == b"x"
    over.set()
    say("done", run.step, w.tolist())


class Momentum(torch.optim.Optimizer):
    """Tells when it has changed one parameter, and not yet the others."""

    def __init__(self, params: Any, between: Callable[[], None]) -> None:
        super().__init__(params, {"lr": 0.05})
        self._between = between

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for number, p in enumerate(group["params"]):
                moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                moment.mul_(0.9).add_(p.grad)
                p.add_(moment, alpha=-group["lr"])
                if number == 0:
                    self._between()


class Telling(logging.Handler):
    """Does something while it holds its lock."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self._do = do

    def emit(self, record: logging.LogRecord) -> None:
        self._do()


PLACES = ("micro1", "micro2", "micro3", "optimizer", "logging", "evaluation")


def accumulates(to: str, total: int, log: str, at: tuple[int, str] | None = None) -> None:
    """A compiled model, four micro-batches a step, an evaluation after it; an eviction at any place of a step."""
    torch.manual_seed(1)
    doing: list[int] = []

    def come(place: str) -> None:
        if at is not None and (doing[-1], place) == tuple(at):
            os.kill(os.getpid(), signal.SIGTERM)
            while not run.evicting:
                pass

    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    model: Any = torch.compile(net, backend="eager")
    optimizer = Momentum(model.parameters(), lambda: come("optimizer"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader: Any = torch.utils.data.DataLoader(torch.arange(80.0).view(-1, 1), 8, shuffle=True)  # type: ignore[arg-type]
    logger = logging.getLogger("case")
    logger.addHandler(Telling(lambda: come("logging")))
    logger.propagate = False
    run = surefoot.Run(to, stage=1, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    with run:
        for step, ids in run.batches(loader, total):
            doing.append(step)
            optimizer.zero_grad()
            for number, part in enumerate(ids.chunk(4), 1):
                (model(part.expand(-1, 3) / 80) - 1).pow(2).mean().div(4).backward()
                come(f"micro{number}")
            optimizer.step()
            scheduler.step()
            logger.warning("a step")
            model.eval()
            with torch.no_grad():
                loss = model(ids.expand(-1, 3) / 80).sum().item()
            come("evaluation")
            model.train()
            note(
                log, step, ids.flatten().tolist(), loss.hex(), optimizer.param_groups[0]["lr"], bits(*net.parameters())
            )
    say("finished", run.finished)


def exchange(model: torch.nn.Module, average: torch.nn.Module, how: str) -> None:
    """Evaluate with averaged weights, as is often done: they take the place of the trained ones for a while."""
    with torch.no_grad():
        for p, mean in zip(model.parameters(), average.parameters(), strict=True):
            if how == "copy_":
                p.copy_(mean)
            elif how == "data.copy_":
                p.data.copy_(mean)
            else:
                p.data = mean.data


def exchanged_weights(to: str, log: str, stuck_at: int, how: str) -> None:
    """A notice comes while averaged weights stand in the model, and no boundary comes before the deadline."""
    torch.manual_seed(1)
    model, average = torch.nn.Linear(600, 600), torch.nn.Linear(600, 600)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with surefoot.Run(
        to, stage=1000, interval_s=3600, grace_s=5.0, model=model, optimizer=optimizer, average=average
    ) as run:
        say("begins", run.step, bits(*model.parameters()))
        for step in run.steps(stuck_at + 1):
            if step == stuck_at:
                exchange(model, average, how)
                say("exchanged", bits(*model.parameters()))
                hang()
            optimizer.zero_grad()
            model(torch.randn(2, 600)).pow(2).mean().backward()
            optimizer.step()
            note(log, step + 1, bits(*model.parameters()))


# ------------------------------------------------------------------ several ranks


def empty_ranks(to: str, total: int, elements: bool) -> None:
    """Only rank 0 has anything to keep; the others nothing at all, or a tensor without elements."""
    if WORLD > 1:
        dist.init_process_group("gloo")
    w, none = torch.zeros(3), torch.empty(0, 5)
    objects: dict[str, Any] = {"w": w} if RANK == 0 else {"none": none} if elements else {}
    with surefoot.Run(to, stage=1, **objects) as run:
        say("begins", RANK, run.step, w.tolist())
        for _ in run.steps(total):
            w += 1
            if WORLD > 1:
                dist.barrier()
    say("ends", RANK, run.step, list(none.shape))


def flat_parts(to: str, total: int, lengths: list[int]) -> None:
    """Each rank has its own part of a vector, as optimizers with flat partitions do."""
    dist.init_process_group("gloo")
    part = torch.full((lengths[RANK],), -1.0)
    try:
        with surefoot.Run(to, stage=1, part=part) as run:
            say("begins", RANK, run.step, part.tolist())
            start = sum(lengths[:RANK])
            for _ in run.steps(total):
                part.copy_(torch.arange(start, start + lengths[RANK]))
                dist.barrier()
    except surefoot.errors.SurefootError as error:
        say("refused", RANK, type(error).__name__, str(error))
        sys.exit(9)


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("the tape of rank 1 is torn")
        self.lock = threading.Lock()


class Breaking:
    """State that one rank cannot give, or cannot take."""

    def __init__(self, give: bool, take: bool) -> None:
        self.give = give
        self.take = take
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        if not self.give:
            raise UnpicklableError
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.take:
            raise UnpicklableError
        self.taken = state["n"]


def breaks(to: str, total: int, give_until: int | None = None, take: bool = True) -> None:
    """Rank 1 fails while its state is read after a step, or while it is loaded."""
    dist.init_process_group("gloo")
    odd = Breaking(True, take or RANK == 0)
    w = torch.zeros(2)
    try:
        with surefoot.Run(to, stage=1, w=w, odd=odd) as run:
            say("begins", RANK, run.step, w.tolist())
            for step in run.steps(total):
                w += 1
                dist.barrier()
                odd.give = RANK == 0 or step + 1 != give_until
    except surefoot.errors.SurefootError as error:
        say("told", RANK, type(error).__name__, str(error))
        sys.exit(9)
    say("ends", RANK, run.step)


_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
)


def counted() -> Counter[str]:
    """From here on, how often each of torch's collectives is called, and with how many bytes, by whomsoever."""
    calls: Counter[str] = Counter()

    def counting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
            calls[f"{name} {tensor.nbytes if tensor is not None else ''}".strip()] += 1
            return real(*args, **kwargs)

        return call

    for name in _COLLECTIVES:
        setattr(dist, name, counting(name, getattr(dist, name)))
    directly = dist.ProcessGroup.allreduce

    def asked(group: dist.ProcessGroup, tensors: list[torch.Tensor], *options: Any) -> Any:
        # The training's own come here, too, in the group of all.
        if group is not dist.group.WORLD:
            calls[f"all_reduce {tensors[0].nbytes}"] += 1
        return directly(group, tensors, *options)

    dist.ProcessGroup.allreduce = asked
    return calls


def saves_all_the_time(to: str, total: int, count_from: int) -> None:
    """The training's own collectives at every step, a save as often as the place takes it; what Surefoot calls is
    counted once it has planned."""
    dist.init_process_group("gloo")
    all_reduce, barrier = dist.all_reduce, dist.barrier
    torch.manual_seed(1)
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.AdamW(model.parameters())
    calls: Counter[str] = Counter()
    commits = set()
    with surefoot.Run(to, stage=1, interval_s=0, model=model, optimizer=optimizer, values={"seen": 0}) as run:
        for step in run.steps(total):
            if step == count_from:
                calls = counted()
            optimizer.zero_grad()
            model(torch.randn(2, 50)).pow(2).mean().backward()
            for p in model.parameters():
                all_reduce(p.grad)
            optimizer.step()
            run.state["values"]["seen"] = step
            if step % 60 == 59:
                run.save(wait=True)  # however slow the place is
            commits.add(run.durable_step)
            barrier()
    say("counted", RANK, dict(calls), len(commits))


def together(to: str, total: int, log: str, deeds: dict[str, str] | None = None, pause: int | None = None) -> None:
    """Ranks that wait for each other in every step; some are told that their machine goes."""
    dist.init_process_group("gloo")
    w = torch.zeros(2) + RANK
    with surefoot.Run(to, stage=1, w=w, r=RANK) as run:
        say("begins", RANK, run.step, w.tolist())
        for step in run.steps(total):
            if step == pause:
                say("pauses", RANK)
                while not Path(f"{log}-go").exists():
                    time.sleep(0.01)
            if (deeds or {}).get(f"{step}@{RANK}") == "term":
                os.kill(os.getpid(), signal.SIGTERM)
                while not run.evicting:
                    pass
            part = torch.tensor([float((step + 1) * (RANK + 1))])
            dist.all_reduce(part)
            w += part
            note(f"{log}{RANK}", step, w.tolist())
    say("ends", RANK, run.step)


def slow_place(to: str, timeout_s: float, own_bytes: int, max_bytes_per_s: float) -> None:
    """A save takes longer than the training's collectives may; so does the last one, which rank 0 alone has to wait
    for when the training is over."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    w = torch.zeros(own_bytes // 4 if RANK == 0 else 1)
    done = 0
    durable: set[int | None] = {None}
    with surefoot.Run(to, stage=1, max_bytes_per_s=max_bytes_per_s, w=w) as run:
        enough = torch.zeros(1)
        while not enough:
            w += 1
            done += 1
            durable.add(run.durable_step)
            enough.fill_(float(len(durable) > 1))
            dist.all_reduce(enough, op=dist.ReduceOp.MIN)
            run.step_done(last=bool(enough))
    dist.barrier()
    say("ends", RANK, run.step == done, run.finished)
    dist.destroy_process_group()


def draws(to: str, total: int) -> None:
    """What each rank draws after a resume."""
    dist.init_process_group("gloo")
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(RANK + 1)
    with surefoot.Run(to, stage=1, w=torch.zeros(1)) as run:
        say("draws", RANK, run.step, torch.rand(2).tolist(), random.random(), float(np.random.rand()))
        for _ in run.steps(total):
            dist.barrier()


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
