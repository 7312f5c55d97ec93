"""Who may talk to the server (D27, trust T8 and T20)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.routing import Route

from hpc_server.app import create_app
from hpc_server.options import ServerOptions
from tests.server import texts
from tests.server.served import MODEL, Served, plain_replies, served

KEYS = ("first-key", "second-key")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Served]:
    with served(plain_replies(4), server=ServerOptions(model=MODEL, api_keys=KEYS)) as running:
        yield running


@pytest.fixture(scope="module")
def local() -> Iterator[Served]:
    options = ServerOptions(model=MODEL, allowed_hosts=ServerOptions.loopback_hosts())
    with served(plain_replies(4), server=options) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_every_route_but_health_needs_a_key(keyed: Served) -> None:
    """All routes of the app are asked without a key, with a wrong one and with a key in the query."""
    app = create_app(keyed.engine, texts.frontend(), ServerOptions(model=MODEL))
    paths = [route.path for route in app.routes if isinstance(route, Route)]
    assert len(paths) == 7
    for path in paths:
        target = path.replace("{id:path}", MODEL)
        for headers in ({}, bearer("wrong"), bearer("first-ke"), {"authorization": "Basic first-key"}):
            for url in (target, f"{target}?api_key=first-key"):
                answer = keyed.client.request("GET", url, headers=headers)
                if path == "/health":
                    assert answer.status_code == 200
                else:
                    assert answer.status_code == 401
                    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_any_of_the_keys_opens(keyed: Served) -> None:
    """Each key is good for the model list."""
    for key in KEYS:
        assert keyed.client.get("/v1/models", headers=bearer(key)).status_code == 200


def test_keys_do_not_share_cache(keyed: Served) -> None:
    """Of two keys neither sees what the other's prompts left (D14)."""
    body = {"model": MODEL, "prompt": [320 + i % 50 for i in range(120)], "max_tokens": 2}

    def cached(key: str) -> int:
        answer = keyed.client.post("/v1/completions", json=body, headers=bearer(key))
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("first-key") == 0
    assert cached("second-key") == 0
    assert cached("first-key") >= 64


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "localhost.evil.example", "[::2]", ""])
def test_a_foreign_host_name_is_refused(local: Served, host: str) -> None:
    """A name that someone pointed at loopback does not work (DNS rebinding)."""
    answer = local.client.get("/v1/models", headers={"host": host})
    assert answer.status_code == 403
    assert answer.json()["error"]["code"] == "forbidden_host"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
def test_loopback_names_are_answered_to(local: Served, host: str) -> None:
    """With or without port, in any case of letters."""
    assert local.client.get("/v1/models", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_origins_are_refused(local: Served, method: str) -> None:
    """A request with a foreign Origin, a preflight included, gets 403."""
    for origin in ("http://evil.example", "null", "http://[", "https://localhost.evil.example"):
        answer = local.client.request(method, "/v1/chat/completions", headers={"origin": origin})
        assert answer.status_code == 403
