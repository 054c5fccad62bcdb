"""What a node agent is told when it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from surefoot.core.cadence import Cadence
from surefoot.core.documents import compact
from surefoot.errors import ConfigError

DEFAULT_GRACE_S = 30.0
MIN_SLOTS = 2
DEFAULT_SLOTS = 3
"""Two that the strict fence needs, and one that an upload pins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Settings of one agent. Travels as JSON; holds no secret."""

    uri: str
    """The run: a bucket prefix or a directory."""
    launch: str
    """Identity of this launch; restarts of workers and of the agent inside it share it."""
    node: str
    """Name of this machine in records and events."""
    disks: tuple[str, ...] = ()
    """Directories on local drives that hold copies."""
    supervised: bool = False
    """A supervisor will connect, and its end is the launch's end."""
    owner_pid: int = 0
    """The process whose end is the launch's end: the supervisor, or the trainer or its launcher. 0: nobody."""
    grace_s: float = DEFAULT_GRACE_S
    """Window of a notice that names none, such as a bare SIGTERM."""
    watch: str | None = None
    """A file whose appearance is a notice."""
    note: str | None = None
    """File by which processes of one launch find the agent; removed with it."""
    num_slots: int = DEFAULT_SLOTS
    resume: str = "auto"
    """`auto`: newest good checkpoint, else scratch; `must`: refuse to start from scratch; `never`: from scratch."""
    cadence: Cadence = field(default_factory=Cadence)

    def __post_init__(self) -> None:
        if not self.grace_s > 0:
            raise ConfigError(f"grace_s is {self.grace_s}: give the seconds between a notice and the end")
        if self.num_slots < MIN_SLOTS:
            raise ConfigError(f"num_slots is {self.num_slots}: at least {MIN_SLOTS} are needed")
        if self.resume not in ("auto", "must", "never"):
            raise ConfigError(f"resume is {self.resume!r}: give auto, must or never")

    def to_json(self) -> str:
        return compact(asdict(self)).decode("ascii")

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        data = json.loads(text)
        return cls(**{**data, "disks": tuple(data["disks"]), "cadence": Cadence(**data["cadence"])})
