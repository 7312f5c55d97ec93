"""Nothing of a model folder is ever run: held by watching the interpreter while one is served."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_qwen35.bundled import tiny_folder

WATCHED = """
import atexit, json, sys

folder, told = sys.argv[1], sys.argv[2]
seen = {"opened": [], "executed": [], "imported": [], "unpickled": []}

def watch(event, details):
    if event == "open" and str(details[0]).startswith(folder):
        seen["opened"].append(str(details[0]))
    elif event == "exec" and str(getattr(details[0], "co_filename", "")).startswith(folder):
        seen["executed"].append(details[0].co_filename)
    elif event == "import" and str(details[1]).startswith(folder):
        seen["imported"].append(details[0])
    elif event == "pickle.find_class":
        seen["unpickled"].append(details[1])

sys.addaudithook(watch)
atexit.register(lambda: open(told, "w").write(json.dumps(seen)))
from hpc_cli.app import main
sys.argv = ["hpc", "serve", *sys.argv[3:], "--", folder]
main()
"""
TRAPS = (
    "modeling_tiny.py",
    "configuration_tiny.py",
    "pytorch_model.bin",
    "training_args.bin",
    "sitecustomize.py",
)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """The bundled model with files beside it that a careless loader would run."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder(), folder)
    for trap in TRAPS:
        (folder / trap).write_text("raise SystemExit('a file of the model folder was run')\n", "utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["auto_map"] = {"AutoConfig": "configuration_tiny.Config", "AutoModel": "modeling_tiny.Model"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    return folder


def test_a_served_folder_runs_nothing(trapped: Path, tmp_path: Path) -> None:
    """A start from this folder opens its data, and executes, imports and unpickles none of it."""
    told, ready = tmp_path / "told.json", tmp_path / "ready.json"
    options = ["--port", "0", "--threads", "1", "--host-cache-mib", "0", "--kv-capacity", "4096"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", WATCHED, str(trapped), str(told), *options, "--ready-file", str(ready)],
        cwd=trapped,
        stderr=subprocess.PIPE,
        text=True,
    )
    give_up = time.monotonic() + 120.0
    while not ready.exists() and process.poll() is None and time.monotonic() < give_up:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 0, stderr
    seen = json.loads(told.read_text("utf-8"))
    opened = {Path(name).name for name in seen.pop("opened")}
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= opened
    assert opened & set(TRAPS) == set()
    assert seen == {"executed": [], "imported": [], "unpickled": []}
