"""`python -m surefoot.launch.torchrun ARGS`: torchrun, ending with the script's own exit code.

torchrun itself ends with 1 whatever the script ended with; its record of the first failure knows better.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from surefoot.exits import leave

_SIGNALLED = 128


def main() -> int:
    # The rendezvous shares one store between rounds unless told not to, which breaks restarts.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun.run(torchrun.parse_args(sys.argv[1:]))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        _rank, failure = error.get_first_failure()
        code = failure.exitcode
        return code if code > 0 else _SIGNALLED - code
    return 0


if __name__ == "__main__":
    # An eviction waits for this, and the interpreter's own end takes a second or two with torch in it.
    leave(main())
