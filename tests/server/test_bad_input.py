"""What must be refused, with its status, its field, the value and the bound; the server goes on (D11)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import numpy as np
import pytest

from hpc_server.options import ServerOptions
from tests.server.served import MODEL, Served, plain_replies, served

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
COMPLETION = {"model": MODEL, "prompt": "hello", "max_tokens": 2}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    options = ServerOptions(model=MODEL, aliases=("other/name",), max_body_bytes=200_000)
    with served(plain_replies(2), server=options) as running:
        yield running


def refused(response: httpx.Response, status: int, param: str | None, *words: str) -> None:
    error = response.json()["error"]
    assert response.status_code == status, error
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


SHARED = [
    ("model", "unknown", 404, ["'unknown'"]),
    ("model", 3, 400, ["3", "string"]),
    ("max_tokens", 0, 400, ["0", "[1, 2048]"]),
    ("max_tokens", -1, 400, ["-1", "[1, 2048]"]),
    ("max_tokens", 10**40, 400, ["41 digits", "[1, 2048]"]),
    ("max_tokens", 1.5, 400, ["1.5", "integer"]),
    ("max_tokens", True, 400, ["true", "integer"]),
    ("max_tokens", "12", 400, ["'12'"]),
    ("temperature", -0.1, 400, ["-0.1", "[0, 2]"]),
    ("temperature", 2.1, 400, ["2.1"]),
    ("temperature", "hot", 400, ["'hot'"]),
    ("temperature", False, 400, ["false"]),
    ("temperature", [1], 400, ["a list of 1 items"]),
    ("temperature", 10**400, 400, ["401 digits"]),
    ("top_p", 0, 400, ["(0, 1]"]),
    ("top_p", 1.01, 400, ["(0, 1]"]),
    ("top_k", -2, 400, ["-2"]),
    ("top_k", 2.5, 400, ["2.5"]),
    ("min_p", 1.5, 400, ["[0, 1]"]),
    ("presence_penalty", 2.5, 400, ["[-2, 2]"]),
    ("frequency_penalty", -2.5, 400, ["[-2, 2]"]),
    ("repetition_penalty", 0, 400, ["[0.01, 10]"]),
    ("repetition_penalty", 1e-300, 400, ["1e-300", "[0.01, 10]"]),
    ("seed", 2**64, 400, ["seed"]),
    ("seed", "x", 400, ["seed"]),
    ("n", 2, 400, ["one choice"]),
    ("n", 0, 400, ["0"]),
    ("stop", 5, 400, ["5"]),
    ("stop", ["a"] * 5, 400, ["at most 4"]),
    ("stop", {"a": 1}, 400, ["an object"]),
    ("stream", "yes", 400, ["true or false"]),
    ("stream_options", {"include_usage": True}, 400, ["stream"]),
    ("ignore_eos", 1, 400, ["true or false"]),
    ("logit_bias", [], 400, ["object"]),
    ("cache_salt", "x" * 257, 400, ["256"]),
    ("cache_prompt", "no", 400, ["true or false"]),
    ("return_token_ids", 0, 400, ["true or false"]),
]


@pytest.mark.parametrize(("field", "value", "status", "words"), SHARED)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_shared_fields_out_of_range(
    server: Served, path: str, field: str, value: object, status: int, words: list[str]
) -> None:
    """Wrong types, negative, huge and boolean numbers name the field, the value and the bound."""
    base = CHAT if path.startswith("chat") else COMPLETION
    response = server.client.post(f"/v1/{path}", content=json.dumps({**base, field: value}))
    refused(response, status, field, *words)


def user(content: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content}]


CHAT_ONLY: list[tuple[dict[str, object], str, list[str]]] = [
    ({"messages": []}, "messages", ["at least one"]),
    ({"messages": None}, "messages", ["null"]),
    ({"messages": "hi"}, "messages", ["'hi'"]),
    ({"messages": ["hi"]}, "messages[0]", ["an object"]),
    ({"messages": [{"content": "x"}]}, "messages[0].role", ["assistant"]),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", ["'wizard'"]),
    ({"messages": [{"role": "user"}]}, "messages[0].content", ["string"]),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", ["5"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        ["text"],
    ),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]", ["an object"]),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        ["null"],
    ),
    ({"top_logprobs": 3}, "top_logprobs", ["logprobs is true"]),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", ["[0, 20]"]),
    ({"logprobs": 2}, "logprobs", ["true or false"]),
    ({"tool_choice": "required"}, "tool_choice", ["none or auto"]),
    ({"tool_choice": {"type": "function"}}, "tool_choice", ["none or auto"]),
    ({"tools": {}}, "tools", ["a list"]),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", ["'web_search'"]),
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["null"]),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", ["not empty"]),
    ({"response_format": {"type": "json_object"}}, "response_format.type", ["'json_object'"]),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", ["minimal"]),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", ["object"]),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize", ["enable_thinking"]),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens", ["[1, 2048]"]),
    ({"logit_bias": {"-1": 1}}, "logit_bias", ["'-1'"]),
    ({"logit_bias": {"9" * 40: 1}}, "logit_bias", ["40 characters"]),
    ({"logit_bias": {"5": 101}}, "logit_bias.5", ["[-100, 100]"]),
    ({"logit_bias": {"5": None}}, "logit_bias.5", ["null"]),
    ({"logit_bias": {str(i): 0 for i in range(1025)}}, "logit_bias", ["1024"]),
    ({"stop": ["ok", ""]}, "stop[1]", ["not empty"]),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", ["true"]),
]


@pytest.mark.parametrize(("change", "param", "words"), CHAT_ONLY)
def test_chat_fields_out_of_range(
    server: Served, change: dict[str, object], param: str, words: list[str]
) -> None:
    """Messages, tools and chat's own settings."""
    refused(server.client.post("/v1/chat/completions", json={**CHAT, **change}), 400, param, *words)


COMPLETION_ONLY: list[tuple[dict[str, object], str, list[str]]] = [
    ({"prompt": None}, "prompt", ["null"]),
    ({"prompt": ""}, "prompt", ["empty"]),
    ({"prompt": []}, "prompt", ["empty"]),
    ({"prompt": {}}, "prompt", ["an object"]),
    ({"prompt": ["a", "b"]}, "prompt", ["one prompt"]),
    ({"prompt": [[1], [2]]}, "prompt", ["one prompt"]),
    ({"prompt": [[[1]]]}, "prompt[0]", ["one prompt"]),
    ({"prompt": [1, -1]}, "prompt[1]", ["-1"]),
    ({"prompt": [10**6]}, "prompt[0]", ["1000000"]),
    ({"prompt": [True]}, "prompt[0]", ["true"]),
    ({"prompt": [1.0]}, "prompt[0]", ["1.0"]),
    ({"echo": True}, "echo", ["false"]),
    ({"best_of": 2}, "best_of", ["2"]),
    ({"suffix": "x"}, "suffix", ["absent"]),
    ({"logprobs": 21}, "logprobs", ["[0, 20]"]),
    ({"logprobs": True}, "logprobs", ["true"]),
]


@pytest.mark.parametrize(("change", "param", "words"), COMPLETION_ONLY)
def test_completion_fields_out_of_range(
    server: Served, change: dict[str, object], param: str, words: list[str]
) -> None:
    """Prompts of every wrong form, and settings that are not offered."""
    refused(server.client.post("/v1/completions", json={**COMPLETION, **change}), 400, param, *words)


BODIES: list[tuple[bytes, list[str]]] = [
    (b"", ["not JSON"]),
    (b"{", ["not JSON"]),
    (b"[]", ["object"]),
    (b'"x"', ["object"]),
    (b'{"a": NaN}', ["NaN"]),
    (b'{"a": -Infinity}', ["Infinity"]),
    (b'{"a": 1e999}', ["double"]),
    (b'{"a": ' + b"9" * 5000 + b"}", ["digits"]),
    (b'{"model": "x", "model": "y"}', ["'model' twice"]),
    (b'{"a": "\xff"}', ["UTF-8", "0xff"]),
    (b'{"a": "\\ud800"}', ["U+D800"]),
    (b'{"\\udfff": 1}', ["U+DFFF"]),
    (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", ["64 levels"]),
    (b"[" * 90_000, ["64 levels"]),
    (b'{"a": ' * 20_000, ["64 levels"]),
    (b"\x00", ["not JSON"]),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
def test_bodies_that_are_not_a_json_object(server: Served, body: bytes, words: list[str]) -> None:
    """Text that two parsers could read differently is refused as a whole."""
    refused(server.client.post("/v1/chat/completions", content=body), 400, None, *words)


def test_a_body_over_the_limit_is_413(server: Served) -> None:
    """Declared or not, a long body is refused before it is parsed."""
    long = json.dumps({**CHAT, "user": "x" * 300_000})
    refused(server.client.post("/v1/chat/completions", content=long), 413, None, "200000")

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    refused(server.client.post("/v1/chat/completions", content=chunks()), 413, None, "200000")


def test_a_prompt_longer_than_the_context_says_both_numbers(server: Served) -> None:
    """context_length_exceeded with the prompt's tokens and the context's."""
    for size in (2048, 5000):
        response = server.complete([320] * size)
        refused(response, 400, "prompt", str(size), "2048")
        assert response.json()["error"]["code"] == "context_length_exceeded"
    long = server.chat("hello " * 2500)
    refused(long, 400, "messages", "2048")
    assert long.json()["error"]["code"] == "context_length_exceeded"


def test_unknown_models_and_routes(server: Served) -> None:
    """Aliases are answered to; unknown names and routes have the error's shape."""
    assert server.client.post("/v1/chat/completions", json={**CHAT, "model": "other/name"}).status_code == 200
    assert server.client.get("/v1/models/other/name").json()["id"] == "other/name"
    refused(server.client.get("/v1/models/nobody"), 404, "model")
    refused(server.client.get("/v1/nothing"), 404, None)
    refused(server.client.get("/v1/chat/completions"), 405, None)
    refused(server.client.post("/health"), 405, None)


def test_unknown_fields_are_counted_and_logged_once_a_client(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """They are ignored by default; the log has no flood of them (D11)."""
    body = {**CHAT, "frobnicate": 1}
    for _ in range(3):
        assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    lines = [record for record in caplog.records if "frobnicate" in record.getMessage()]
    assert len(lines) == 1
    assert 'hpc_request_adjustments_total{reason="unknown_field"} 3.0' in server.client.get("/metrics").text


def test_known_but_meaningless_fields_are_ignored_quietly(server: Served) -> None:
    """Fields that common clients send raise nothing and change nothing."""
    body = {**CHAT, "user": "me", "store": False, "metadata": {}, "service_tier": "auto", "n": 1}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200


def test_strict_mode_refuses_unknown_fields() -> None:
    """--strict-requests turns an unknown field, also inside a message, into an error."""
    with served(plain_replies(2), server=ServerOptions(model=MODEL, strict=True)) as strict:
        assert strict.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        refused(strict.client.post("/v1/chat/completions", json={**CHAT, "zap": 1}), 400, "zap")
        refused(strict.client.post("/v1/completions", json={**COMPLETION, "zap": 1}), 400, "zap")
        odd = {**CHAT, "messages": [{"role": "user", "content": "x", "zap": 1}]}
        refused(strict.client.post("/v1/chat/completions", json=odd), 400, "messages.zap")


def test_mutated_bodies_never_break_the_server(server: Served) -> None:
    """A few hundred seeded mutations: only 200 or a 4xx in the error's shape, and all ledgers balance."""
    rng = np.random.default_rng(5)
    odd: list[object] = [
        None, True, -1, 0, 2**63, 1e308, -0.0, "", "\u0000", "x" * 3000, [], [[]], {}, {"a": None}, ["", 1],
    ]  # fmt: skip
    seeds = [
        (
            "chat/completions",
            {**CHAT, "stop": ["x"], "seed": 1, "tools": [], "logprobs": True, "top_logprobs": 2},
        ),
        ("completions", {**COMPLETION, "logit_bias": {"3": 1}, "stream": False, "prompt": [1, 2, 3]}),
    ]
    for i in range(400):
        path, body = seeds[i % 2]
        changed: dict[str, object] = dict(body)
        for _ in range(int(rng.integers(1, 4))):
            changed[str(rng.choice(list(body)))] = odd[int(rng.integers(len(odd)))]
        data = bytearray(json.dumps(changed).encode())
        if rng.random() < 0.5:
            for _ in range(int(rng.integers(1, 4))):
                data[int(rng.integers(len(data)))] = int(rng.integers(256))
        response = server.client.post(f"/v1/{path}", content=bytes(data))
        assert response.status_code == 200 or 400 <= response.status_code < 500, bytes(data)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    server.idle()
    assert server.client.get("/health").status_code == 200


LONG = {"word": "hello world ", "letter": "a", "white": " ", "lines": "\\n", "emoji": "\U0001f600"}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_body_full_of_text_is_refused_at_once(path: str, text: str) -> None:
    """Megabytes in one string: 400 for the context's length, without encoding or keeping them."""
    content = f"a{text * ((6 << 20) // len(text.encode()))}a"  # templates may trim white space
    body = CHAT | {"messages": [{"role": "user", "content": content}]}
    if path == "completions":
        body = COMPLETION | {"prompt": content}
    with served(plain_replies(2)) as running:
        began = time.monotonic()
        answer = running.client.post(f"/v1/{path}", json=body)
        assert time.monotonic() - began < 2.0
        refused(answer, 400, "messages" if path.startswith("chat") else "prompt", "2048")
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert running.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('{"a": 1e999}', "range of a double"),
        ('{"a": NaN}', "NaN"),
        ('{"a": ' + "9" * 5000 + "}", "too many digits"),
        ("[" * 100_000, "too deep"),
        ("{bad", "not JSON"),
    ],
)
def test_arguments_of_a_call_are_json(server: Served, arguments: str, words: str) -> None:
    """Text of echoed tool calls is read as strictly as a body, and no internals show."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    answer = server.client.post("/v1/chat/completions", json=CHAT | {"messages": messages})
    refused(answer, 400, "messages[1].tool_calls[0].function.arguments", words)
    assert "sys." not in answer.text


def test_long_names_are_not_echoed(server: Served) -> None:
    """An error text stays short whatever it is about."""
    body = CHAT | {"chat_template_kwargs": {"a" * 10_000: 1}}
    assert len(server.client.post("/v1/chat/completions", json=body).text) < 500
