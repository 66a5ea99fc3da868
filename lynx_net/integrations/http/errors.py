"""Errors that a client sees, in the shape of OpenAI's API: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from lynx_net.errors import LynxError

__all__ = ["ApiError", "bad_request", "overloaded", "unavailable", "upstream_failed"]


class ApiError(LynxError):
    """A request that is answered with an error.

    Attributes:
        status: of HTTP.
        kind: the API's `type`.
        code: a word for programs, or None.
        param: the field that is wrong, or None.
        retry_after_s: when another try makes sense, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int,
        kind: str,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """What the answer's headers say of it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


def bad_request(message: str, param: str | None = None, code: str | None = None, status: int = 400) -> ApiError:
    """The client must change its request."""
    return ApiError(message, status=status, kind="invalid_request_error", code=code, param=param)


def overloaded(message: str, retry_after_s: int) -> ApiError:
    """The queue is full."""
    return ApiError(message, status=429, kind="rate_limit_error", code="queue_full", retry_after_s=retry_after_s)


def unavailable(message: str, code: str, retry_after_s: int = 1) -> ApiError:
    """Not now: the server starts, or ends, or has nobody who computes caches."""
    return ApiError(message, status=503, kind="server_error", code=code, retry_after_s=retry_after_s)


def upstream_failed(message: str) -> ApiError:
    """The prefill server, or the way of the cache from there, failed."""
    return ApiError(message, status=502, kind="server_error", code="cache_failed")
