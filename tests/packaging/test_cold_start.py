"""Commands that need no model answer at once and load nothing heavy."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

SECONDS_TO_ANSWER = 0.5
TRIES = 5
HEAVY = (
    "torch",
    "triton",
    "starlette",
    "uvicorn",
    "tokenizers",
    "transformers",
    "huggingface_hub",
    "hpc_qwen35",
)

QUICK = (
    ["--version"],
    ["--help"],
    ["serve", "--help"],
    ["bench", "serve", "--help"],
    ["serve", "--no-such-flag"],
    ["serve", "--host", "0.0.0.0"],
)

each_quick_command = pytest.mark.parametrize("arguments", QUICK, ids=" ".join)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=60)


@each_quick_command
def test_answers_within_half_a_second(arguments: list[str]) -> None:
    """The best of a few tries, as other work on the machine only ever adds time."""
    best = SECONDS_TO_ANSWER
    for _ in range(TRIES):
        begin = time.perf_counter()
        run("-m", "hpc_cli", *arguments)
        best = min(best, time.perf_counter() - begin)
        if best < SECONDS_TO_ANSWER:
            break
    assert best < SECONDS_TO_ANSWER


@each_quick_command
def test_loads_nothing_heavy(arguments: list[str]) -> None:
    """The import log of the interpreter names neither a model's nor a server's libraries."""
    log = run("-X", "importtime", "-m", "hpc_cli", *arguments).stderr
    loaded = {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert "hpc_cli.app" in loaded
    assert loaded & set(HEAVY) == set()


def test_works_without_the_serving_extra() -> None:
    """A plain `pip install hpc-cli` has no server and no model: help works, serving says what to install."""
    script = (
        "import sys\n"
        # None in sys.modules is how the interpreter notes a module that cannot be found.
        f"sys.modules.update(dict.fromkeys({(*HEAVY, 'hpc_server', 'httpx')!r}))\n"
        "from hpc_cli.app import main\n"
        "main()\n"
    )
    helped = run("-c", script, "--help")
    assert helped.returncode == 0, helped.stderr
    assert "serve" in helped.stdout
    for command in (["serve"], ["bench", "serve"]):
        refused = run("-c", script, *command)
        assert refused.returncode == 1
        assert refused.stderr.startswith("hpc: ")
        assert "pip install 'hpc-cli[serve]'" in refused.stderr
