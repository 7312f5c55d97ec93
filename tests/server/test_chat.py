"""POST /v1/chat/completions over a real socket: shapes, order, usage, stop strings, logprobs, ids."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hpc_index.ids import Int32Buffer
from tests.server import texts
from tests.server.served import MODEL, Served, served, sse_events


class Lines:
    """Says the same text whatever the prompt."""

    def __init__(self, text: str, *, think: str | None = None) -> None:
        tokens = texts.tokenizer()
        parts = [tokens.encode_text(text)]
        if think is not None:
            close = np.array([texts.special("</think>")], dtype=np.int32)
            parts = [tokens.encode_text(think), close, tokens.encode_text("\n\n"), *parts]
        self.ids: Int32Buffer = np.concatenate(parts)

    def reply(self, prompt: Int32Buffer) -> Int32Buffer:
        return self.ids

    def filler(self, prompt: Int32Buffer, i: int) -> int:
        return int(self.ids[i % len(self.ids)])


TEXT = "The quick brown fox jumps over the lazy dog."
THINK = "hello world"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Lines(TEXT, think=THINK)) as running:
        yield running


def body_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def test_an_answer_has_reasoning_content_and_usage(server: Served) -> None:
    """Thinking is apart from the text, under both names that clients read."""
    body = body_of(server.chat())
    (choice,) = body["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["message"]["reasoning_content"] == choice["message"]["reasoning"] == THINK
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    think = len(texts.tokenizer().encode_text(THINK)) + 1
    assert usage["completion_tokens_details"]["reasoning_tokens"] == think
    assert body["model"] == MODEL
    assert body["object"] == "chat.completion"


def test_a_stream_says_the_same_in_order(server: Served) -> None:
    """Role first, then reasoning, then content, the reason, the usage, and [DONE]."""
    response = server.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.rstrip().endswith("data: [DONE]")
    events: list[Any] = sse_events(response.text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [event["choices"][0]["delta"] for event in events[1:-2]]
    kinds = ["reasoning" if "reasoning" in delta else "content" for delta in deltas]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THINK
    assert "".join(delta.get("content", "") for delta in deltas) == TEXT
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"] == []
    assert all(event["usage"] is None for event in events[:-1])
    whole = body_of(server.chat())["usage"]
    assert events[-1]["usage"]["completion_tokens"] == whole["completion_tokens"]
    assert len({event["id"] for event in events}) == 1


def test_continuous_usage_counts_up(server: Served) -> None:
    """With continuous_usage_stats every chunk has the counts so far."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    events: list[Any] = sse_events(server.chat(stream=True, stream_options=options).text)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == body_of(server.chat())["usage"]["completion_tokens"]


def test_cached_tokens_are_the_reused_frontier(server: Served) -> None:
    """A conversation that goes on reuses everything up to the end of the reply before it (D21)."""
    long = "hello world " * 40
    first = body_of(server.chat(long, cache_salt="turns", return_token_ids=True))
    message = first["choices"][0]["message"]
    messages = [
        {"role": "user", "content": long},
        {"role": "assistant", **{k: message[k] for k in ("content", "reasoning_content")}},
        {"role": "user", "content": "okay"},
    ]
    fields = {"model": MODEL, "messages": messages, "cache_salt": "turns", "return_token_ids": True}
    second = body_of(server.client.post("/v1/chat/completions", json=fields))
    before = [*first["prompt_token_ids"], *first["choices"][0]["token_ids"]]
    assert second["prompt_token_ids"][: len(before)] == before
    # The stop token was chosen last and never processed.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(before) - 1
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_reply_that_streamed_is_found_again_too(server: Served) -> None:
    """The next turn after a streamed reply reuses its exact frontier as well."""
    long = "hello dog " * 40
    events: list[Any] = sse_events(
        server.chat(long, cache_salt="streamed", stream=True, return_token_ids=True).text
    )
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    messages = [
        {"role": "user", "content": long},
        {"role": "assistant", "content": TEXT, "reasoning": THINK},
        {"role": "user", "content": "okay"},
    ]
    fields = {"model": MODEL, "messages": messages, "cache_salt": "streamed"}
    second = body_of(server.client.post("/v1/chat/completions", json=fields))
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused == len(events[0]["prompt_token_ids"]) + len(ids) - 1


def test_salts_do_not_share(server: Served) -> None:
    """The same prompt under another cache_salt starts from nothing (D14)."""
    long = "brown fox " * 40
    for salt, least in (("a", 0), ("b", 0), ("a", 64)):
        usage = body_of(server.chat(long, cache_salt=salt))["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached >= least
        assert cached == 0 or least


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_before_it(server: Served, stream: bool) -> None:
    """Nothing of the stop string or after it is given out; the reason is stop."""
    response = server.chat(stop=["fox jumps", "never"], stream=stream)
    if stream:
        events: list[Any] = sse_events(response.text)
        content = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = body_of(response)["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
    assert content == TEXT[: TEXT.index("fox jumps")]
    assert reason == "stop"


def test_max_tokens_bounds_the_reply(server: Served) -> None:
    """max_completion_tokens counts before max_tokens; the reason is length."""
    body = body_of(server.chat(max_completion_tokens=3, max_tokens=9))
    assert body["usage"]["completion_tokens"] == 3
    assert body["choices"][0]["finish_reason"] == "length"


def test_ignore_eos_fills_the_length(server: Served) -> None:
    """With ignore_eos the reply is exactly as long as asked."""
    assert body_of(server.chat(ignore_eos=True, max_tokens=90))["usage"]["completion_tokens"] == 90


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_come_for_every_token_with_text(server: Served, stream: bool) -> None:
    """One entry a token, with as many alternatives as asked for, bytes included."""
    response = server.chat(logprobs=True, top_logprobs=2, max_tokens=6, return_token_ids=True, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in sse_events(response.text)]  # type: ignore[index]
    else:
        choices = body_of(response)["choices"]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    ids = [token for choice in choices for token in choice["token_ids"]]
    assert len(entries) == len(ids) == 6
    for token, entry in zip(ids, entries, strict=True):
        assert bytes(entry["bytes"]) == texts.tokenizer().token_bytes(token)
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0


def test_token_ids_are_the_same_streamed_or_not(server: Served) -> None:
    """return_token_ids: the prompt's on the first chunk, then each chunk's own."""
    whole = body_of(server.chat(return_token_ids=True))
    events: list[Any] = sse_events(server.chat(return_token_ids=True, stream=True).text)
    assert events[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = [token for event in events for token in event["choices"][0]["token_ids"]]
    assert ids == whole["choices"][0]["token_ids"]
    assert len(ids) == whole["usage"]["completion_tokens"]


def test_reasoning_effort_none_switches_thinking_off(server: Served) -> None:
    """The prompt then closes an empty think block; an explicit template switch has the last word."""

    def prompt_of(**fields: Any) -> list[int]:
        ids: list[int] = body_of(server.chat(return_token_ids=True, **fields))["prompt_token_ids"]
        return ids

    close = texts.special("</think>")
    assert close in prompt_of(reasoning_effort="none")
    assert close not in prompt_of(reasoning_effort="high")
    assert close not in prompt_of(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert close in prompt_of(chat_template_kwargs={"enable_thinking": False})


def test_tools_are_rendered_unless_ruled_out(server: Served) -> None:
    """tool_choice none leaves them out; auto and nothing put them in."""
    tool = {"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}

    def size(**fields: Any) -> int:
        return int(body_of(server.chat(tools=[tool], **fields))["usage"]["prompt_tokens"])

    assert size() == size(tool_choice="auto") > size(tool_choice="none")


def test_content_parts_and_developer_are_plain_forms(server: Served) -> None:
    """A list of text parts reads as their text in one; developer is system."""

    def ids(messages: object) -> object:
        fields = {"model": MODEL, "messages": messages, "return_token_ids": True}
        return body_of(server.client.post("/v1/chat/completions", json=fields))["prompt_token_ids"]

    plain = ids([{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello world"}])
    parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "world"}]
    assert plain == ids([{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}])


def test_64_clients_at_once_are_all_served(server: Served) -> None:
    """More clients than lanes wait their turn; everyone gets the whole text."""
    with ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(lambda i: server.chat(f"hello {i}", stream=bool(i % 2)), range(64)))
    for i, answer in enumerate(answers):
        assert answer.status_code == 200
        if i % 2:
            events: list[Any] = sse_events(answer.text)
            text = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
        else:
            text = answer.json()["choices"][0]["message"]["content"]
        assert text == TEXT
    server.idle()
