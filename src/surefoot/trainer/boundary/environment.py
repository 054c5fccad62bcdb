"""Finds this trainer's rank, run and agent from arguments, process group and environment."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from dataclasses import dataclass, replace

import torch.distributed as dist

from surefoot.errors import UsageError
from surefoot.launch.config import AgentConfig, Options
from surefoot.launch.spawn import launch_key

AGENT_VARIABLE = "SUREFOOT_AGENT"
"""Socket of the agent that a supervisor has started."""


@dataclass(frozen=True, slots=True)
class Ranks:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def find_ranks() -> Ranks:
    """This process among the others.

    Raises:
        UsageError: there should be a process group and there is none yet.
    """
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = 0, 1
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                f"this is one of {os.environ['WORLD_SIZE']} processes, and there is no process group yet: call "
                "torch.distributed.init_process_group() before surefoot.Run"
            )
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Ranks(rank, world_size, int(os.environ.get("LOCAL_RANK", rank)), local_world_size)


def check_platform() -> None:
    if sys.platform != "linux":
        raise UsageError(f"surefoot runs on Linux only, this is {platform.system()}")


def own_agent_config(options: Options, world_size: int) -> AgentConfig:
    """Settings of an agent that a trainer starts itself, because there is no supervisor."""
    # Under torchrun and similar launchers the parent outlives a trainer and starts the next one: it is the launch.
    owner = os.getppid() if world_size > 1 or "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    config = AgentConfig.of(options, launch="", node=socket.gethostname(), owner_pid=owner)
    return replace(config, launch=hashlib.sha256(launch_key(owner, config.uri).encode()).hexdigest()[:16])
