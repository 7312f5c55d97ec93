"""The memory this process may use."""

from pathlib import Path

import pytest

from hpc_qwen35.memory import process_limit


def machine(root: Path, kib: int, group: str = "") -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal:       {kib} kB\nMemFree: 1 kB\n")
    (root / "proc/self/cgroup").write_text(group)
    return root


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    """MemTotal is the limit when no control group sets one."""
    assert process_limit(machine(tmp_path, 1000)) == 1_024_000


def test_the_tightest_group_on_the_path_counts(tmp_path: Path) -> None:
    """A parent group's limit binds as well as the process's own; "max" means none."""
    root = machine(tmp_path, 1 << 30, "0::/a/b\n")
    (root / "sys/fs/cgroup/a/b").mkdir(parents=True)
    (root / "sys/fs/cgroup/a/memory.max").write_text("5000\n")
    (root / "sys/fs/cgroup/a/b/memory.max").write_text("max\n")
    assert process_limit(root) == 5000


def test_a_version_one_group_counts(tmp_path: Path) -> None:
    """Control groups v1 name the memory controller and another file."""
    root = machine(tmp_path, 1 << 30, "5:cpu:/x\n4:memory:/docker/c\n")
    (root / "sys/fs/cgroup/memory/docker/c").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory/docker/c/memory.limit_in_bytes").write_text("7000\n")
    assert process_limit(root) == 7000


def test_an_unreadable_machine_is_an_error(tmp_path: Path) -> None:
    """No guess is made where nothing can be read."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("nonsense\n")
    with pytest.raises(OSError, match="no MemTotal"):
        process_limit(tmp_path)
