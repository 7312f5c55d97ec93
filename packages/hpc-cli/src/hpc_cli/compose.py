"""The composition root: a model folder and options become a running server.

Here the model's side and the server's meet; neither imports the other (design §2).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hpc_cli.errors import USAGE, CommandError
from hpc_cli.logs import start_logging
from hpc_cli.serve import ServeOptions
from hpc_cli.source import Source, find_source
from hpc_cli.started import Facts, clear_ready_file, lines, write_ready_file
from hpc_server.contracts import Program
from hpc_server.frontend import Frontend
from hpc_server.limits import MAX_NAME_CHARS
from hpc_server.options import EngineOptions, ServerOptions
from hpc_server.serve import ListenError, bind, serve
from hpc_server.template import ChatTemplate
from hpc_server.text_errors import TemplateError, TokenizerError
from hpc_server.tokenizer import Tokenizer

__all__ = ["run"]


def run(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM. Raises CommandError for everything that a person can mend."""
    start_logging(options.log_level)
    name = options.served_model_name
    if name is not None and not 0 < len(name) <= MAX_NAME_CHARS:
        message = f"--served-model-name has {len(name)} characters; it must have 1 to {MAX_NAME_CHARS}"
        raise CommandError(message, exit_code=USAGE)
    if options.ready_file is not None:
        clear_ready_file(options.ready_file)
    # Bound before the model is read: a port in use is known at once, not minutes later.
    with _explained(), bind(options.host, options.port) as listener:
        source = find_source(options.model, options.served_model_name)
        tokenizer = Tokenizer.load(source.folder)
        frontend = Frontend(tokenizer, ChatTemplate.load(source.folder))
        program, facts = _program(options, source, tokenizer)
        try:
            in_order = serve(
                program,
                frontend,
                ServerOptions(
                    model=source.name,
                    strict=options.strict_requests,
                    prefix_reuse=options.prefix_reuse,
                    created=int(time.time()),
                ),
                EngineOptions(prefill_chunk=facts.prefill_chunk, max_queue=options.max_queue),
                host=options.host,
                allow_unauthenticated=options.allow_unauthenticated,
                listener=listener,
                on_started=lambda url: _announce(options, facts, url),
            )
        finally:
            if options.ready_file is not None:
                with suppress(OSError):
                    options.ready_file.unlink(missing_ok=True)
    if not in_order:
        raise CommandError("the model did not stop in time; what it was doing was cut off")


def _program(options: ServeOptions, source: Source, tokenizer: Tokenizer) -> tuple[Program, Facts]:
    if options.scripted is not None:
        from hpc_cli.scripted import load_script

        return load_script(options.scripted, options, source, tokenizer)
    from hpc_cli.model import load_model  # torch: a scripted server starts without it

    return load_model(options, source, tokenizer)


def _announce(options: ServeOptions, facts: Facts, url: str) -> None:
    with suppress(OSError):  # nobody reads stderr: no reason not to serve
        for line in lines(facts, url):
            print(line, file=sys.stderr, flush=True)
    if options.ready_file is not None:
        write_ready_file(options.ready_file, facts, url)


@contextmanager
def _explained() -> Iterator[None]:
    """Expected failures of the server's side, as what a person is told."""
    try:
        yield
    except (TokenizerError, TemplateError, ListenError) as error:
        raise CommandError(str(error)) from error
