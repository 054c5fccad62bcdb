"""`python -m surefoot.launch.torchrun ARGS`: runs torchrun, and ends with the script's own exit code.

torchrun itself ends with 1 however the script failed; the script's code stands in its record of the first failure.
"""

from __future__ import annotations

import os
import sys

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from surefoot.exits import leave

_SIGNALLED = 128


def main() -> int:
    # By default the rendezvous shares one store between rounds, which breaks restarts.
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
