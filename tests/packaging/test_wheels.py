"""The built wheels, in an environment that holds nothing else.

The editable workspace hides what a wheel lacks: data files, a sibling's version range, a dependency that
another package brought. These tests build environments, so they are marked slow; `.ci/run` runs them.
"""

from __future__ import annotations

import os
import subprocess
import tarfile
import zipfile
from pathlib import Path

import attrs
import pytest

from tests.packaging.workspace import PACKAGES, ROOT

pytestmark = pytest.mark.slow

LARGEST_WHEEL = 16 << 20


def uv(*arguments: str | Path) -> str:
    """Run uv at the root and give what it printed."""
    done = subprocess.run(
        ["uv", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        env={name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@attrs.frozen
class Environment:
    """A virtual environment made for these tests."""

    folder: Path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120)

    def install(self, constraints: Path, *requirements: str) -> None:
        python = self.folder / "bin" / "python"
        # Symlinks into uv's cache: torch alone has gigabytes to copy.
        uv("pip", "install", "--python", python, "--link-mode", "symlink", "-c", constraints, *requirements)
        uv("pip", "check", "--python", python)  # the one place where sibling ranges are compared


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--all-packages", "--no-sources", "--quiet", "--out-dir", folder)
    return folder


@pytest.fixture(scope="module")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions, so that a release of today does not decide about our change."""
    path = tmp_path_factory.mktemp("lock") / "constraints.txt"
    uv("export", "--locked", "--all-packages", "--no-emit-workspace", "--no-hashes", "--quiet", "-o", path)
    return path


def environment(folder: Path) -> Environment:
    uv("venv", "--quiet", folder)
    return Environment(folder)


def wheels(dist: Path) -> dict[str, Path]:
    return {path.name.partition("-")[0]: path for path in dist.glob("*.whl")}


def test_one_wheel_and_one_sdist_each(dist: Path) -> None:
    """Every package gives both, and no others."""
    expected = {package.module for package in PACKAGES}
    assert set(wheels(dist)) == expected
    assert {path.name.partition("-")[0] for path in dist.glob("*.tar.gz")} == expected


def test_wheels_are_complete_and_small(dist: Path) -> None:
    """Each holds its marker, licence and every file of its source folder, and none is a burden to fetch."""
    for package in PACKAGES:
        path = wheels(dist)[package.module]
        names = set(zipfile.ZipFile(path).namelist())
        source = package.source.parent
        files = {
            str(file.relative_to(source))
            for file in package.source.rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        }
        assert files <= names
        assert any(name.endswith("/licenses/LICENSE") for name in names)
        assert path.stat().st_size <= LARGEST_WHEEL


def test_sdists_hold_no_tests_or_caches(dist: Path) -> None:
    """A source archive is the package's own folder and nothing of the workspace around it."""
    for path in dist.glob("*.tar.gz"):
        with tarfile.open(path) as archive:
            names = archive.getnames()
        assert not [name for name in names if "__pycache__" in name or "/tests/" in name or ".venv" in name]


def test_the_command_installs_without_torch(dist: Path, constraints: Path, tmp_path: Path) -> None:
    """`pip install hpc-cli` brings no model and no server, and says how to get them."""
    made = environment(tmp_path / "base")
    built = wheels(dist)
    made.install(constraints, str(built["hpc_index"]), str(built["hpc_cli"]))
    assert made.run("python", "-c", "import torch").returncode != 0
    version = made.run("hpc", "--version")
    assert version.returncode == 0, version.stderr
    assert PACKAGES[0].project["version"] in version.stdout
    refused = made.run("hpc", "serve")
    assert refused.returncode == 1
    assert "hpc-cli[serve]" in refused.stderr


def test_the_whole_installs_and_finds_its_model(dist: Path, constraints: Path, tmp_path: Path) -> None:
    """All five wheels with the serving extra import from their installed places, bundled model included."""
    made = environment(tmp_path / "whole")
    built = wheels(dist)
    rest = [str(path) for name, path in built.items() if name != "hpc_cli"]
    made.install(constraints, f"hpc-cli[serve] @ {built['hpc_cli'].as_uri()}", *rest)
    script = (
        "import hpc_cli.compose, hpc_cli.model, hpc_cli.scripted\n"
        "from hpc_qwen35.bundled import tiny_folder\n"
        "print(sorted(path.name for path in tiny_folder().iterdir()))\n"
    )
    found = made.run("python", "-c", script)
    assert found.returncode == 0, found.stderr
    assert "config.json" in found.stdout
    assert "tokenizer.json" in found.stdout
