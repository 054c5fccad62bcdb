"""Read a directory of shards with what PyTorch and safetensors bring, and compare with the truth. No Surefoot.

    python -I stock_reader.py SHARDS TRUTH

TRUTH is a .safetensors file of whole tensors by the names that they have in the shards.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any


class _Nowhere(MetaPathFinder):
    """Surefoot cannot be imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] == "surefoot":
            raise ModuleNotFoundError(f"no module named {fullname!r} here", name=fullname)


def main(shards: Path, truth_file: Path) -> None:
    sys.meta_path.insert(0, _Nowhere())
    assert not [name for name in sys.modules if name.partition(".")[0] == "surefoot"]
    try:
        import surefoot  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        raise AssertionError("surefoot could be imported")

    import safetensors
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    truth = load_file(truth_file)
    loaded = {name: torch.full_like(tensor, 77) for name, tensor in truth.items()}
    dcp.load(loaded, storage_reader=HuggingFaceStorageReader(str(shards)), no_dist=True)
    for name, tensor in truth.items():
        same = torch.equal(loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert same, f"stock reader: {name} differs"

    pieces: dict[str, int] = {}
    for file in sorted(shards.glob("*.safetensors")):
        with safetensors.safe_open(file, framework="pt") as opened:
            import json

            places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                block, offset = opened.get_tensor(name), places[name]["saved_offsets"]
                there = truth[name]
                for axis, (start, length) in enumerate(zip(offset, block.shape, strict=True)):
                    there = there.narrow(axis, start, length)
                assert torch.equal(block, there), f"safetensors: {name} of {file.name} differs"
                pieces[name] = pieces.get(name, 0) + block.numel()
    assert pieces == {name: tensor.numel() for name, tensor in truth.items()}, "safetensors: not every element is there"
    print(len(truth), "tensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
