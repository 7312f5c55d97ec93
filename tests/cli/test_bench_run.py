"""The order of a bench run, its output, and what it refuses to call a measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hpc_cli.app import app
from hpc_cli.bench import report, run
from hpc_cli.bench.subject import started
from hpc_cli.bench.workload import REPLY_TOKENS, SESSIONS, TURNS
from hpc_cli.errors import CommandError
from tests.cli.fake_server import Answer, bare_usage, fake_server, streamed

FIGURES = (
    "ttft_cold_ms",
    "ttft_warm_median_ms",
    "cold_over_warm",
    "decode_tok_s",
    "cached_fraction",
    "reuse_of_ideal",
    "threads",
)


def common(a: list[int], b: list[int]) -> int:
    """Length of the longest common prefix."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def perfect(first_cached: int = 0) -> Answer:
    """A server that reuses all it may, and says that `first_cached` tokens of a cold prompt were cached."""
    history: list[list[int]] = []
    vocabulary: dict[str, int] = {}

    def tokens_of(messages: list[dict[str, str]]) -> list[int]:
        words = [word for message in messages for word in (message["role"], *message["content"].split())]
        return [vocabulary.setdefault(word, len(vocabulary)) for word in words]

    def answer(body: dict[str, Any]) -> list[dict[str, Any]]:
        prompt = tokens_of(body["messages"])
        shared = first_cached
        for earlier in history:
            same = next(
                (n for n, (a, b) in enumerate(zip(earlier, prompt, strict=False)) if a != b), len(earlier)
            )
            shared = max(shared, min(same, len(prompt) - 1))
        history.append(prompt)
        count = body["max_tokens"]
        return streamed(count, bare_usage(len(prompt), count, shared), prompt_token_ids=prompt)

    return answer


def test_plays_all_turns_in_turn() -> None:
    """Twelve requests: sessions alternate, histories grow, every reply has its length and is sent back."""
    bodies: list[dict[str, Any]] = []
    with fake_server(perfect(), bodies, []) as url:
        outcome = run.run(model=None, url=url, repeat=1, serve_options=[])
    played = outcome.playings[0]
    assert [(one.turn, one.session) for one in played] == [
        (turn + 1, session + 1) for turn in range(TURNS) for session in range(SESSIONS)
    ]
    assert {one.completion_tokens for one in played} == {REPLY_TOKENS}
    measured = [body["messages"] for body in bodies[2:]]
    assert [len(messages) for messages in measured] == [
        2 + 2 * turn for turn in range(TURNS) for _ in range(2)
    ]
    assert measured[-1][: len(measured[-3])] == measured[-3]
    assert measured[2][2]["reasoning_content"] == "0 "


def test_json_has_the_promised_keys() -> None:
    """One object on stdout with every figure, and one entry a request."""
    with fake_server(perfect(), [], []) as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--json", "--url", url])
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert set(FIGURES) <= printed.keys()
    assert printed["cached_fraction"] > 0.9
    assert printed["threads"] is None
    assert len(printed["turns"]) == TURNS * SESSIONS
    assert "turn 6" in done.stderr


def test_table_shows_every_request_and_figure() -> None:
    """Without --json the same comes as a table."""
    with fake_server(perfect(), [], []) as url:
        outcome = run.run(model=None, url=url, repeat=1, serve_options=[])
    table = report.as_table(outcome)
    assert all(name in table for name in FIGURES)
    assert (
        len([line for line in table.splitlines() if line.split()[:1] in (["1"], ["2"])]) == TURNS * SESSIONS
    )


def test_repeats_are_cold_each() -> None:
    """Every playing has its own text, so that none finds the one before in the cache."""
    with fake_server(perfect(), [], []) as url:
        outcome = run.run(model=None, url=url, repeat=2, serve_options=[])
    assert len(outcome.playings) == 2
    assert all((played[0].cached_tokens or 0) <= 1 for played in outcome.playings)


def test_a_warm_first_request_is_no_measurement() -> None:
    """A server that already holds the prompt is refused, not reported as fast."""
    with (
        fake_server(perfect(first_cached=640), [], []) as url,
        pytest.raises(CommandError, match="was not cold: 640"),
    ):
        run.run(model=None, url=url, repeat=1, serve_options=[])


def test_options_for_a_server_that_runs_already_are_refused() -> None:
    """They could not reach it, so they are an error instead of being ignored."""
    done = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:1", "--", "--threads", "1"])
    assert done.exit_code == 2
    assert "--threads" in done.stderr


def test_a_started_server_is_measured_and_ended(tmp_path: Path) -> None:
    """The whole way with a scripted server: every turn resumes at the end of the one before."""
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "Hello there."}\n', "utf-8")
    outcome = run.run(model=None, url=None, repeat=1, serve_options=["--scripted", str(script)])
    assert outcome.figures.cached_fraction is not None
    assert outcome.figures.cached_fraction >= 0.93
    assert outcome.figures.reuse_of_ideal is not None
    assert outcome.figures.reuse_of_ideal >= 0.995
    with pytest.raises(ProcessLookupError):
        os.kill(outcome.about["pid"], 0)


def test_a_server_that_dies_is_quoted(tmp_path: Path) -> None:
    """If the server is gone when a request fails, its exit code and log are part of the message."""
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "Hello there."}\n', "utf-8")
    quoted = pytest.raises(CommandError, match=r"no answer\. The server ended with code -9; its last words")
    with quoted, started(None, ["--scripted", str(script)]) as server:
        os.kill(server.about["pid"], signal.SIGKILL)
        raise CommandError("no answer")


def test_a_terminated_bench_leaves_no_server(tmp_path: Path) -> None:
    """SIGTERM in the middle of a run ends the server that was started for it."""
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "Hello there."}\n', "utf-8")
    command = [
        sys.executable,
        "-m",
        "hpc_cli",
        "bench",
        "serve",
        "--repeat",
        "1000",
        "--",
        "--scripted",
        str(script),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as bench:
        assert bench.stderr is not None
        while "turn 1" not in bench.stderr.readline():
            assert bench.poll() is None
        children = Path(f"/proc/{bench.pid}/task/{bench.pid}/children").read_text("utf-8").split()
        bench.terminate()
        bench.stderr.read()
    assert bench.returncode == 128 + signal.SIGTERM
    assert len(children) == 1
    assert not Path(f"/proc/{children[0]}").exists()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The last lines of its log reach the person who asked, with exit code 1."""
    done = CliRunner().invoke(app, ["bench", "serve", "--model", str(tmp_path / "nothing-here")])
    assert done.exit_code == 1
    assert "nothing-here" in done.stderr
    assert "Traceback" not in done.stderr
