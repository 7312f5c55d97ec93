"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from hpc_server.events import FailureKind

__all__ = ["RequestError", "from_failure", "not_valid"]


class RequestError(Exception):
    """What a client is told instead of an answer.

    status: HTTP status. kind: error.type. param: the field. code: for programs to read.
    """

    def __init__(
        self, status: int, message: str, *, kind: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code

    def body(self) -> dict[str, object]:
        """The JSON body."""
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code},
        }


def not_valid(param: str | None, message: str, *, code: str | None = None, status: int = 400) -> RequestError:
    """A request that the client must change; message names value and bound."""
    text = message if param is None else f"{param}: {message}"
    return RequestError(status, text, kind="invalid_request_error", param=param, code=code)


_FAILURES = {
    FailureKind.INFEASIBLE: (400, "invalid_request_error", "capacity_exceeded"),
    FailureKind.PROGRAM: (500, "server_error", "model_failed"),
    FailureKind.STOPPING: (503, "service_unavailable", "shutting_down"),
    FailureKind.UNHEALTHY: (503, "service_unavailable", "engine_unhealthy"),
    FailureKind.QUEUE_FULL: (429, "rate_limit_error", "server_overloaded"),
}


def from_failure(kind: FailureKind, message: str) -> RequestError:
    """The answer for a request that the engine refused or could not finish."""
    status, name, code = _FAILURES[kind]
    return RequestError(status, message, kind=name, code=code)
