"""Two machines, of which one sends and one receives."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

from surefoot.scenario.network import Host, Network, isolate

_PORT = 5001
_LIMIT_BYTES_PER_S = 2_000_000
_SIZE_BYTES = 6_000_000
_NAME = "import socket; n = socket.gethostname(); print(n, socket.gethostbyname(n))"
_RECEIVE = f"""
import socket, sys
listener = socket.create_server(("a", {_PORT}))
print("ready", flush=True)
while True:
    connection, _ = listener.accept()
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    print(data.hex() if len(data) < 100 else len(data), flush=True)
"""
_SEND = f"""
import socket, sys
size = int(sys.argv[2])
with socket.create_connection(("a", {_PORT}), timeout=60) as connection:
    connection.sendall(bytes(size) if size else sys.argv[1].encode())
"""


def _python(host: Host, code: str, *arguments: object) -> list[str]:
    return host.command([sys.executable, "-c", code, *map(str, arguments)])


def main() -> None:
    with Network(["a", "b"]) as network:
        a, b = network.hosts["a"], network.hosts["b"]
        names = [subprocess.check_output(_python(host, _NAME), text=True).split() for host in (a, b)]
        receiver = subprocess.Popen(_python(a, _RECEIVE), stdout=subprocess.PIPE, text=True)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        subprocess.run(_python(b, _SEND, "before", 0), check=True)
        arrived: list[str | None] = [receiver.stdout.readline().strip()]
        b.cut()
        sender = subprocess.Popen(_python(b, _SEND, "cut", 0))
        # Nothing can be waited for here: that it does not arrive is seen by that it arrives after the healing only.
        time.sleep(1.0)
        arrived.append(None if sender.poll() is None else "ended")
        b.heal()
        sender.wait()
        arrived.append(receiver.stdout.readline().strip())
        b.limit(_LIMIT_BYTES_PER_S)
        begun_s = time.monotonic()
        subprocess.run(_python(b, _SEND, "", _SIZE_BYTES), check=True)
        received_bytes = int(receiver.stdout.readline())
        took_s = time.monotonic() - begun_s
        b.unlimit()
        receiver.kill()
        receiver.wait()
    told = {
        "names": names,
        "arrived": arrived,
        "limit_bytes_per_s": _LIMIT_BYTES_PER_S,
        "slow_bytes_per_s": received_bytes / took_s,
        "left": [name for _, name in socket.if_nameindex() if name != "lo"],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    isolate([sys.executable, *sys.argv])
    main()
