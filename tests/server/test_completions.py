"""POST /v1/completions over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server import texts
from tests.server.served import Served, plain_replies, served, sse_events


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(plain_replies(12)) as running:
        yield running


def test_text_and_ids_are_the_same_prompt(server: Served) -> None:
    """A string, its ids, and a list of one of either give the same reply."""
    ids = texts.tokenizer().encode_text("hello world").tolist()
    forms: list[object] = ["hello world", ids, ["hello world"], [ids]]
    answers = [server.complete(form, return_token_ids=True).json() for form in forms]
    assert all(answer["prompt_token_ids"] == ids for answer in answers)
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert answers[0]["object"] == "text_completion"


def test_a_stream_adds_up_to_the_whole(server: Served) -> None:
    """Chunks of text, a reason, the usage."""
    whole = server.complete().json()
    events: list[Any] = sse_events(server.complete(stream=True, stream_options={"include_usage": True}).text)
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == whole["choices"][0]["text"]
    assert events[-2]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_have_offsets_into_the_text(server: Served, stream: bool) -> None:
    """Offsets are those of the tokens' texts one after another, over all chunks."""
    response = server.complete(logprobs=2, max_tokens=5, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in sse_events(response.text)]  # type: ignore[index]
    else:
        choices = response.json()["choices"]
    parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [token for part in parts for token in part["tokens"]]
    offsets = [offset for part in parts for offset in part["text_offset"]]
    assert len(tokens) == 5
    assert offsets == [len("".join(tokens[:i])) for i in range(5)]
    assert all(len(top) == 2 for part in parts for top in part["top_logprobs"])


def test_ids_stream_as_they_come(server: Served) -> None:
    """return_token_ids: the prompt's ids first, then each chunk's, the stop token's with the last."""
    whole = server.complete(return_token_ids=True).json()
    events: list[Any] = sse_events(server.complete(return_token_ids=True, stream=True).text)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert ids[-1] == texts.special("<|im_end|>")


def test_a_repeated_prompt_reuses_and_never_all_of_it(server: Served) -> None:
    """An identical prompt resumes from a block end below its last token (field report 48)."""
    prompt = [300 + i % 90 for i in range(200)]
    server.complete(prompt, max_tokens=4)
    usage = server.complete(prompt, max_tokens=4).json()["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 128 <= cached <= 199


def test_cache_prompt_false_keeps_a_request_out(server: Served) -> None:
    """Nothing of it is found afterwards."""
    prompt = [310 + i % 70 for i in range(200)]
    server.complete(prompt, max_tokens=4, cache_prompt=False)
    usage = server.complete(prompt, max_tokens=4).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_default_length_is_what_the_context_leaves(server: Served) -> None:
    """Without max_tokens a reply may fill the context; more than is left is cut and counted."""
    prompt = [320] * 2000
    left = 2048 - 2000
    answer = server.complete(prompt, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == left
    answer = server.complete(prompt, ignore_eos=True, max_tokens=2000).json()
    assert answer["usage"]["completion_tokens"] == left
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (
        'hpc_request_adjustments_total{reason="max_tokens_clamped"} 1.0' in server.client.get("/metrics").text
    )
