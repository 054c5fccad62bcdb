"""A training script that is over in a moment, or goes on until it is ended: TOTAL LOGFILE [TO]."""

import sys
import time

import torch

import surefoot

total, log_path = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())
notes = {"seen": [1, 2], "name": "small"}
with open(log_path, "a", buffering=1) as log:
    with surefoot.Run(*sys.argv[3:], model=model, optimizer=optimizer, notes=notes) as run:
        for step in run.steps(total):
            optimizer.zero_grad()
            model(torch.ones(16)).sum().backward()
            optimizer.step()
            if step == 2:
                run.save(tag="best", wait=True, metrics={"loss": 0.25})
            log.write(f"{step}\n")
            if total > 100:
                time.sleep(0.02)
