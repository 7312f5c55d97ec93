"""The documents are true: commands run, flags exist, links lead somewhere, figures are the measured ones."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from typer.testing import CliRunner

from hpc_cli.app import app
from hpc_cli.bench.subject import started

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("packages/*/README.md")])
PUBLISHED_URL = "http://127.0.0.1:8000"
FENCE = re.compile(
    r"^(?P<run><!-- run -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)


@attrs.frozen
class Example:
    """A fenced block of a document. run: marked `<!-- run -->`, so it must work as printed."""

    document: Path
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.document.name}: {self.text.splitlines()[0][:40]}"


def examples() -> list[Example]:
    return [
        Example(path, found["language"], found["text"], found["run"] is not None)
        for path in DOCUMENTS
        for found in FENCE.finditer(path.read_text("utf-8"))
    ]


RUNNABLE = [example for example in examples() if example.run]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server on the bundled model, as `hpc serve` starts it, small enough to share a machine."""
    with started(None, ["--threads", "1", "--host-cache-mib", "64", "--kv-capacity", "16384"]) as subject:
        yield subject.url


def test_the_first_page_has_examples_that_run() -> None:
    """The README shows at least one command and one program that these tests execute."""
    languages = {example.language for example in RUNNABLE if example.document.name == "README.md"}
    assert languages == {"console", "python"}


@pytest.mark.parametrize("example", [e for e in RUNNABLE if e.language == "python"], ids=str)
def test_python_examples_run(example: Example, url: str) -> None:
    """A printed program works as it stands, but for the port."""
    program = example.text.replace(PUBLISHED_URL, url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("example", [e for e in RUNNABLE if e.language == "console"], ids=str)
def test_console_examples_run(example: Example, url: str) -> None:
    """A printed command exits with 0 and answers something that is no error."""
    commands = [line[2:] for line in example.text.splitlines() if line.startswith("$ ")]
    assert commands
    for command in commands:
        words = shlex.split(command.replace(PUBLISHED_URL, url))
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert '"error"' not in done.stdout
        assert done.stdout.strip()


@pytest.mark.parametrize("example", [e for e in examples() if e.language == "python"], ids=str)
def test_every_python_example_is_run(example: Example) -> None:
    """A program that nobody runs goes stale."""
    assert example.run


def hpc_commands() -> list[list[str]]:
    """Every `hpc …` line of a console block, without `uv run`, redirections and what brackets leave open."""
    lines = [line[2:] for e in examples() if e.language == "console" for line in e.text.splitlines()]
    words = [line.removeprefix("uv run ").partition(" >")[0].split() for line in lines]
    return [line for line in words if line[:1] == ["hpc"] and "[MODEL]" not in line]


@pytest.mark.parametrize("command", hpc_commands(), ids=" ".join)
def test_printed_commands_parse(command: list[str]) -> None:
    """Each printed command's options exist; `--help` at its end parses it without running it."""
    ours = command[1 : command.index("--")] if "--" in command else command[1:]
    done = CliRunner().invoke(app, [*ours, "--help"])
    assert done.exit_code == 0, done.output


def test_serving_lists_exactly_the_flags() -> None:
    """Every flag of `hpc serve` is explained in docs/serving.md, and no other."""
    page = (ROOT / "docs" / "serving.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(--[a-z-]+)`", page, re.MULTILINE))
    shown = CliRunner().invoke(app, ["serve", "--help"]).stdout
    ours = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE)) - {"--help"}
    assert listed == ours


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_named_files_exist(path: Path) -> None:
    """Relative links, and files of the tree that a document names, are there."""
    text = path.read_text("utf-8")
    linked = [path.parent / target for target in re.findall(r"\]\(([^)#:]+)\)", text)]
    named = [ROOT / name for name in re.findall(r"`((?:packages|docs|tests)/[\w./-]+)`", text)]
    assert [str(target) for target in [*linked, *named] if not target.exists()] == []


WRITER = ROOT / "docs" / "figures" / "write_tables.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_figures_are_the_measured_ones(path: Path) -> None:
    """Writing the tables anew from the kept bench outputs changes nothing."""
    filled = runpy.run_path(str(WRITER))["filled"]
    assert filled(path.read_text("utf-8")) == path.read_text("utf-8")


def test_figures_that_drift_are_found() -> None:
    """The check itself: a table with another number, or none, is made anew."""
    filled = runpy.run_path(str(WRITER))["filled"]
    marker = "<!-- figures: docs/figures/bench-serve.json -->\n"
    right = filled(marker)
    assert "cold over warm" in right
    assert filled(marker + "| old | 1 |\n|---|---|\n") == right
    assert filled(right) == right
