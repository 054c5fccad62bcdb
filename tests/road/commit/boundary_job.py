"""Four steps in two epochs; the work between the epochs has a boundary of its own: RUN [DIES].

There is no public call for such a boundary: the session is told of it. With DIES the process is killed right after
it is committed.
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader

import surefoot
from surefoot.trainer.boundary.boundary import Save

total = torch.zeros(1)
best = torch.zeros(1)
loader = DataLoader(torch.arange(1.0, 5.0), batch_size=2)
with surefoot.Run(sys.argv[1], interval_s=600, total=total, best=best, loader=loader) as run:
    session = run._session
    assert session is not None
    print("starts", run.step, total.item(), best.item())
    for step, batch in run.batches(loader, 4):
        if step == 2 and not best:
            best += total
            session.cross(run.step, [Save("best", True, {})], last=False)
            if sys.argv[2:]:
                os.kill(os.getpid(), signal.SIGKILL)
        total += batch.sum()
        if step != 3:
            run.save(tag=f"t{step}", wait=True)
    print("ends", run.step, total.item(), best.item(), run.durable_step)
