"""The examples as their readers start them: evicted, started again, and the same as if nothing had been."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import losses, run_to_its_end

from surefoot.exits import EVICTED, FINISHED

_EXAMPLES = Path(__file__).parents[2] / "examples"
_STEPS = {"plain_loop": 200, "lora": 60, "ddp": 60, "fsdp2": 60}
_SHORT = "plain_loop"
_EVICT_AT = 20
MIB = 1024 * 1024


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="sf-test-") as path:
        yield Path(path)


def _command(name: str, to: Path) -> list[str]:
    """As the example's own first lines say."""
    script = [str(_EXAMPLES / f"{name}.py"), "--steps", str(_STEPS[name])]
    if name == "plain_loop":
        return [sys.executable, *script, "--to", str(to)]
    ranks = ["--nproc", "2"] if name in ("ddp", "fsdp2") else []
    return [sys.executable, "-m", "surefoot.cli.main", "run", "--to", str(to), *ranks, *script]


def _run(name: str, to: Path, memory: Path, *, evict_at: int | None = None) -> tuple[int, dict[int, str]]:
    """Its exit code and losses by step; with `evict_at`, evicted once that step is told."""
    code, text = run_to_its_end(_command(name, to), f"{memory.name}-{to.name}", memory, evict_at=evict_at)
    assert code in (EVICTED, FINISHED), text
    return code, losses(text)


@pytest.mark.parametrize(
    "name", [name if name == _SHORT else pytest.param(name, marks=pytest.mark.soak) for name in _STEPS]
)
def test_an_example_survives(name: str, memory: Path, tmp_path: Path) -> None:
    """Every loss that it tells, of both starts, is that of an undisturbed run, and each is told once."""
    total = _STEPS[name]
    code, before = _run(name, tmp_path / "run", memory, evict_at=_EVICT_AT)
    assert code == EVICTED
    assert max(before) < total
    code, after = _run(name, tmp_path / "run", memory)
    assert code == FINISHED
    assert min(after) == max(before) + 10
    code, undisturbed = _run(name, tmp_path / "undisturbed", memory)
    assert code == FINISHED
    assert max(undisturbed) == total
    assert before | after == undisturbed
    if name == "lora":
        _check_base(tmp_path / "run")


def _check_base(run: Path) -> None:
    """The base was saved once and apart, and the shards are small."""
    (base,) = run.glob("frozen/*.safetensors")
    assert base.stat().st_size > 16 * MIB
    shards = list(run.glob("steps/*/rank-*.safetensors"))
    assert shards
    assert max(shard.stat().st_size for shard in shards) < MIB
