"""What the packaging tests read: each package's pyproject, sources and imports."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
NAMES = ("hpc-index", "hpc-kernels", "hpc-qwen35", "hpc-server", "hpc-cli")


@attrs.frozen
class Import:
    """One imported module and where. nested: inside a function, so it runs only when that does."""

    module: str
    line: int
    nested: bool

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


@attrs.frozen
class Package:
    name: str

    @property
    def folder(self) -> Path:
        return ROOT / "packages" / self.name

    @property
    def module(self) -> str:
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.module

    @property
    def project(self) -> dict[str, Any]:
        with (self.folder / "pyproject.toml").open("rb") as file:
            project: dict[str, Any] = tomllib.load(file)["project"]
        return project

    @property
    def base_requirements(self) -> list[str]:
        return list(self.project["dependencies"])

    @property
    def requirements(self) -> list[str]:
        extras = self.project.get("optional-dependencies", {})
        return [*self.base_requirements, *(line for lines in extras.values() for line in lines)]

    def files(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))


PACKAGES = tuple(Package(name) for name in NAMES)


def distribution(requirement: str) -> str:
    """The normalised name in a requirement such as `httptools>=0.6; python_version < "3.13"`."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if match is None:
        raise ValueError(f"{requirement!r} names no distribution")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def imports(tree: ast.Module) -> Iterator[Import]:
    """Every absolute import of a file, those in functions and `if TYPE_CHECKING` blocks too."""

    def walk(node: ast.AST, nested: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, nested) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and not child.level:
                yield Import(child.module or "", child.lineno, nested)
            else:
                yield from walk(child, nested or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    return walk(tree, nested=False)
