"""The published Python client against a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.served import MODEL, Served, served
from tests.server.test_chat import TEXT, THINK, Lines


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(Lines(TEXT, think=THINK)) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    """An answer parses into the client's own types."""
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_stream(client: openai.OpenAI) -> None:
    """Chunks parse, text and reasoning add up, the usage comes last."""
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=1,
    )
    text, reasoning, usage = "", "", None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
    assert (text, reasoning) == (TEXT, THINK)
    assert usage is not None
    assert usage.completion_tokens > 0


def test_completions(client: openai.OpenAI) -> None:
    """The older endpoint, whole and streamed."""
    whole = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, logprobs=1)
    parts = client.completions.create(model=MODEL, prompt="hello", max_tokens=5, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    """Unknown models and bad values raise what the client's users catch."""
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match=r"temperature: is 9"):
        client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9
        )


def test_models(client: openai.OpenAI) -> None:
    """Listing and asking for one."""
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "hpc"


def test_the_async_client_cancels(server: Served) -> None:
    """Leaving an async stream early frees the lane."""

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.completions.create(
                model=MODEL, prompt="hello", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()

    asyncio.run(run())
    server.idle()
