"""Settings: the options of a run that a user decides, and those with which a node agent is started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from numbers import Real
from typing import Any

from surefoot.core.cadence import Cadence
from surefoot.core.documents import compact
from surefoot.errors import ConfigError

DEFAULT_GRACE_S = 30.0
MIN_SLOTS = 2
DEFAULT_SLOTS = 3
"""Two slots that the strict fence needs, and one that an upload pins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options by which a user decides how a run is saved.

    Names and units are the same in Python (`interval_s=60`), on the command line (`--interval-s 60`) and in the
    environment (`SUREFOOT_INTERVAL_S=60`). An argument wins over the environment, the environment over the default.
    """

    to: str | None = None
    """The run: a bucket prefix or a directory. A directory is absolute from here on."""
    disk: tuple[str, ...] = ()
    """Directories on local drives that hold copies. In the environment separated like PATH."""
    interval_s: float | None = None
    """Seconds between durable saves. None: continuous if saves are quick, else 300."""
    max_bytes_per_s: float | None = None
    """Bound on an upload's bandwidth. None: unbounded."""
    grace_s: float = DEFAULT_GRACE_S
    """Window of a notice that names none, such as a bare SIGTERM."""
    watch: str | None = None
    """A file whose appearance is a notice."""
    resume: str = "auto"
    """`auto`: newest good checkpoint, else scratch; `must`: refuse to start from scratch; `never`: from scratch."""

    def __post_init__(self) -> None:
        for name in ("interval_s", "max_bytes_per_s", "grace_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, Real)):
                raise ConfigError(f"{name} is {value!r}: give a number")
        if not self.grace_s > 0:
            raise ConfigError(f"grace_s is {self.grace_s}: give the seconds between a notice and the end")
        if self.resume not in ("auto", "must", "never"):
            raise ConfigError(f"resume is {self.resume!r}: give auto, must or never")
        # Raises where a value is out of range.
        _ = self.cadence

    @property
    def cadence(self) -> Cadence:
        return Cadence(interval_s=self.interval_s, max_bytes_per_s=self.max_bytes_per_s)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Each option from its variable if that is set, the others by default.

        Raises:
            ConfigError: the text of a variable is not a value of its option.
        """
        found: dict[str, Any] = {}
        for name in OPTION_NAMES:
            text = environment.get(_variable(name))
            if not text:
                continue
            try:
                found[name] = _READERS.get(name, str)(text)
            except ValueError as error:
                raise ConfigError(f"{_variable(name)} is {text!r}: give a number") from error
        return cls(**found)

    def to_environment(self) -> dict[str, str]:
        """Variables from which `from_environment` makes the same options; an empty value means the default."""
        return {
            _variable(name): "" if value is None else os.pathsep.join(value) if name == "disk" else str(value)
            for name, value in ((name, getattr(self, name)) for name in OPTION_NAMES)
        }

    def given(self, **options: Any) -> Options:
        """These options, where arguments that are not None replace the environment's and the defaults."""
        chosen = {name: value for name, value in options.items() if value is not None}
        if chosen.get("to") is not None:
            chosen["to"] = _absolute(os.fspath(chosen["to"]))
        if "disk" in chosen:
            paths = [chosen["disk"]] if isinstance(chosen["disk"], str | os.PathLike) else chosen["disk"]
            chosen["disk"] = tuple(os.path.abspath(os.fspath(path)) for path in paths)
        return replace(self, **chosen)

    def decided(self, **options: Any) -> Options:
        """These options, which `surefoot run` decides; the script may repeat them.

        Raises:
            ConfigError: an argument of the script's that is not None differs.
        """
        mine = self.given(**options)
        for name in OPTION_NAMES:
            theirs, value = getattr(self, name), getattr(mine, name)
            if theirs != value:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"the script gives surefoot.Run {name}={value!r}; `surefoot run`, which decides, has {theirs!r}: "
                    f"give {flag} there, and leave {name} out of the script or give the same"
                )
        return self


OPTION_NAMES = tuple(each.name for each in fields(Options))
_READERS: dict[str, Any] = {
    "interval_s": float,
    "max_bytes_per_s": float,
    "grace_s": float,
    "to": lambda text: _absolute(text),
    "disk": lambda text: tuple(os.path.abspath(path) for path in text.split(os.pathsep)),
}


def _variable(option: str) -> str:
    return f"SUREFOOT_{option.upper()}"


def _absolute(place: str) -> str:
    return place if "://" in place else os.path.abspath(place)


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentConfig:
    """Settings of one agent. Travels as JSON; holds no secret."""

    uri: str
    """The run: a bucket prefix or a directory."""
    launch: str
    """Identity of this launch; restarts of trainers and of the agent inside it share it."""
    node: str
    """Name of this machine in records and events."""
    disks: tuple[str, ...] = ()
    """Directories on local drives that hold copies."""
    supervised: bool = False
    """A supervisor will connect, and its end is the launch's end."""
    owner_pid: int = 0
    """The process whose end is the launch's end: the supervisor, or the trainer or its launcher. 0: no process."""
    grace_s: float = DEFAULT_GRACE_S
    """Window of a notice that names none, such as a bare SIGTERM."""
    watch: str | None = None
    """A file whose appearance is a notice."""
    note: str | None = None
    """File by which processes of one launch find the agent; removed with the agent."""
    num_slots: int = DEFAULT_SLOTS
    resume: str = "auto"
    """`auto`: newest good checkpoint, else scratch; `must`: refuse to start from scratch; `never`: from scratch."""
    cadence: Cadence = field(default_factory=Cadence)

    def __post_init__(self) -> None:
        if self.num_slots < MIN_SLOTS:
            raise ConfigError(f"num_slots is {self.num_slots}: at least {MIN_SLOTS} are needed")

    @classmethod
    def of(cls, options: Options, **others: Any) -> AgentConfig:
        """Settings of an agent that saves a run as the user decided.

        Raises:
            ConfigError: the user has not named the run's place.
        """
        if not options.to:
            raise ConfigError(
                "no place for the run: give surefoot.Run a bucket or directory, or `surefoot run --to PLACE`"
            )
        return cls(
            uri=options.to,
            disks=options.disk,
            cadence=options.cadence,
            grace_s=options.grace_s,
            watch=options.watch,
            resume=options.resume,
            **others,
        )

    def to_json(self) -> str:
        return compact(asdict(self)).decode("ascii")

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        data = json.loads(text)
        return cls(**{**data, "disks": tuple(data["disks"]), "cadence": Cadence(**data["cadence"])})
