"""When a record names a frozen file, what the agent is shown of it, and what becomes of writes that move no counter."""

from __future__ import annotations

import mmap
import os
import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import xxhash

from surefoot.core.frozen import FrozenFile
from surefoot.core.plan import Plan, make_plan
from surefoot.errors import CorruptError
from surefoot.ipc.wire import Body
from surefoot.trainer.frozen.bytes import CHUNK_BYTES, Contents, Placed, read, write
from surefoot.trainer.frozen.frozen import Frozen
from surefoot.trainer.state.flatten import Flattener
from surefoot.trainer.state.report import report_of

_WITHIN_S = 120.0
SIDE = 1500
"""Two squares of so many 4-byte elements are more than what is worth a file, and more than one chunk each."""


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy())


_STRIDED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.randn(7, 5, dtype=torch.bfloat16),
    "transposed": lambda: torch.randn(5, 7).t(),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "bool": lambda: torch.randint(0, 2, (40,)).bool(),
    "fp8": lambda: torch.randn(4, 6).to(torch.float8_e4m3fn),
    "every other row": lambda: torch.randn(12, 3)[::2],
}


@pytest.mark.parametrize("kind", _STRIDED)
def test_bytes_are_read_and_written_in_place(kind: str) -> None:
    """Any stretch of a tensor of any strides reads as its row-major bytes, and what is written is read again."""
    tensor = _STRIDED[kind]()
    raw = _raw(tensor)
    assert Placed("x", 0, tensor).digest() == xxhash.xxh3_128_hexdigest(raw)
    for start, stop in ((0, len(raw)), (1, 3), (5, 9), (len(raw) - 1, len(raw))):
        assert bytes(read(tensor, start, stop)) == raw[start:stop]
    write(tensor, 3, memoryview(bytearray(b"\1\0\1\0")))
    assert _raw(tensor) == raw[:3] + b"\1\0\1\0" + raw[7:]


@pytest.mark.parametrize("piece", [7, 1000, 4096, 1 << 20])
def test_a_file_is_read_and_written_in_pieces(piece: int) -> None:
    """What is copied out of some tensors is the file, and copied into others makes them equal."""
    made, others = ([torch.randn(300), torch.randn(5, 4).t(), torch.randn(70)] for _ in range(2))
    header = b"h" * 90
    starts = [90, 90 + 1200, 90 + 1200 + 80]
    size_bytes = 90 + 1200 + 80 + 280

    def contents(tensors: list[torch.Tensor]) -> Contents:
        places = (Placed(f"t{n}", start, one) for n, (start, one) in enumerate(zip(starts, tensors, strict=True)))
        return Contents(header, size_bytes, tuple(places))

    source, target = contents(made), contents(others)
    file = b""
    for start in range(0, size_bytes, piece):
        window = memoryview(bytearray(min(piece, size_bytes - start)))
        source.copy_out(start, window)
        file += bytes(window)
        target.copy_in(start, window)
    assert file == header + b"".join(map(_raw, made))
    assert all(map(torch.equal, made, others))
    hashed = source.hash(lambda _data: None)
    assert hashed.file == FrozenFile(xxhash.xxh3_128_hexdigest(file), size_bytes)
    assert target.hash(lambda _data: None).file == hashed.file
    assert source.is_whole
    assert not Contents(header, size_bytes, source.places[1:]).is_whole


class _Trainer:
    """A trainer with two frozen layers, and the agent's end of its messages."""

    def __init__(self, again_every_s: float = 3600.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.base = {name: torch.randn(SIDE, SIDE, generator=generator) for name in ("a", "b")}
        self.said: list[str] = []
        self._told: queue.SimpleQueue[Body] = queue.SimpleQueue()
        self.frozen = Frozen(self.said.append, self._told.put, again_every_s)
        self.frozen.open(Flattener(frozenset()).flatten({"m": self.base}))

    def plan(self) -> Plan:
        return make_plan([report_of(self._flat(), several=False)])

    def boundary(self, plan: Plan | None = None) -> list[str]:
        """One boundary, with a new plan perhaps; returns which leaves are frozen."""
        flat = self._flat()
        if plan is not None:
            self.frozen.planned(plan, 0)
        return [named.name for named in flat.tensors if named.frozen]

    def begin(self) -> Body:
        """The first boundary: what the agent is told of the file."""
        self.frozen.begin()
        self.boundary(self.plan())
        return self.told()

    def named(self, *, wait: bool = False) -> Any:
        return self.frozen.named(wait=wait)

    def told(self) -> Body:
        return self._told.get(timeout=_WITHIN_S)

    def silent(self) -> bool:
        return self._told.empty()

    def ask(self, what: str, window: memoryview | None = None, **fields: Any) -> Body:
        """A question of the agent's, and the answer to it."""
        fds = []
        if window is not None:
            fds = [os.memfd_create("window")]
            os.ftruncate(fds[0], len(window))
            mine = mmap.mmap(fds[0], len(window))
            mine[:] = bytes(window)
        assert self.frozen.pushed({"op": "frozen_ask", "what": what, "ticket": "t", **fields}, fds)
        answer = self.told()
        if window is not None:
            window[:] = mine[:]
        assert (answer["op"], answer["ticket"]) == ("frozen_done", "t")
        return answer

    def _flat(self) -> Any:
        resting = frozenset(tensor.data_ptr() for tensor in self.base.values())
        return self.frozen.mark(Flattener(frozenset()).flatten({"m": self.base}), resting)


@pytest.fixture
def trainer() -> Iterator[Callable[..., _Trainer]]:
    made: list[_Trainer] = []

    def make(**options: Any) -> _Trainer:
        made.append(_Trainer(**options))
        return made[-1]

    yield make
    for one in made:
        one.frozen.close()


Make = Callable[..., _Trainer]


def _file(one: _Trainer, plan: Plan) -> bytes:
    image = plan.frozen_image(0)
    assert image is not None
    return image.header + b"".join(_raw(one.base[box.name.removeprefix("m.")]) for box, _start in image.places)


def test_a_record_names_what_was_hashed_twice_with_a_step_between(trainer: Make) -> None:
    """Not before; one that is waited for has it hashed again at once."""
    one = trainer()
    announced = one.begin()
    data = _file(one, one.plan())
    name = FrozenFile(xxhash.xxh3_128_hexdigest(data), len(data)).to_json()
    assert announced == {"op": "frozen", **name}
    assert one.named() is None
    one.boundary()
    assert one.named() is None
    assert one.silent()
    one.boundary()
    assert one.told() == announced
    one.boundary()
    assert one.named() == name
    eager = trainer()
    eager.begin()
    assert eager.named(wait=True) == name
    assert eager.told() == announced


def test_a_write_during_the_hashing_is_never_named(trainer: Make) -> None:
    """The counter has moved by the time of the record: no name, and the leaf is given up at the next boundary."""
    one = trainer()
    one.begin()
    one.base["b"].add_(1)
    assert one.named(wait=True) is None
    assert one.boundary() == []
    assert one.named() is None
    assert one.silent(), "nothing was named that this write could have made wrong"


def test_an_image_that_must_count_does_not_name_what_was_written_to_silently(trainer: Make) -> None:
    """Neither counter nor time tells: its bytes at this very boundary do."""
    one = trainer()
    one.begin()
    one.base["b"].data.add_(1)
    one.boundary()
    assert one.named(wait=True) is None
    assert one.told()["event"] == "frozen_changed"


def test_a_silent_write_is_found_by_the_second_hashing(trainer: Make) -> None:
    """An average that is kept through `.data` is named before any record names a file with it."""
    one = trainer()
    one.base["c"] = torch.randn(SIDE, SIDE)
    file = one.begin()
    for _ in range(2):
        one.base["b"].data.mul_(1.01)
        assert one.boundary() == ["m.a", "m.b", "m.c"]
        assert one.named() is None
    changed = one.told()
    assert (changed["op"], changed["event"]) == ("event", "frozen_changed")
    assert changed["fields"]["tensors"] == ["m.b"]
    assert changed["fields"]["object"] == f"frozen/{file['xxh3_128']}.safetensors"
    assert one.boundary() == ["m.a", "m.c"]
    assert one.named() is None
    assert len(one.said) == 1
    assert one.said[0].startswith("m.b is frozen")
    one.boundary(one.plan())
    other = one.told()
    assert other["xxh3_128"] != file["xxh3_128"]
    one.boundary()
    one.boundary()
    assert one.told() == other
    one.boundary()
    assert one.named() == {name: value for name, value in other.items() if name != "op"}


def _confirmed(one: _Trainer) -> None:
    one.begin()
    one.boundary()
    one.boundary()
    one.told()
    one.boundary()
    assert one.named() is not None


def test_a_silent_write_is_found_before_a_save_with_a_tag(trainer: Make) -> None:
    """One element, changed through NumPy, is found by the hashing that such a save orders."""
    one = trainer()
    _confirmed(one)
    one.base["a"].numpy()[77, 99] += 1
    one.boundary()
    assert one.named() is not None, "no counter moved"
    one.frozen.before_save(kept=False)
    assert one.silent()
    one.frozen.before_save(kept=True)
    assert one.told()["event"] == "frozen_changed"
    assert one.boundary() == []
    assert one.named() is None


def test_silent_writes_are_looked_for_again_and_again(trainer: Make) -> None:
    """Without anybody's asking; while nothing is found the file is announced again, for an agent that gave it up."""
    one = trainer(again_every_s=0.05)
    announced = one.begin()
    assert one.told() == one.told() == announced
    one.base["a"].data.zero_()
    while (said := one.told()) == announced:
        pass
    assert said["event"] == "frozen_changed"
    assert said["fields"]["tensors"] == ["m.a"]


def test_another_plan_leaves_the_file_as_it_is(trainer: Make) -> None:
    """What is planned beside it changes nothing: the same name, still sure, announced under the new plan."""
    one = trainer()
    _confirmed(one)
    name = one.named()
    one.boundary(one.plan())
    assert one.told() == {"op": "frozen", **name}
    one.boundary()
    assert one.named() == name


@pytest.mark.parametrize("piece", [CHUNK_BYTES + 4096, 1 << 30])
def test_the_file_is_shown_in_pieces(trainer: Make, piece: int) -> None:
    """What the agent reads through its window, in order or not, are the bytes that have the announced hash."""
    one = trainer()
    name = one.begin()["xxh3_128"]
    data = _file(one, one.plan())
    for start in sorted(range(0, len(data), piece), reverse=True):
        window = memoryview(bytearray(min(piece, len(data) - start)))
        answer = one.ask("read", window, xxh3_128=name, start=start, bytes=len(window))
        assert answer["error"] is None
        assert bytes(window) == data[start : start + piece]
    assert "another frozen file" in one.ask("read", xxh3_128="0" * 32, start=0, bytes=1)["error"]


def test_a_base_is_compared_and_given_back(trainer: Make) -> None:
    """The same base needs nothing; another one is written over, and is torn until the last piece has come."""
    saved, same, other = trainer(), trainer(), trainer(seed=1)
    plan = saved.plan()
    data = _file(saved, plan)
    question = {"plan": plan.body, "of_rank": 0}
    files = [[0, FrozenFile(xxhash.xxh3_128_hexdigest(data), len(data)).to_json()]]
    assert same.ask("compare", **question, files=files)["differs"] == []
    assert other.ask("compare", **question, files=files)["differs"] == [0]
    half = len(data) // 2
    other.ask("write", memoryview(bytearray(data[:half])), rank=0, start=0, bytes=half)
    with pytest.raises(CorruptError, match=r"m\.[ab]: a damaged copy was written over it"):
        other.frozen.refuse_torn(None, 0)
    other.ask("write", memoryview(bytearray(data[half:])), rank=0, start=half, bytes=len(data) - half)
    other.frozen.refuse_torn(None, 0)
    assert all(torch.equal(other.base[name], saved.base[name]) for name in saved.base)
    assert other.ask("compare", **question, files=files)["differs"] == []


def test_what_is_no_longer_registered_is_nobodys(trainer: Make) -> None:
    """A file of which a part has no place here is given back whole, and only what fits is written."""
    saved, fewer = trainer(), trainer(seed=1)
    plan = saved.plan()
    data = _file(saved, plan)
    kept = fewer.base.pop("b").clone()
    fewer.frozen.open(Flattener(frozenset()).flatten({"m": fewer.base}))
    files = [[0, FrozenFile(xxhash.xxh3_128_hexdigest(data), len(data)).to_json()]]
    assert fewer.ask("compare", plan=plan.body, of_rank=0, files=files)["differs"] == [0]
    fewer.ask("write", memoryview(bytearray(data)), rank=0, start=0, bytes=len(data))
    assert torch.equal(fewer.base["a"], saved.base["a"])
    assert not torch.equal(kept, saved.base["b"])
    fewer.frozen.open(Flattener(frozenset()).flatten({"m": {}}))
    assert fewer.ask("compare", plan=plan.body, of_rank=0, files=files)["differs"] == []
