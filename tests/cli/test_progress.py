"""Loading shows where it is, on a terminal and in a log."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hpc_cli import progress
from hpc_cli.progress import LoadProgress


def test_a_log_gets_one_line_a_stage(capsys: pytest.CaptureFixture[str]) -> None:
    """Many small steps of a quick stage are one line."""
    with LoadProgress(Console(file=io.StringIO(), force_terminal=False)) as show:
        for done in range(100):
            show("reading weights", done, 100)
        show("measuring threads", 0, 3)
    assert capsys.readouterr().err == "reading weights ...\nmeasuring threads ...\n"


def test_a_slow_stage_reports_how_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the interval a stage that goes on says how much is done."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    with LoadProgress(Console(file=io.StringIO(), force_terminal=False)) as show:
        show("reading weights", 1 << 20, 4 << 20)
        show("reading weights", 3 << 20, 4 << 20)
    assert capsys.readouterr().err == "reading weights ...\nreading weights ... 3 of 4 MiB\n"


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the bar is written, and it is cleaned up."""
    screen = io.StringIO()
    with LoadProgress(Console(file=screen, force_terminal=True, width=80)) as show:
        show("reading weights", 1, 4)
        show("reading weights", 4, 4)
        show("measuring threads", 1, 1)
    assert "measuring threads" in screen.getvalue()
    assert capsys.readouterr().err == ""
