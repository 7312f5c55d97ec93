"""What a person who installs the five packages relies on: one version, honest bounds, a licence, a README."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.packaging.workspace import NAMES, PACKAGES, ROOT, Package, distribution

REQUIRES_PYTHON = ">=3.11"
README_LEAST_WORDS = 60

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)


def test_the_workspace_holds_exactly_these_packages() -> None:
    """A package that these tests do not know would not be tested."""
    assert {folder.name for folder in (ROOT / "packages").iterdir() if folder.is_dir()} == set(NAMES)


def test_one_version() -> None:
    """All five have one number until 1.0."""
    assert len({package.project["version"] for package in PACKAGES}) == 1


@each_package
def test_siblings_are_bound_to_this_line(package: Package) -> None:
    """A bare sibling name would be published without any bound; uv itself checks no sibling's range."""
    major, minor, _ = package.project["version"].split(".")
    bound = f">={package.project['version']},<{major}.{int(minor) + 1}"
    siblings = [line for line in package.requirements if distribution(line) in NAMES]
    assert [line for line in siblings if not line.endswith(bound)] == []


@each_package
def test_every_dependency_has_a_floor(package: Package) -> None:
    """Without a floor a resolver may pick a release of ten years ago."""
    assert [line for line in package.requirements if not re.match(r"[\w.-]+(\[[\w,-]+\])?>=\d", line)] == []


def test_development_tools_have_floors_too() -> None:
    """The groups of the root pyproject never reach users, yet lowest-direct resolution reads them."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        groups = tomllib.load(file)["dependency-groups"]
    lines = [line for group in groups.values() for line in group if isinstance(line, str)]
    outside = [line for line in lines if distribution(line) not in NAMES]
    assert outside
    assert [line for line in outside if not re.match(r"[\w.-]+(>=|==)\d", line)] == []


@each_package
def test_one_python_floor(package: Package) -> None:
    """The workspace takes the highest floor of its members, so one that moves alone moves all."""
    assert package.project["requires-python"] == REQUIRES_PYTHON


@each_package
def test_licence_is_the_roots(package: Package) -> None:
    """Each wheel carries its own copy, as a build cannot reach above its folder."""
    assert package.project["license"] == "Apache-2.0"
    assert package.project["license-files"] == ["LICENSE"]
    assert (package.folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each_package
def test_is_typed(package: Package) -> None:
    """Without the marker a type checker ignores every annotation of an installed package."""
    assert (package.source / "py.typed").is_file()


@each_package
def test_readme_says_something(package: Package) -> None:
    """The README is the package's page; it opens with the name and explains itself."""
    text = (package.folder / package.project["readme"]).read_text("utf-8")
    assert text.startswith(f"# {package.name}\n")
    assert len(text.split()) >= README_LEAST_WORDS


@each_package
def test_build_backend_is_bounded(package: Package) -> None:
    """The backend's next line may build something else."""
    with (package.folder / "pyproject.toml").open("rb") as file:
        build = tomllib.load(file)["build-system"]
    assert build["build-backend"] == "uv_build"
    assert re.fullmatch(r"uv_build>=[\d.]+,<[\d.]+", build["requires"][0])


def test_root_is_no_package_and_short() -> None:
    """A root with [project] could be published by accident, and a long one hides what matters."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert "project" not in tomllib.loads(text)
    assert len(text.splitlines()) < 120


def test_tests_are_packages_at_every_level() -> None:
    """A folder without __init__.py can lose tests of equal file names silently."""
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert {str(folder) for folder in folders if not (folder / "__init__.py").is_file()} == set()
