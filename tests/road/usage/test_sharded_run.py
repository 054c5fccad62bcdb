"""Sharded state through a real run: evicted, resumed, and opened by others' programs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stage import Stage

SCENES = Path(__file__).with_name("sharded_scenes.py")
READER = Path(__file__).parents[2] / "trainer" / "stock_reader.py"
_OF_EACH_RANK = (".step", "running_mean", "running_var", "num_batches_tracked")


def _play(stage: Stage, code: int = 0, ranks: int = 2, scene: str = "train", **options: object) -> list[str]:
    job = stage.start(scene, ranks=ranks, scenes=SCENES, **options)
    assert job.wait() == code, job.output
    return sorted(line for line in job.output.splitlines() if line.startswith("["))


@pytest.mark.soak
def test_a_sharded_run_goes_on_to_the_same_bits(stage: Stage) -> None:
    """Evicted after the third step and resumed: every rank ends with the bits of the run that nobody disturbed."""
    straight = _play(stage, to=str(stage.place / "other"), total=6)
    assert [line[:7] for line in straight] == ["[0, 6, ", "[1, 6, "]
    _play(stage, code=75, total=6, evict_at=2)
    stage.until_quiet()
    assert _play(stage, total=6) == straight


def test_sharded_frozen_tensors(stage: Stage) -> None:
    """Each rank's part of a frozen layer is one file, no shard has it, and a start with another one gets it back."""
    straight = _play(stage, scene="adapt", to=str(stage.place / "other"), total=5)
    first = _play(stage, scene="adapt", total=3)
    assert first != straight
    stage.until_quiet()
    frozen = [load_file(path) for path in stage.run.glob("frozen/*.safetensors")]
    assert sorted(parts["model.0.weight"].shape[0] for parts in frozen) == [2200, 2201]
    shards = [load_file(path) for path in stage.run.glob("steps/00000003-*/*.safetensors")]
    names = {name for shard in shards for name in shard}
    assert "model.2.weight" in {name.split("@")[0] for name in names}
    assert not [name for name in names if name.startswith("model.0")]
    assert _play(stage, scene="adapt", total=5, seed=9) == straight
    (loaded,) = (event for event in stage.history() if event["event"] == "frozen_loaded")
    assert loaded["tier"] == "disk"


def test_frozen_tensors_of_two_nodes(stage: Stage) -> None:
    """Each node saves its own ranks' parts, and gives its own ranks what they have made otherwise."""
    straight = _play(stage, scene="adapt", to=str(stage.place / "other"), total=5)
    stage.play_nodes("adapt", 2, scenes=SCENES, total=3)
    stage.until_quiet()
    assert len(list(stage.run.glob("frozen/*.safetensors"))) == 2
    assert [event["trigger"] for event in stage.history() if event["event"] == "committed"][-1] == "final"
    outputs = stage.play_nodes("adapt", 2, scenes=SCENES, total=5, seed=9)
    assert sorted(line for output in outputs for line in output.splitlines() if line.startswith("[")) == straight
    assert len([event for event in stage.history() if event["event"] == "frozen_loaded"]) == 2


def _read(shards: Path, truth: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(READER), str(shards), str(truth)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.holds("stock-readers")
def test_stock_programs_open_a_committed_step(stage: Stage) -> None:
    """No lock-in: where Surefoot cannot be imported, stock PyTorch and safetensors find in two sharded ranks' files
    every tensor of the training of one plain process, the optimizer's too."""
    _play(stage, total=3)
    (shards,) = stage.run.glob("steps/00000003-*")
    _play(stage, ranks=1, scene="alone", to=str(stage.place / "alone.safetensors"))
    alone = load_file(stage.place / "alone.safetensors")
    # What each rank keeps for itself is there once a rank, under a name that says so.
    own = {name for name in alone if name.endswith(_OF_EACH_RANK)}
    truth = {name: tensor for name, tensor in alone.items() if name not in own}
    truth |= {f"{name}@rank{rank:05d}": alone[name].clone() for name in own for rank in range(2)}
    assert sum(".state." in name for name in truth) > 20
    save_file(truth, stage.place / "truth.safetensors")
    done = _read(shards, stage.place / "truth.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(truth)} tensors\n"

    # The comparison can fail: one bit of one moment.
    name = "optimizer.state.model.words.weight.exp_avg"
    truth[name].view(torch.uint8).view(-1)[5] ^= 1
    save_file(truth, stage.place / "other.safetensors")
    assert f"stock reader: {name} differs" in _read(shards, stage.place / "other.safetensors").stderr
