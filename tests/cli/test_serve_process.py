"""`hpc serve` as a process: how it starts, answers, refuses and ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from hpc_qwen35.bundled import tiny_folder

SMALL = ("--threads", "1", "--host-cache-mib", "64", "--kv-capacity", "8192")
SECONDS_TO_START = 120.0
SECONDS_TO_END = 10.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hpc_cli", "serve", *arguments]


def refused(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The outcome of a start that must fail; whatever it was, no traceback reaches the person."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=SECONDS_TO_START)
    assert "Traceback" not in done.stderr
    return done


@attrs.frozen
class Running:
    """A started server. about: its ready file."""

    process: subprocess.Popen[str]
    ready: Path
    about: dict[str, Any]

    def end(self, how: signal.Signals) -> str:
        """Send a signal, wait for the end, and give what it wrote to stderr."""
        self.process.send_signal(how)
        _, told = self.process.communicate(timeout=SECONDS_TO_END)
        return told


def script(folder: Path) -> Path:
    """A file of one reply."""
    file = folder / "replies.jsonl"
    file.write_text('{"text": "One."}\n', "utf-8")
    return file


def start(folder: Path, *arguments: str, small: tuple[str, ...] = SMALL, unread: bool = False) -> Running:
    """unread: nobody reads its stderr, from the first line on."""
    ready = folder / "ready.json"
    process = subprocess.Popen(
        command(*small, "--port", "0", "--ready-file", str(ready), *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if unread and process.stderr is not None:
        process.stderr.close()
    give_up = time.monotonic() + SECONDS_TO_START
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > give_up:
            process.kill()
            pytest.fail(f"the server did not start: {process.communicate()[1]}")
        time.sleep(0.05)
    return Running(process, ready, json.loads(ready.read_text("utf-8")))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    running = start(tmp_path)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def test_a_life(server: Running) -> None:
    """It answers under the bundled name, reports what it resolved, logs the request, and ends with code 0."""
    url = server.about["url"]
    with httpx.Client(base_url=url, trust_env=False, timeout=60.0) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["id"] == server.about["model"] == "hpc-tiny"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "ignore_eos": True}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert server.about["threads"] == 1
    assert server.about["kv_tokens"] == 8192
    told = server.end(signal.SIGTERM)
    assert server.process.returncode == 0, told
    assert f"ready     {url}/v1" in told
    assert "generated 3" in told
    assert "Traceback" not in told
    assert not server.ready.exists()


def test_interruption_ends_a_stream_in_order(server: Running) -> None:
    """Ctrl+C during a long reply: the client gets a last event, and the process ends with code 0."""
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.about['url']}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60.0) as answer:
        events = (line for line in answer.iter_lines() if line.startswith("data:"))
        first = [next(events) for _ in range(3)]
        os.kill(server.process.pid, signal.SIGINT)
        rest = list(events)
    assert "choices" in first[0]
    assert any('"error"' in event for event in rest[-2:])
    _, told = server.process.communicate(timeout=SECONDS_TO_END)
    assert server.process.returncode == 0, told
    assert "Traceback" not in told


def test_a_script_is_served_without_a_model(tmp_path: Path) -> None:
    """Replies come from the file in order, the cache is real, and what was resolved says so."""
    script = tmp_path / "replies.jsonl"
    script.write_text('{"text": "One."}\n{"text": "Two."}\n', "utf-8")
    running = start(tmp_path, "--scripted", str(script), small=())
    try:
        body = {
            "messages": [{"role": "user", "content": "count " * 400}],
            "chat_template_kwargs": {"enable_thinking": False},
        }
        with httpx.Client(base_url=running.about["url"], trust_env=False, timeout=60.0) as http:
            answers = [http.post("/v1/chat/completions", json=body).json() for _ in range(2)]
    finally:
        told = running.end(signal.SIGTERM)
    assert running.process.returncode == 0, told
    assert [answer["choices"][0]["message"]["content"] for answer in answers] == ["One.", "Two."]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert cached[0] == 0
    assert cached[1] > answers[1]["usage"]["prompt_tokens"] // 2
    assert running.about["parameters"] is None


@pytest.mark.parametrize(
    ("script", "arguments", "code", "told"),
    [
        ("", (), 1, "holds no reply"),
        ("{", (), 1, "replies.jsonl:1: not JSON"),
        ('{"text": "a"}', ("--threads", "2"), 2, "--threads needs a model"),
        ('{"text": "a"}', ("--kv-capacity", "-64"), 2, "pages"),
    ],
)
def test_a_script_that_cannot_be_served(
    script: str, arguments: tuple[str, ...], code: int, told: str, tmp_path: Path
) -> None:
    """A bad file is a failure, an option that only a model has is wrong usage; both are one line."""
    (tmp_path / "replies.jsonl").write_text(script, "utf-8")
    done = refused("--port", "0", "--scripted", str(tmp_path / "replies.jsonl"), *arguments)
    assert done.returncode == code
    assert told in done.stderr


def test_a_port_in_use_is_named() -> None:
    """Another listener on the port: code 1 and one line with the address, before any model is read."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = refused("--port", str(port))
    assert done.returncode == 1
    assert str(port) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    """An empty folder: code 1 and one line that names it."""
    done = refused("--port", "0", str(tmp_path))
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_another_architecture_is_named(tmp_path: Path) -> None:
    """A checkpoint of another kind, complete otherwise: code 1 with what was found."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_folder() / file, tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}', "utf-8")
    done = refused("--port", "0", "--log-level", "warning", str(tmp_path))
    assert done.returncode == 1
    assert "LlamaForCausalLM" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_an_option_that_cannot_be_met_is_usage() -> None:
    """A value that the model's limit excludes: code 2, with the flag, the value and the bound."""
    done = refused("--port", "0", *SMALL, "--max-context", "1000000000")
    assert done.returncode == 2
    assert "--max-context is 1000000000" in done.stderr


def test_debug_shows_the_cause(tmp_path: Path) -> None:
    """With --log-level debug the same failure comes with where it arose."""
    arguments = command("--port", "0", "--log-level", "debug", str(tmp_path))
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=SECONDS_TO_START)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("hpc: ")


@pytest.mark.parametrize("place", ["missing/ready.json", "."], ids=["no such folder", "a folder"])
def test_a_ready_file_that_cannot_be_written_is_named_before_loading(place: str, tmp_path: Path) -> None:
    """Code 2 and one line, not minutes of loading first."""
    done = refused("--port", "0", "--ready-file", str(tmp_path / place))
    assert done.returncode == 2
    assert "--ready-file" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_ready_file_of_an_earlier_server_is_not_taken_for_ours(tmp_path: Path) -> None:
    """It goes before anything is loaded, also when the start then fails."""
    ready = tmp_path / "ready.json"
    ready.write_text("{}", "utf-8")
    assert refused("--port", "0", "--ready-file", str(ready), str(tmp_path / "none")).returncode == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_no_request_can_say_is_refused(name: str) -> None:
    """The API takes names of 1 to 256 characters."""
    done = refused("--port", "0", "--served-model-name", name)
    assert done.returncode == 2
    assert f"{len(name)} characters" in done.stderr


def test_nobody_needs_to_read_what_it_says(tmp_path: Path) -> None:
    """With stderr closed at its other end it loads, serves and ends all the same."""
    running = start(tmp_path, "--scripted", str(script(tmp_path)), small=(), unread=True)
    try:
        with httpx.Client(base_url=running.about["url"], trust_env=False, timeout=60.0) as http:
            assert http.post("/v1/completions", json={"prompt": "hello"}).status_code == 200
    finally:
        running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(SECONDS_TO_END) == 0


def test_queue_and_reuse_reach_a_script(tmp_path: Path) -> None:
    """--max-queue bounds who waits, --no-prefix-reuse keeps every prompt out of the cache."""
    flags = ("--max-concurrency", "1", "--max-queue", "1", "--no-prefix-reuse")
    running = start(tmp_path, "--scripted", str(script(tmp_path)), *flags, small=())
    try:
        body = {"prompt": "count " * 400, "max_tokens": 2}
        with httpx.Client(base_url=running.about["url"], trust_env=False, timeout=60.0) as http:
            answers = [http.post("/v1/completions", json=body).json() for _ in range(2)]
            long = {**body, "max_tokens": 8000, "ignore_eos": True}
            with ThreadPoolExecutor(8) as pool:
                asked = [pool.submit(http.post, "/v1/completions", json=long) for _ in range(8)]
                refusals = [call.result() for call in asked if call.result().status_code == 429]
    finally:
        told = running.end(signal.SIGTERM)
    assert running.process.returncode == 0, told
    assert [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers] == [0, 0]
    assert running.about["prefix_reuse"] is False
    assert refusals
    assert "max_queue is 1" in refusals[0].json()["error"]["message"]
