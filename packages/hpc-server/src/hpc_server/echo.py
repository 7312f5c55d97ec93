"""Token-exact echo: the ids of a reply, kept until a client sends its text back (design D21).

Tokenising an echoed reply again rarely gives the generated ids, and one other id ends reuse there. So
the ids are kept, under a digest of what the reply says; no text is kept.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping

import attrs

from hpc_index.ids import Int32Buffer

__all__ = ["EchoContext", "EchoStore", "Kept", "ReplyParts"]

_ENTRY_BYTES = 1024
"""What an entry takes besides its ids: three digests, the record, its places in two tables and the LRU."""


@attrs.frozen
class ReplyParts:
    """What a reply says, as a client sees it.

    tool_calls: (name, arguments as JSON text) pairs. kept: ids whose text the client saw in full, None
    for all; then a stop string cut the reply, and `remainder` is the shown part of the id after them.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    kept: int | None = None
    remainder: str = ""


@attrs.frozen(eq=False)
class EchoContext:
    """What to record with the reply to one prompt.

    prompt: digest of the namespace and the tokens before the generation opener.
    opener: int32 [k], the opener's tokens. salt: namespace of the prompt (D14).
    """

    prompt: bytes
    opener: Int32Buffer
    salt: bytes


@attrs.frozen(eq=False)
class Kept:
    """A kept reply: `opener` and `ids`, int32, stand for its whole turn up to the end-of-turn token.

    thinks: it has reasoning that a template may strip from history.
    """

    opener: Int32Buffer
    ids: Int32Buffer
    said: bytes
    prompt: bytes
    parts: tuple[bytes, bytes, bytes]
    thinks: bool

    @property
    def size(self) -> int:
        """Bytes that it takes in the store."""
        return self.opener.nbytes + self.ids.nbytes + _ENTRY_BYTES


class EchoStore:
    """Kept replies, bounded in bytes, the least recently used one leaves first.

    A reply is found by what it says within its namespace; of several that say the same, the one that
    answered the same prompt is taken, or else the latest. Its methods may be called from any thread.
    """

    def __init__(self, capacity_bytes: int) -> None:
        """Raises ValueError for a negative capacity; 0 keeps nothing."""
        if capacity_bytes < 0:
            raise ValueError(f"echo capacity {capacity_bytes} bytes, need at least 0")
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._bytes = 0
        self._entries: OrderedDict[tuple[bytes, bytes], Kept] = (
            OrderedDict()
        )  # by (said, prompt), oldest first
        self._by_said: dict[bytes, dict[bytes, Kept]] = {}  # what it says -> prompt -> reply, latest last
        self._by_prompt: dict[bytes, Kept] = {}  # latest reply to a prompt
        self._counts: Counter[str] = Counter()

    def put(self, context: EchoContext, ids: Int32Buffer, parts: ReplyParts) -> None:
        """Keep a reply. One that says the same in answer to the same prompt is replaced."""
        digests = _digests(context.salt, parts)
        kept = Kept(
            opener=context.opener,
            ids=ids,
            said=b"".join(digests),
            prompt=context.prompt,
            parts=digests,
            thinks=bool(parts.reasoning.strip()),
        )
        with self._lock:
            self._remove((kept.said, kept.prompt))
            if kept.size > self._capacity:
                self._counts["echo_store.too_large"] += 1
                return
            while self._bytes + kept.size > self._capacity:
                self._remove(next(iter(self._entries)))
                self._counts["echo_store.evicted"] += 1
            self._entries[kept.said, kept.prompt] = kept
            self._by_said.setdefault(kept.said, {})[kept.prompt] = kept
            self._by_prompt[kept.prompt] = kept
            self._bytes += kept.size
            self._counts["echo_store.kept"] += 1

    def find(self, salt: bytes, prompt: bytes, parts: ReplyParts) -> Kept | str:
        """The reply that says this; or why there is none.

        `unknown`: never seen, or evicted. If the prompt before it was answered here, what differs from
        the answer: `reasoning_dropped`, `reasoning_edited`, `tool_calls_edited`, `content_edited`.
        """
        digests = _digests(salt, parts)
        said = b"".join(digests)
        with self._lock:
            same = self._by_said.get(said)
            if same:
                kept = same.get(prompt) or next(reversed(same.values()))
                self._entries.move_to_end((said, kept.prompt))
                return kept
            answer = self._by_prompt.get(prompt)
        if answer is None:
            return "unknown"
        if answer.parts[0] != digests[0]:
            return "content_edited"
        if answer.parts[2] != digests[2]:
            return "tool_calls_edited"
        return "reasoning_edited" if parts.reasoning.strip() else "reasoning_dropped"

    def counters(self) -> Mapping[str, int]:
        """What was kept, evicted and too large; `echo_store.bytes` is a gauge."""
        with self._lock:
            return {**self._counts, "echo_store.bytes": self._bytes}

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        kept = self._entries.pop(key, None)
        if kept is None:
            return
        self._bytes -= kept.size
        same = self._by_said[kept.said]
        del same[kept.prompt]
        if not same:
            del self._by_said[kept.said]
        if self._by_prompt.get(kept.prompt) is kept:
            del self._by_prompt[kept.prompt]


def _digests(salt: bytes, parts: ReplyParts) -> tuple[bytes, bytes, bytes]:
    """Digests of content, reasoning and tool calls within a namespace.

    White space at the ends is left out, since templates trim it; so are the order of arguments and the
    form of their JSON, since clients parse and print them (field report 36).
    """
    calls = [[name, _canonical(arguments)] for name, arguments in parts.tool_calls]
    return (
        _digest(salt, parts.content.strip()),
        _digest(salt, parts.reasoning.strip()),
        _digest(salt, json.dumps(calls) if calls else ""),
    )


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _digest(salt: bytes, text: str) -> bytes:
    """16 bytes, keyed by the namespace: no other namespace can name an entry of this one."""
    key = hashlib.blake2b(salt, digest_size=32).digest()
    return hashlib.blake2b(text.encode("utf-8", errors="surrogatepass"), key=key, digest_size=16).digest()
