"""The `hpc` command: names, options and help of every subcommand.

Nothing here imports a model or a server, so `hpc --help`, `hpc --version` and every usage error answer at
once. A command imports what it runs when it runs (§14.2 options are resolved there, once).
"""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated

import typer

from hpc_cli import serve
from hpc_cli.bench import command as bench

__all__ = ["app", "main"]

HELP = """Serve a hybrid language model whose prompts resume where an earlier one left off.

\b
Examples:
  hpc serve                          the bundled tiny model on http://127.0.0.1:8000
  hpc serve ./Qwen3.5-9B             a model folder (config.json, *.safetensors)
  hpc serve Qwen/Qwen3.5-9B          a model of the Hugging Face hub
  hpc bench serve --json             how much faster a second turn is, on this machine
"""

app = typer.Typer(
    name="hpc",
    help=HELP,
    no_args_is_help=True,
    rich_markup_mode=None,  # importing rich for a help page would take half of its time
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("serve", cls=serve.ServeCommand)(serve.serve)
app.add_typer(bench.app, name="bench")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"hpc {importlib.metadata.version('hpc-cli')} (Python {platform.python_version()})")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Hold the options that belong to no subcommand."""


def main() -> None:
    """Run the command line; exits with 0, 1 (failed), 2 (usage) or 130 (interrupted)."""
    app(prog_name="hpc")
