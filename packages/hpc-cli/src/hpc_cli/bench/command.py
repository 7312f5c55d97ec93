"""`hpc bench serve`: options and order of the run. What it imports to measure, it imports when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from hpc_cli.errors import USAGE, CommandError, reported
from hpc_cli.extra import require_serving_extra

__all__ = ["app"]

app = typer.Typer(
    help="Measure a server the way a client feels it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _bench() -> None:
    """Measure a server the way a client feels it."""


@app.command("serve")
def serve(
    serve_options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[-- SERVE OPTIONS]",
            show_default=False,
            help="Options of the server that is started, as `hpc serve` takes them.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Model folder or hub id to serve. Without one: the bundled tiny model. "
            "With --url: the model's name there.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Measure a server that runs already (any OpenAI-compatible one), such as http://127.0.0.1:8000.",
        ),
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Play it this often, with other text; medians are given.")
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of a table.")
    ] = False,
) -> None:
    """Play a growing conversation against a server and report time to first token, speed and reuse.

    Two sessions take turns; they share a system prompt of about 3,000 tokens, and each of their 6 turns adds
    about 250 tokens, 64 of them the reply's. Only the very first request is cold.
    """
    with reported():
        if url is not None and serve_options:
            raise CommandError(
                f"--url measures a server that runs already: {serve_options[0]!r} cannot reach it",
                exit_code=USAGE,
            )
        require_serving_extra("hpc bench")
        from hpc_cli.bench import report, run  # httpx and rich.table: not for `hpc --help`

        outcome = run.run(model=model, url=url, repeat=repeat, serve_options=serve_options or [])
        print(report.as_json(outcome) if as_json else report.as_table(outcome))
