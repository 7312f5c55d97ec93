"""How much memory this process may use, on the host and on a device."""

from __future__ import annotations

from pathlib import Path

import attrs
import torch

__all__ = ["Memory", "measure", "process_limit"]


@attrs.frozen
class Memory:
    """Bytes: what the process may use on the host, and what is free on the device (0 on a CPU)."""

    process_limit: int
    device_free: int


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def process_limit(root: Path = Path("/")) -> int:
    """Bytes this process may use: the tightest control-group limit on its path, else the machine's memory.

    Reads control groups v2 and v1 and /proc/meminfo below `root`. Raises OSError when none is readable.
    """
    limits: list[int] = []
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        base, name = (
            (root / "sys/fs/cgroup", "memory.max")
            if controllers == ""
            else (root / "sys/fs/cgroup/memory", "memory.limit_in_bytes")
        )
        if controllers not in ("", "memory"):
            continue
        parts = [p for p in path.split("/") if p and p != ".."]
        folders = [base.joinpath(*parts[:i]) for i in range(len(parts) + 1)]
        limits += [n for n in (_number(f / name) for f in folders) if n]
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits:
        raise OSError(f"{root / 'proc/meminfo'} has no MemTotal line")
    return min(limits)


def measure(device: torch.device) -> Memory:
    """The host limit, and the free bytes of `device` (0 for the CPU, whose pools live in host memory)."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    return Memory(process_limit=process_limit(), device_free=free)
