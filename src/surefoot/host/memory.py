"""Finds out how much memory this process may still use: the machine's, or its control group's if that is less."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 1 << 60
_GROUP_FILES = (
    # Control groups v2, then v1; both paths as a container sees its own group.
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Bytes that can still be used: MemAvailable of /proc/meminfo, bounded by the control group's limit."""
    return min(_machine_bytes(), *(_group_bytes(*files) for files in _GROUP_FILES))


def _machine_bytes() -> int:
    return _meminfo("MemAvailable")


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return _UNLIMITED


def _group_bytes(limit_file: str, usage_file: str) -> int:
    limit, usage = _number(limit_file), _number(usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return _UNLIMITED
    return max(0, limit - usage)


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
