"""Imports point down, and nothing is imported that the package does not declare."""

from __future__ import annotations

import ast
import sys

import pytest

from tests.packaging.workspace import NAMES, PACKAGES, Package, distribution, imports

MAY_IMPORT = {
    "hpc-index": set(),
    "hpc-kernels": set(),
    "hpc-qwen35": {"hpc-index", "hpc-kernels"},
    "hpc-server": {"hpc-index"},
    "hpc-cli": {"hpc-index", "hpc-kernels", "hpc-qwen35", "hpc-server"},
}
THIRD_PARTY = {
    "hpc-index": {"numpy", "attrs", "xxhash"},
    "hpc-kernels": {"torch", "triton"},
    "hpc-qwen35": {"torch", "numpy", "safetensors", "attrs"},
}
"""All that these may ever depend on (design §2)."""
NO_TORCH = ("hpc-index", "hpc-server", "hpc-cli")
DISTRIBUTION_OF = {"attr": "attrs"}
"""Import names that are not their distribution's name with `_` for `-`."""


def violations(package: Package, source: str) -> list[str]:
    """What a file of `package` with this source may not import, and why."""
    declared = {distribution(line) for line in package.requirements}
    found = []
    for imported in imports(ast.parse(source)):
        needed = DISTRIBUTION_OF.get(imported.top, imported.top.replace("_", "-"))
        if imported.top in sys.stdlib_module_names or imported.top == package.module:
            continue
        if needed in NAMES and needed not in MAY_IMPORT[package.name]:
            found.append(f"line {imported.line}: {package.name} may not import {needed}")
        elif needed not in declared:
            found.append(f"line {imported.line}: {package.name} does not declare {needed}")
    return found


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_imports_point_down_and_are_declared(package: Package) -> None:
    """Every import is the standard library, the package itself, or a declared layer or library below."""
    found = {str(path): violations(package, path.read_text("utf-8")) for path in package.files()}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_dependency_is_imported(package: Package) -> None:
    """A dependency that no file imports is dead weight, unless it is found by name or brought."""
    by_name = {"httptools", "uvloop"}  # uvicorn takes them when they are there
    brought = {
        "hpc-cli": {"hpc-index"},  # the command is how people get the index
        "hpc-kernels": {"triton"},  # torch's own pair, bounded here before the first kernel needs it (D28)
    }
    used = {
        DISTRIBUTION_OF.get(found.top, found.top.replace("_", "-"))
        for path in package.files()
        for found in imports(ast.parse(path.read_text("utf-8")))
    }
    assert {distribution(line) for line in package.requirements} - used - by_name - brought.get(
        package.name, set()
    ) == set()


@pytest.mark.parametrize("name", sorted(THIRD_PARTY))
def test_low_layers_depend_on_little(name: str) -> None:
    """The libraries that other engines embed stay within the few that the design names."""
    declared = {distribution(line) for line in Package(name).requirements}
    assert declared <= THIRD_PARTY[name] | MAY_IMPORT[name]


@pytest.mark.parametrize("name", NO_TORCH)
def test_no_torch_in_index_server_and_cli(name: str) -> None:
    """These three never import torch or triton themselves, not even inside a function."""
    found = [
        f"{path.name}:{imported.line}"
        for path in Package(name).files()
        for imported in imports(ast.parse(path.read_text("utf-8")))
        if imported.top in {"torch", "triton"}
    ]
    assert found == []


@pytest.mark.parametrize(
    ("name", "source", "complaint"),
    [
        ("hpc-index", "import hpc_server.app", "may not import hpc-server"),
        ("hpc-index", "def f():\n    import torch", "does not declare torch"),
        ("hpc-server", "from hpc_qwen35 import program", "may not import hpc-qwen35"),
        ("hpc-kernels", "from hpc_index.ids import LaneId", "may not import hpc-index"),
        ("hpc-qwen35", "if True:\n    import starlette.routing as r", "does not declare starlette"),
    ],
)
def test_a_violation_is_found(name: str, source: str, complaint: str) -> None:
    """The check itself sees imports at the top, in branches and in functions."""
    assert any(complaint in line for line in violations(Package(name), source))


def test_what_is_allowed_is_not_reported() -> None:
    """Declared libraries, the layer below, the package itself and the standard library pass."""
    source = "import ast\nimport numpy as np\nfrom hpc_index.ids import LaneId\nfrom hpc_server import app\n"
    assert violations(Package("hpc-server"), source) == []
