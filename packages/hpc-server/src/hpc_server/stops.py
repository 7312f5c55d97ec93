"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from hpc_server.text_errors import FrontendError

__all__ = ["MAX_STOPS", "MAX_STOP_CHARS", "StopMatcher"]

MAX_STOPS = 16
"""Most stop strings of a request. OpenAI's bound is 4; clients of other servers send more."""
MAX_STOP_CHARS = 1024
"""Longest stop string: text is held back for at most this many characters."""


class StopMatcher:
    """Finds the stop string that is complete first, and holds back text that may become one.

    Text is read one character at a time (Knuth, Morris and Pratt), so how it is cut into pieces makes no
    difference, and a hostile stop string costs no more than a kind one. Of the stop strings that end at
    one character the longest counts. Nothing of a stop string is ever given out. Mutable, one a reply.

    found: the stop string that was hit.
    """

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        """stops: at most MAX_STOPS strings of 1..MAX_STOP_CHARS characters.

        Raises:
            FrontendError: a stop string that is empty or too long, or too many of them.
        """
        if len(stops) > MAX_STOPS:
            raise FrontendError("stop", f"{len(stops)} stop strings, at most {MAX_STOPS}")
        for i, stop in enumerate(stops):
            if not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise FrontendError(f"stop[{i}]", f"{len(stop)} characters, need 1 to {MAX_STOP_CHARS}")
        self.found: str | None = None
        self._trackers = [_Tracker(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._held = ""

    def feed(self, text: str) -> str:
        """The part of all text so far that can be given out now. Nothing once a stop string was found."""
        if self.found is not None:
            return ""
        if not self._trackers:
            return text
        known = self._held + text
        for at, char in enumerate(text, start=len(self._held) + 1):
            complete = [tracker.stop for tracker in self._trackers if tracker.step(char)]
            if complete:
                self.found = complete[0]
                self._held = ""
                return known[: at - len(self.found)]
        cut = len(known) - max(tracker.matched for tracker in self._trackers)
        self._held = known[cut:]
        return known[:cut]

    def flush(self) -> str:
        """The text held back, at the end: it became no stop string."""
        held, self._held = self._held, ""
        return held


class _Tracker:
    """How much of one stop string the text read so far ends with."""

    __slots__ = ("_shorter", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _shorter[k]: the longest proper beginning of `stop` that stop[:k] ends with.
        self._shorter = [0, 0]
        for k in range(1, len(stop)):
            self._shorter.append(self._extend(self._shorter[k], stop[k]))

    def step(self, char: str) -> bool:
        """Read one character; is the stop string complete with it?"""
        self.matched = self._extend(self.matched, char)
        return self.matched == len(self.stop)

    def _extend(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched]
        return matched + 1 if self.stop[matched] == char else 0
