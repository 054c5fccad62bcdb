"""The board: words that processes share without a lock."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from surefoot.errors import AgentError
from surefoot.ipc.board import PAGE_BYTES, Board, NodeWord, Phase, RankWord

_MAX = 2**64 - 1


def test_a_board_is_taken_over_as_it_was_left(tmp_path: Path) -> None:
    """Every word of every page, written through one mapping, is read through another, and after the writer is gone."""
    made = Board.create(tmp_path / "board", 3)
    for number, node_word in enumerate(NodeWord):
        if node_word not in (NodeWord.MAGIC, NodeWord.NUM_RANKS):
            made.set_node(node_word, 1000 + number)
    for rank in range(3):
        for number, rank_word in enumerate(RankWord):
            made.set_rank(rank, rank_word, _MAX - 100 * rank - number)
    del made
    for found in (Board.open(tmp_path / "board"), Board.create(tmp_path / "board", 3)):
        assert found.num_ranks == 3
        for number, node_word in enumerate(NodeWord):
            if node_word not in (NodeWord.MAGIC, NodeWord.NUM_RANKS):
                assert found.node(node_word) == 1000 + number
        for rank in range(3):
            assert [found.rank(rank, word) for word in RankWord] == [
                _MAX - 100 * rank - number for number in range(len(RankWord))
            ]


def test_a_new_board_is_empty_private_and_reserved(tmp_path: Path) -> None:
    """All words but magic and size are zero; mode 0600; every page is there; nothing else is left beside it."""
    board = Board.create(tmp_path / "board", 2)
    assert [board.node(word) for word in NodeWord if word not in (NodeWord.MAGIC, NodeWord.NUM_RANKS)] == [0] * (
        len(NodeWord) - 2
    )
    assert [board.rank(rank, word) for rank in range(2) for word in RankWord] == [0] * 2 * len(RankWord)
    info = (tmp_path / "board").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_size, info.st_nlink) == (0o600, 3 * PAGE_BYTES, 1)
    assert info.st_blocks * 512 >= info.st_size
    assert [path.name for path in tmp_path.iterdir()] == ["board"]
    assert board.node(NodeWord.PHASE) == Phase.NONE


def test_pages_do_not_touch(tmp_path: Path) -> None:
    """The words of one page, all set, change nothing on the others."""
    board = Board.create(tmp_path / "board", 3)
    for word in RankWord:
        board.set_rank(1, word, _MAX)
    assert [board.rank(rank, word) for rank in (0, 2) for word in RankWord] == [0] * (2 * len(RankWord))
    assert [board.node(word) for word in NodeWord if word not in (NodeWord.MAGIC, NodeWord.NUM_RANKS)] == [0] * (
        len(NodeWord) - 2
    )
    data = (tmp_path / "board").read_bytes()
    assert struct.unpack_from("<8Q", data, 2 * PAGE_BYTES) == (_MAX,) * 8


def test_a_larger_board_replaces_a_smaller_one_and_a_smaller_one_is_kept(tmp_path: Path) -> None:
    """More ranks need a new board; fewer use the old one, with what it says. Old mappings stay readable."""
    small = Board.create(tmp_path / "board", 1)
    small.set_node(NodeWord.GENERATION, 5)
    large = Board.create(tmp_path / "board", 4)
    assert (large.num_ranks, large.node(NodeWord.GENERATION)) == (4, 0)
    assert small.node(NodeWord.GENERATION) == 5
    large.set_node(NodeWord.GENERATION, 6)
    again = Board.create(tmp_path / "board", 2)
    assert (again.num_ranks, again.node(NodeWord.GENERATION)) == (4, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["board"]


def test_what_a_dead_creator_left_is_no_hindrance(tmp_path: Path) -> None:
    """A board appears whole or not at all: an unfinished one under the other name is made again."""
    (tmp_path / "board.new").write_bytes(b"half")
    assert not (tmp_path / "board").exists()
    assert Board.create(tmp_path / "board", 2).num_ranks == 2
    assert [path.name for path in tmp_path.iterdir()] == ["board"]


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


_GOOD_MAGIC = int.from_bytes(b"SFBOARD1", "little")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"x",
        b"\0" * PAGE_BYTES,
        b"\0" * 2 * PAGE_BYTES,
        b"\xff" * 3 * PAGE_BYTES,
        _words(_GOOD_MAGIC, 1).ljust(PAGE_BYTES, b"\0"),
        _words(_GOOD_MAGIC, 1).ljust(2 * PAGE_BYTES - 1, b"\0"),
        _words(_GOOD_MAGIC, 1).ljust(2 * PAGE_BYTES + 1, b"\0"),
        _words(_GOOD_MAGIC, 2).ljust(2 * PAGE_BYTES, b"\0"),
        _words(_GOOD_MAGIC, _MAX).ljust(2 * PAGE_BYTES, b"\0"),
        _words(_GOOD_MAGIC + 1, 1).ljust(2 * PAGE_BYTES, b"\0"),
    ],
    ids=["empty", "byte", "page", "zeros", "ones", "short", "minus 1", "plus 1", "2 ranks", "many ranks", "magic"],
)
def test_what_is_no_board_is_refused_and_closed(tmp_path: Path, content: bytes) -> None:
    """Wrong size, wrong magic, more ranks than pages: an `AgentError` that names the file, and no descriptor kept."""
    path = tmp_path / "board"
    path.write_bytes(content)
    path.chmod(0o600)
    before = sorted(os.listdir("/proc/self/fd"))
    for attempt in (Board.open, lambda each: Board.create(each, 1)):
        with pytest.raises(AgentError, match=f"^{path} is not a board"):
            attempt(path)
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert path.read_bytes() == content


def test_links_and_other_things_than_files_are_refused(tmp_path: Path) -> None:
    """A symbolic or hard link, a directory, a FIFO, a dangling link: refused, also when a board is to be made."""
    Board.create(tmp_path / "good", 1)
    (tmp_path / "soft").symlink_to(tmp_path / "good")
    (tmp_path / "dangling").symlink_to(tmp_path / "absent")
    (tmp_path / "directory").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "fifo", 0o600)
    for name in ("soft", "dangling", "directory", "fifo"):
        for attempt in (Board.open, lambda each: Board.create(each, 1)):
            with pytest.raises(AgentError, match="is not a board"):
                attempt(tmp_path / name)
    Board.open(tmp_path / "good")
    os.link(tmp_path / "good", tmp_path / "hard")
    with pytest.raises(AgentError, match="is not a board of this user"):
        Board.open(tmp_path / "hard")
    with pytest.raises(FileNotFoundError):
        Board.open(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


@pytest.mark.holds("adopted-memory-is-checked")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o602])
def test_a_board_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    """Any permission for group or others: somebody else's words may stand in it."""
    Board.create(tmp_path / "board", 1)
    (tmp_path / "board").chmod(mode)
    with pytest.raises(AgentError, match="is not a board of this user"):
        Board.open(tmp_path / "board")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_board_is_refused(tmp_path: Path) -> None:
    """A whole board that belongs to somebody else is not read, and not replaced."""
    Board.create(tmp_path / "board", 1)
    os.chown(tmp_path / "board", 65534, 65534)
    for attempt in (Board.open, lambda each: Board.create(each, 4)):
        with pytest.raises(AgentError, match="is not a board of this user"):
            attempt(tmp_path / "board")
    assert (tmp_path / "board").stat().st_size == 2 * PAGE_BYTES


@pytest.mark.holds("known-late-never-early")
def test_what_is_sealed_on_all_is_the_least_of_one_generation(tmp_path: Path) -> None:
    """The minimum over the ranks, nothing while one of them is in another generation or has sealed nothing."""
    board = Board.create(tmp_path / "board", 3)
    assert board.sealed_on_all(7, 2) == -1
    for rank, sealed in ((0, 12), (1, 10), (2, 1)):
        board.set_rank(rank, RankWord.SEALED_GENERATION, 7)
        board.set_rank(rank, RankWord.SEALED, sealed)
    assert board.sealed_on_all(7, 1) == 11
    assert board.sealed_on_all(7, 2) == 9
    assert board.sealed_on_all(7, 3) == 0
    assert board.sealed_on_all(8, 2) == -1
    board.set_rank(1, RankWord.SEALED_GENERATION, 8)
    assert board.sealed_on_all(7, 1) == 11
    assert board.sealed_on_all(7, 2) == -1
    board.set_rank(0, RankWord.SEALED, 0)
    assert board.sealed_on_all(7, 1) == -1


class _Interrupted(Board):
    """A board on which, between two reads of one reader, a rank goes over to the next generation."""

    reads_left = 0

    def rank(self, local_rank: int, word: RankWord) -> int:
        if self.reads_left == 0:
            self.set_rank(0, RankWord.SEALED, 0)
            self.set_rank(0, RankWord.SEALED_GENERATION, 8)
            self.set_rank(0, RankWord.SEALED, 51)
        self.reads_left -= 1
        return super().rank(local_rank, word)


@pytest.mark.parametrize("reads", range(6))
@pytest.mark.parametrize(("asked", "right"), [(7, {41, -1}), (8, {50, -1})])
def test_a_rank_that_changes_generation_while_it_is_read_lends_no_step(
    tmp_path: Path, reads: int, asked: int, right: set[int]
) -> None:
    """Wherever the change falls between the reads, a step of one generation is never taken for one of the other."""
    Board.create(tmp_path / "board", 1)
    board = _Interrupted.open(tmp_path / "board")
    assert isinstance(board, _Interrupted)
    board.set_rank(0, RankWord.SEALED_GENERATION, 7)
    board.set_rank(0, RankWord.SEALED, 42)
    board.reads_left = reads
    assert board.sealed_on_all(asked, 1) in right


_WRITER = """
import itertools, sys
from pathlib import Path
from surefoot.ipc.board import Board, RankWord
board, rank = Board.open(Path(sys.argv[1])), int(sys.argv[2])
for number in itertools.count(1):
    value = (number & 0xffffffff) << 32 | (number & 0xffffffff)
    board.set_rank(rank, RankWord.SEALED, value)
    board.set_rank(rank, RankWord.FINISHED, value)
"""


@contextmanager
def _writers(path: Path, num_ranks: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    children = [subprocess.Popen([sys.executable, "-c", _WRITER, str(path), str(rank)]) for rank in range(num_ranks)]
    try:
        yield children
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_words_are_never_torn_and_stay_when_their_writer_is_killed(tmp_path: Path) -> None:
    """Two writers at full speed: a reader sees whole, growing words in written order; after SIGKILL they stand."""
    board = Board.create(tmp_path / "board", 2)
    with _writers(tmp_path / "board", 2) as children:
        last = [0, 0]
        give_up = time.monotonic() + 60
        changes = [0, 0]
        while min(changes) < 500:
            for rank in range(2):
                finished = board.rank(rank, RankWord.FINISHED)
                sealed = board.rank(rank, RankWord.SEALED)
                assert finished >> 32 == finished & 0xFFFFFFFF
                assert sealed >> 32 == sealed & 0xFFFFFFFF
                assert last[rank] <= finished <= sealed, "SEALED is written first, and read last"
                changes[rank] += finished != last[rank]
                last[rank] = finished
            assert time.monotonic() < give_up, f"only {changes} changes were seen"
        for child in children:
            child.kill()
            child.wait()
        left = [board.rank(rank, RankWord.FINISHED) for rank in range(2)]
        assert all(now >= before > 0 for now, before in zip(left, last, strict=True))
        assert [Board.open(tmp_path / "board").rank(rank, RankWord.FINISHED) for rank in range(2)] == left
