"""Training scripts whose ranks do not come to a save together. `uneven_scenes.py NAME OPTIONS`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import surefoot

RANK = int(os.environ.get("RANK", "0"))


def uneven(to: str, total: int, at: int, calls: list[int], go: str | None = None, late: int = -1) -> None:
    """All but `late` are at the end of the step long before it is.

    Args:
        to: the run.
        total: steps.
        at: the step in which something is saved.
        calls: ranks that call save().
        go: file for which the late rank waits.
        late: that rank.
    """
    dist.init_process_group("gloo")
    w = torch.zeros(1000)
    try:
        with surefoot.Run(to, w=w) as run:
            for step in run.steps(total):
                dist.barrier()
                w += 1
                while step == at and late == RANK and go is not None and not Path(go).exists():
                    time.sleep(0.01)
                if step == at and RANK in calls:
                    run.save("named", wait=True)
    except surefoot.errors.UsageError as error:
        os.write(1, (json.dumps(["told", RANK, str(error)]) + "\n").encode())
        sys.exit(9)
    os.write(1, (json.dumps(["ends", RANK, run.step, run.durable_step]) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    globals()[sys.argv[1]](**json.loads(sys.argv[2]))
