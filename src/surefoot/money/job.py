"""The work to do, and the timing of one checkpoint scheme on it. Values only; both engines read nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from surefoot.core.cadence import Cadence, next_start
from surefoot.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A training job and the nodes it wants."""

    work_s: float
    """Compute time of the whole job at full size, without a save or an interruption, in seconds."""
    state_bytes: float
    """Bytes of a checkpoint: all ranks together."""
    step_s: float
    """Seconds of an optimizer step at full size."""
    nodes: int
    gpus_per_node: int = 8
    min_nodes: int = 1
    """Fewer nodes cannot hold the state, or are not allowed."""
    world_sizes: tuple[int, ...] = ()
    """Allowed numbers of nodes; empty: every number from ``min_nodes`` to ``nodes``."""
    throughput: Mapping[int, float] = field(default_factory=dict)
    """Share of the full speed that n nodes reach, where it is not n ÷ ``nodes``."""

    def __post_init__(self) -> None:
        for name in ("work_s", "state_bytes", "step_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a positive number")
        if not 1 <= self.min_nodes <= self.nodes or self.gpus_per_node < 1:
            raise ConfigError(f"{self.min_nodes} to {self.nodes} nodes of {self.gpus_per_node} GPUs: not possible")
        if any(not 0 < share <= 1.5 for share in self.throughput.values()):
            raise ConfigError("throughput: give shares of the full speed, above 0 and at most 1.5")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def bytes_per_node(self) -> float:
        return self.state_bytes / self.nodes

    @property
    def bytes_per_gpu(self) -> float:
        return self.state_bytes / self.gpus

    def usable(self, present: int) -> int:
        """Nodes that can train when ``present`` are there; 0 when the job has to wait."""
        allowed = set(self.world_sizes) | {self.nodes} if self.world_sizes else range(self.min_nodes, self.nodes + 1)
        return max((n for n in allowed if self.min_nodes <= n <= present), default=0)

    def speed(self, usable: int) -> float:
        """Share of the full speed with ``usable`` nodes training."""
        return self.throughput.get(usable, usable / self.nodes) if usable else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """What one scheme costs on one job, in seconds. Source of each: a measurement, or bytes ÷ bandwidth.

    The clock of ``interval_s``, ``lag_s`` and ``hot_lag_s`` runs while the job trains (at reduced speed: slower).
    """

    interval_s: float
    """Compute between two durable saves."""
    stall_s: float
    """Training stands still for each durable save."""
    lag_s: float = 0.0
    """From the end of the stall until the save is durable. Training goes on meanwhile."""
    load_s: float = 0.0
    """Loading from the durable tier. An eviction during it starts it again."""
    restart_s: float = 0.0
    """From the loss (or the replacement's arrival) to the first new step, without loading. Nothing is evicted in it."""
    rejoin_s: float = 0.0
    """Standstill when a replacement joins a job that went on without it."""
    replacement_s: float = 0.0
    """From a node's loss to its replacement's arrival."""
    shrink: bool = False
    """Go on with fewer nodes while waiting."""
    standby: int = 0
    """Warm nodes that take a lost one's place at once."""
    hot_interval_s: float = 0.0
    """Compute between two images in memory. 0: no restore from memory."""
    hot_lag_s: float = 0.0
    """Age at which such an image outlives an unannounced loss (copied and shipped)."""
    hot_announced: bool = False
    """The eviction window is long enough for what must leave the node."""
    replica_survival: Callable[[int], float] | None = None
    """P(every image keeps a copy) when k nodes vanish together. None: no replicas."""

    def __post_init__(self) -> None:
        if not self.interval_s > 0:
            raise ConfigError(f"interval_s is {self.interval_s}: give a positive number of seconds")
        for name in ("stall_s", "lag_s", "load_s", "restart_s", "rejoin_s", "replacement_s", "hot_lag_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}: give seconds, 0 or more")

    @property
    def period_s(self) -> float:
        """From one durable save to the next: compute and stall."""
        return self.interval_s + self.stall_s

    def hot_shares(self, lost_nodes: int, announced: float) -> tuple[float, float]:
        """P(restored from memory) after a loss of ``lost_nodes``: thanks to the notice, thanks to a replica."""
        if self.hot_interval_s <= 0:
            return 0.0, 0.0
        by_notice = announced if self.hot_announced else 0.0
        survival = self.replica_survival(lost_nodes) if self.replica_survival else 0.0
        return by_notice, (1.0 - by_notice) * survival


def feasible_interval_s(wanted_s: float, stall_s: float, lag_s: float, state_bytes: float, cadence: Cadence) -> float:
    """Compute between two durable saves when ``wanted_s`` is asked for.

    The rule is the product's own (`surefoot.core.cadence.next_start`): no save starts before the last one ended, nor
    before its byte budget allows.
    """
    asked = Cadence(
        interval_s=wanted_s + stall_s,
        max_bytes_per_s=cadence.max_bytes_per_s,
        max_bytes_per_hour=cadence.max_bytes_per_hour,
    )
    return next_start(asked, 0.0, stall_s + lag_s, int(state_bytes)) - stall_s
