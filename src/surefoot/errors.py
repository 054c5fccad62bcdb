"""Every error that Surefoot raises on purpose, in one tree.

    SurefootError
    ├── ConfigError               an argument, option or environment that cannot work (ValueError)
    │   └── UnsupportedStateError a registered value that cannot be checkpointed, named by its path
    ├── UsageError                a call in a place or order that cannot work (RuntimeError)
    ├── ResourceError             not enough memory, disk or descriptors; names need, have and remedy
    ├── AgentError                the node agent cannot be started or reached (ConnectionError)
    │   ├── RunBusyError          another launch holds this run on this machine
    │   └── WireError             a frame that breaks the wire protocol
    ├── TierError                 a tier answered with a fault, which must not be taken for "absent" (OSError)
    │   ├── ObjectMissingError    the tier answered, and the object is not there (FileNotFoundError)
    │   ├── ObjectExistsError     put_if_absent lost: the key is taken (FileExistsError)
    │   ├── TierFullError         no space or quota left on the tier
    │   └── TierDeniedError       the tier refused the credentials or the permission (PermissionError)
    ├── CorruptError              bytes that do not match their hash, or a document that breaks the format
    ├── SupersededError           a newer generation of another launch owns the run
    └── RestoreError              the run has history, but nothing that can be restored

``surefoot.Evicted`` (see `surefoot.exits`) is not an error, but a ``SystemExit``.

Messages are lower case, name the value and the place, and end with what to do where something can be done.
"""

from __future__ import annotations


class SurefootError(Exception):
    """Base of every error that Surefoot raises on purpose."""


class ConfigError(SurefootError, ValueError):
    """An argument, option or environment variable that cannot work."""


class UnsupportedStateError(ConfigError):
    """A registered value that cannot be checkpointed; the message names its path."""


class UsageError(SurefootError, RuntimeError):
    """A call in a place or order that cannot work."""


class ResourceError(SurefootError):
    """Not enough memory, disk or descriptors; the message names need, have and remedy."""


class AgentError(SurefootError, ConnectionError):
    """The node agent cannot be started or reached."""


class RunBusyError(AgentError):
    """Another launch holds this run on this machine."""


class WireError(AgentError):
    """A frame that breaks the wire protocol."""


class TierError(SurefootError, OSError):
    """A tier answered with a fault, which must never be taken for "absent"."""


class ObjectMissingError(TierError, FileNotFoundError):
    """The tier answered, and the object is not there."""


class ObjectExistsError(TierError, FileExistsError):
    """`put_if_absent` lost: the key is taken."""


class TierFullError(TierError):
    """No space or quota left on the tier."""


class TierDeniedError(TierError, PermissionError):
    """The tier refused the credentials or the permission."""


class CorruptError(SurefootError):
    """Bytes that do not match their hash, or a document that breaks the format."""


class FormatError(CorruptError):
    """A document of another format version."""


class SupersededError(SurefootError):
    """A newer generation of another launch owns the run: this one must stop writing and training."""


class RestoreError(SurefootError):
    """The run has history, but nothing that can be restored."""
