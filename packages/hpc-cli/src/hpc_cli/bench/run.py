"""Plays the conversation and gathers what it showed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import attrs

from hpc_cli.bench import subject, workload
from hpc_cli.bench.client import ChatClient, Reply
from hpc_cli.bench.figures import Figures, Seen, figures, median
from hpc_cli.errors import CommandError

__all__ = ["Outcome", "play", "run"]

SCALE_WORDS = (96, 480)
COLD_SHARE = 0.02
"""A cold prompt may share so much with the scale requests: the words that a template begins with."""


@attrs.frozen(eq=False)
class Outcome:
    """All that a run measured. playings: the requests of each repeat, in the order sent."""

    model: str
    url: str | None
    about: Mapping[str, Any]
    figures: Figures
    playings: tuple[tuple[Seen, ...], ...]


def run(*, model: str | None, url: str | None, repeat: int, serve_options: Sequence[str]) -> Outcome:
    """Measure a server that is started for it, or the one at `url`. Raises CommandError if it fails.

    Progress goes to stderr.
    """
    server = subject.started(model, serve_options) if url is None else nullcontext(subject.running(url))
    _say("starting the server" if url is None else f"measuring {url}")
    with server as under_test, ChatClient(under_test.url, model if url is not None else None) as client:
        scale = measure_scale(client)
        playings = []
        for number in range(repeat):
            if repeat > 1:
                _say(f"playing {number + 1} of {repeat}")
            playings.append(play(client, workload.Script(scale=scale, seed=f"bench {number}")))
        return Outcome(
            model=client.served_model(),
            url=url,
            about=under_test.about,
            figures=median([figures(played) for played in playings]),
            playings=tuple(playings),
        )


def measure_scale(client: ChatClient) -> workload.Scale:
    """Two short requests of known words. They also take the first-use costs of a fresh process away."""
    pairs = []
    for words in SCALE_WORDS:
        message = {"role": "user", "content": workload.text(words, f"scale {words}")}
        pairs.append(
            (words, client.chat([message], max_tokens=workload.REPLY_TOKENS // 8, seed=0).prompt_tokens)
        )
    if pairs[0][1] >= pairs[1][1]:
        raise CommandError(
            f"the server counts {pairs[0][1]} and {pairs[1][1]} prompt tokens for 96 and 480 words"
        )
    return workload.Scale.of(pairs[0], pairs[1])


def play(client: ChatClient, script: workload.Script) -> tuple[Seen, ...]:
    """The whole conversation once: the sessions take turns, turn by turn."""
    histories = [[script.system()] for _ in range(workload.SESSIONS)]
    seen = []
    for turn in range(workload.TURNS):
        for session, history in enumerate(histories):
            history.append(script.user(session, turn))
            reply = client.chat(
                history, max_tokens=workload.REPLY_TOKENS, seed=turn * workload.SESSIONS + session
            )
            history.append(reply.message)
            seen.append(_seen(session, turn, reply))
            _say(_line(seen[-1]))
    if (seen[0].cached_tokens or 0) > COLD_SHARE * seen[0].prompt_tokens:
        raise CommandError(
            f"the first request was not cold: {seen[0].cached_tokens} of its {seen[0].prompt_tokens} tokens "
            "were cached. Restart the server, or let the bench start one"
        )
    return tuple(seen)


def _seen(session: int, turn: int, reply: Reply) -> Seen:
    return Seen(
        session=session + 1,
        turn=turn + 1,
        ttft_ms=reply.ttft * 1e3,
        decode_tok_s=reply.decode_tok_s,
        prompt_tokens=reply.prompt_tokens,
        cached_tokens=reply.cached_tokens,
        completion_tokens=reply.completion_tokens,
        prompt_ids=reply.prompt_ids,
        reply_ids=reply.reply_ids,
    )


def _line(seen: Seen) -> str:
    cached = "?" if seen.cached_tokens is None else f"{seen.cached_tokens:,}"
    return (
        f"session {seen.session} turn {seen.turn}: {seen.prompt_tokens:,} prompt tokens, {cached} cached, "
        f"first token after {seen.ttft_ms:.0f} ms"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
