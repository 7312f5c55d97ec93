"""The command line itself: help, versions, usage errors and how failures end."""

from __future__ import annotations

import importlib.metadata

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hpc_cli.app import app
from hpc_cli.errors import CommandError, reported
from hpc_cli.serve import ELSEWHERE
from hpc_cli.values import auto_or_whole, whole


def test_version_is_the_packages() -> None:
    """`--version` prints what is installed."""
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert importlib.metadata.version("hpc-cli") in done.stdout


def test_help_has_examples() -> None:
    """The first page shows commands to copy, one a line."""
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    examples = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("    hpc ")]
    assert ["hpc", "serve"] in examples
    assert ["hpc", "bench"] in examples


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--no-such-flag"],
        ["serve", "--port", "70000"],
        ["serve", "--device", "tpu"],
        ["serve", "--kv-capacity", "many"],
        ["serve", "--log-level", "loud"],
        ["serve", "a", "b"],
        ["bench", "serve", "--repeat", "0"],
        ["nothing"],
    ],
    ids=" ".join,
)
def test_usage_errors_exit_with_two(arguments: list[str]) -> None:
    """An unknown flag, a value out of range and a surplus argument are usage errors without a traceback."""
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert "Error" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("flag", sorted(ELSEWHERE))
def test_flags_of_other_servers_are_answered(flag: str) -> None:
    """What people try first is refused with what to type instead."""
    done = CliRunner().invoke(app, ["serve", f"{flag}=1"])
    assert done.exit_code == 2
    assert ELSEWHERE[flag].split()[-1] in done.stderr


def test_answers_name_flags_that_exist() -> None:
    """Every flag that an answer points to is one of ours."""
    ours = CliRunner().invoke(app, ["serve", "--help"]).stdout
    named = {word for answer in ELSEWHERE.values() for word in answer.split() if word.startswith("--")}
    assert named
    assert {flag for flag in named if flag not in ours} == set()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_beyond_loopback_needs_the_flag(host: str) -> None:
    """Without keys nobody else may reach the server unless that is said (D27)."""
    done = CliRunner().invoke(app, ["serve", "--host", host, "nowhere/at/all"])
    assert done.exit_code == 2
    assert "--allow-unauthenticated" in done.stderr


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_pass(value: int) -> None:
    """Bounds are checked where they are known; here a number is a number."""
    assert whole(auto_or_whole(str(value))) == value


@given(st.text(max_size=8))
def test_other_text_is_refused_or_a_number(text: str) -> None:
    """Nothing but `auto` and whole numbers gets through."""
    try:
        expected = text if text == "auto" else str(int(text))
    except ValueError:
        with pytest.raises(typer.BadParameter, match="neither 'auto' nor a whole number"):
            auto_or_whole(text)
    else:
        assert auto_or_whole(text) == expected


def test_expected_failures_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The message alone, with its exit code."""
    with pytest.raises(typer.Exit) as ended, reported():
        raise CommandError("the disk is full", exit_code=1)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == "hpc: the disk is full\n"


def test_debug_shows_where_a_failure_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    """With --log-level debug the cause's traceback comes before the line."""
    with pytest.raises(typer.Exit), reported(with_traceback=True):
        raise CommandError("cannot read") from OSError("device gone")
    told = capsys.readouterr().err
    assert "OSError: device gone" in told
    assert told.endswith("hpc: cannot read\n")


def test_interruption_ends_quietly(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl+C while loading is no error to explain."""
    with pytest.raises(typer.Exit) as ended, reported():
        raise KeyboardInterrupt
    assert ended.value.exit_code == 130
    assert "Traceback" not in capsys.readouterr().err


def test_bugs_keep_their_traceback() -> None:
    """What nobody expected is not hidden."""
    with pytest.raises(ZeroDivisionError), reported():
        _ = 1 / 0
