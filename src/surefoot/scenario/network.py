"""Simulates machines: each is a network namespace with a name and an address of its own, joined by links that obey.

What runs on one sees another host name and another address than what runs on the next, and reaches the others over a
link that can be cut, healed and slowed. All of it lies in a network namespace that only this process and its children
are in (`isolate`), so that nothing of the machine's own network is touched, and everything is gone with the last
process. Needs `unshare` and `nsenter` (util-linux) and `ip` and `tc` (iproute2), and a kernel that allows it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from surefoot.errors import ConfigError, ResourceError

_INSIDE_VARIABLE = "SUREFOOT_SCENARIO_NETWORK"
_PROGRAMS = ("unshare", "nsenter", "ip", "tc")
_BRIDGE = "hub"
_HUB_ADDRESS = "10.77.0.254"
_MOST_HOSTS = 250
_TRY_WITHIN_S = 10.0
_BURST_BYTES = 64 * 1024
_QUEUE_MS = 100


def can_isolate() -> bool:
    """Whether this machine lets a process have a network of its own."""
    if any(shutil.which(program) is None for program in _PROGRAMS):
        return False
    probe = [*_unshare("--net", "--mount", "--uts"), "ip", "link", "add", "name", "probe", "type", "bridge"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=_TRY_WITHIN_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def isolate(command: Sequence[str]) -> None:
    """Become `command`, in network and mount namespaces of its own; returns if this process is in such already, or this
    machine does not allow it: `is_isolated` shows which."""
    if is_isolated() or not can_isolate():
        return
    environment = {**os.environ, _INSIDE_VARIABLE: "1"}
    sys.stdout.flush()
    os.execvpe("unshare", [*_unshare("--net", "--mount"), *command], environment)  # noqa: S606  a command line of ours


def is_isolated() -> bool:
    """Whether `isolate` made this process, or one that it descends from."""
    return os.environ.get(_INSIDE_VARIABLE) == "1"


@contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[None]:
    """A file system of that size at `place`, an existing directory. It is there for this process and its children
    only, hosts made later included, and gone with them.

    Raises:
        ConfigError: this process is not by itself.
    """
    if not is_isolated():
        raise ConfigError("a disk is mounted only in a mount namespace of one's own: call isolate() first")
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(place))
    try:
        yield
    finally:
        _run("umount", "--lazy", str(place))


def _unshare(*kinds: str) -> list[str]:
    # As root of a user namespace of its own, a user who is not root may do the same.
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    return ["unshare", *user, *kinds, "--"]


class Host:
    """One machine's end: a process that keeps its namespaces, and the link that leads to it."""

    def __init__(self, name: str, address: str, holder: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.address = address
        self._holder = holder

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs `command` on this machine; it becomes that command, so that its process is the command's."""
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--uts", "--mount", "--", *command]

    def cut(self) -> None:
        """The link is down: nothing arrives, and no side gets an error."""
        _run("ip", "link", "set", "dev", _link(self.name), "down")

    def heal(self) -> None:
        _run("ip", "link", "set", "dev", _link(self.name), "up")

    def limit(self, bytes_per_s: float) -> None:
        """Bound what the link carries, in each direction."""
        rate = f"{max(1, round(bytes_per_s * 8))}bit"
        shape = ("tbf", "rate", rate, "burst", str(_BURST_BYTES), "latency", f"{_QUEUE_MS}ms")
        _run("tc", "qdisc", "replace", "dev", _link(self.name), "root", *shape)
        _run(*self.command(["tc", "qdisc", "replace", "dev", "eth0", "root", *shape]))

    def unlimit(self) -> None:
        _run("tc", "qdisc", "del", "dev", _link(self.name), "root")
        _run(*self.command(["tc", "qdisc", "del", "dev", "eth0", "root"]))

    def close(self) -> None:
        # Both ends go; with the namespace alone they would some time later.
        subprocess.run(["ip", "link", "del", "dev", _link(self.name)], capture_output=True, check=False)
        self._holder.kill()
        self._holder.wait()


class Network:
    """Hosts around a bridge; this process itself is reached by all of them at `address`.

    Args:
        names: of the hosts, by which they reach each other.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self.hosts: dict[str, Host] = {}
        self._table = Path()

    @property
    def address(self) -> str:
        """This process's own."""
        return _HUB_ADDRESS

    def __enter__(self) -> Self:
        if not is_isolated():
            raise ConfigError("a network is made only in a network namespace of one's own: call isolate() first")
        if len(self._names) > _MOST_HOSTS:
            raise ConfigError(f"{len(self._names)} hosts: at most {_MOST_HOSTS} have an address")
        _run("ip", "link", "set", "dev", "lo", "up")
        _run("ip", "link", "add", "name", _BRIDGE, "type", "bridge")
        _run("ip", "address", "add", f"{_HUB_ADDRESS}/24", "dev", _BRIDGE)
        _run("ip", "link", "set", "dev", _BRIDGE, "up")
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(self._names, start=1)}
        self._table = _write_table(addresses)
        try:
            for name, address in addresses.items():
                self.hosts[name] = self._join(name, address)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _join(self, name: str, address: str) -> Host:
        host = Host(name, address, _start_holder(name, self._table))
        link = _link(name)
        _run("ip", "link", "add", "name", link, "type", "veth", "peer", "name", "eth0", "netns", str(host._holder.pid))
        _run("ip", "link", "set", "dev", link, "master", _BRIDGE)
        _run("ip", "link", "set", "dev", link, "up")
        _run(*host.command(["ip", "address", "add", f"{address}/24", "dev", "eth0"]))
        for device in ("lo", "eth0"):
            _run(*host.command(["ip", "link", "set", "dev", device, "up"]))
        return host

    def _close(self) -> None:
        for host in self.hosts.values():
            host.close()
        self.hosts.clear()
        self._table.unlink(missing_ok=True)
        subprocess.run(["ip", "link", "del", "dev", _BRIDGE], capture_output=True, check=False)


def _write_table(addresses: dict[str, str]) -> Path:
    """A table of host names, in place of the machine's own."""
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    handle, path = tempfile.mkstemp(prefix="surefoot-hosts-")
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
    os.chmod(path, 0o644)
    return Path(path)


def _start_holder(name: str, table: Path) -> subprocess.Popen[bytes]:
    """A process in namespaces of its own. It ends with us: it reads a pipe that the kernel closes when we are gone."""
    named = 'hostname "$0" 2>/dev/null || echo "$0" > /proc/sys/kernel/hostname'
    script = f'{named}; mount --bind "$1" /etc/hosts && echo here && read _'
    holder = subprocess.Popen(
        ["unshare", "--net", "--uts", "--mount", "--", "/bin/sh", "-c", script, name, str(table)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.readline() != b"here\n":
        holder.wait()
        raise ResourceError(f"no namespaces for {name}: {holder.stderr.read().decode(errors='replace').strip()}")
    return holder


def _link(name: str) -> str:
    # Names of interfaces have at most 15 characters.
    return f"to-{name}"[:15]


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ResourceError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}")
