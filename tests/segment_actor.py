"""A process that the segment's tests start, and kill: it creates a segment or writes one, as told.

segment_actor.py create DIRECTORY NAME    create a segment, print what became of it, wait
segment_actor.py die DIRECTORY WHERE      seal step 1, open slot 1 for step 2 and stop at WHERE, print, wait
segment_actor.py cycle PATH CARE          begin, fill and seal as fast as can be, until killed
"""

from __future__ import annotations

import fcntl
import itertools
import json
import resource
import sys
from pathlib import Path

from surefoot.core.layout import BoundaryId
from surefoot.core.plan import Leaf, Plan, Report, make_plan
from surefoot.errors import SurefootError
from surefoot.ipc.segment import Segment, create_segment, open_segment_file

RUN = "0123456789abcdef"
IMAGE_DATA_BYTES = 200_000


def plan_of(size_bytes: int = IMAGE_DATA_BYTES) -> Plan:
    return make_plan([Report((Leaf("w", "uint8", (size_bytes,), "replicated"),), "[]")])


def make(directory: Path, name: str = "r0.seg", *, num_slots: int = 2, size_bytes: int = IMAGE_DATA_BYTES) -> Segment:
    plan = plan_of(size_bytes)
    return create_segment(
        directory,
        name,
        run=RUN,
        rank=0,
        plan=plan,
        image=plan.image(0),
        num_slots=num_slots,
        record_capacity=1000,
    )


def fill(segment: Segment, slot: int, step: int) -> None:
    """Tensor bytes that tell their step, in an image whose header is there already."""
    ((_box, start),) = segment.plan().image(segment.rank).places
    image = segment.image(slot)
    image[start:] = bytes([step % 251]) * (len(image) - start)


def record_of(step: int) -> bytes:
    return json.dumps({"step": step, "world_size": 1}).encode()


def put(segment: Segment, slot: int, step: int) -> int:
    """A whole staging of `step`."""
    segment.begin(slot)
    fill(segment, slot, step)
    return segment.seal(slot, BoundaryId(step, 1), record_of(step), durable=step % 2 == 0, staged_ns=step * 1000)


def _wait(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)
    sys.stdin.read()


def _create(directory: str, name: str, size_bytes: int, limit_bytes: int) -> None:
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    try:
        segment = make(Path(directory), name, size_bytes=size_bytes)
    except (SurefootError, OSError) as error:
        _wait(
            {
                "error": type(error).__name__,
                "text": str(error),
                "left": sorted(p.name for p in Path(directory).iterdir()),
            }
        )
        return
    put(segment, 0, 5)
    seals = fcntl.fcntl(segment.fd, fcntl.F_GET_SEALS) if segment.path is None else None
    _wait(
        {
            "path": segment.path and str(segment.path),
            "fd": segment.fd,
            "seals": seals,
            "left": sorted(p.name for p in Path(directory).iterdir()),
        }
    )


def _die(directory: str, where: str) -> None:
    segment = make(Path(directory))
    put(segment, 0, 1)
    put(segment, 1, 0)
    segment.begin(1)
    if where != "begin":
        fill(segment, 1, 2)
    if where == "seal":
        segment.seal(1, BoundaryId(2, 1), record_of(2), durable=True, staged_ns=2000)
    _wait({"path": str(segment.path)})


def _cycle(path: str, care: str) -> None:
    segment = open_segment_file(Path(path))
    ((_box, start),) = segment.plan().image(0).places
    images = [segment.image(slot)[start:] for slot in range(segment.num_slots)]
    for step in itertools.count(1):
        slot = step % segment.num_slots
        segment.begin(slot)
        if care == "careless":
            # A writer that closes the slot before it is filled: what the reader's check must catch.
            segment.seal(slot, BoundaryId(step, 1), record_of(step), durable=False, staged_ns=step)
        images[slot][:] = bytes([step % 251]) * len(images[slot])
        if care == "careful":
            segment.seal(slot, BoundaryId(step, 1), record_of(step), durable=False, staged_ns=step)


if __name__ == "__main__":
    action, *arguments = sys.argv[1:]
    if action == "create":
        _create(arguments[0], arguments[1], int(arguments[2]), int(arguments[3]))
    elif action == "die":
        _die(*arguments)
    else:
        _cycle(*arguments)
